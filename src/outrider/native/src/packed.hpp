// Matrices of 4 or 8 bits, packed for products.
#pragma once

#include <cstddef>

#include "memory.hpp"
#include "numbers.hpp"

namespace outrider {

constexpr int LONGEST_BLOCK = 128;

// What a block of activations brings along.
struct BlockSummary {
    float scale;
    std::int16_t low, high;  // -(sum of the digits) = low + 128 * high
};

// A matrix [out, in], w = scale * (code - zero), in units of 16 outputs. Inputs are padded group by
// group: one of up to 128 is a block, a longer one several of 128. Zeros stand in for what pads.
struct Packed {
    Memory<std::uint8_t> codes;    // [units][blocks][inputs of a block][16], see sums.hpp
    Memory<std::uint16_t> scales;  // fp16 [units][groups][16], times `factor`
    Memory<std::uint8_t> zeros;    // [units][groups][16], or empty: 2^(bits - 1)
    Memory<float> bias;            // [units * 16] or empty
    float factor = 1;              // a power of two
    int units = 0, in = 0, bits = 0;
    int group = 0, groups = 0;
    int block = 0, split = 0;  // padded inputs of a block (32, 64 or 128), blocks of a group

    bool empty() const { return units == 0; }
    std::size_t bytes() const {
        return codes.bytes() + scales.bytes() + zeros.bytes() + bias.bytes();
    }
    bool same(const Packed& other) const {
        return bits == other.bits && in == other.in && group == other.group &&
               factor == other.factor && codes.same(other.codes) && scales.same(other.scales) &&
               zeros.same(other.zeros) && bias.same(other.bias);
    }
    int blocks() const { return groups * split; }
    int width() const { return blocks() * block; }
    // Half of the bytes of a row of digits: an odd number of cache lines, since rows a power of two
    // apart would share few of the cache's sets.
    int half() const { return ((width() + 63) / 64 | 1) * 64; }
    std::size_t unit_size() const { return std::size_t(width()) * LANES * bits / 8; }
    // The first input of a block, and how many there are.
    int start(int b) const { return b / split * group + b % split * LONGEST_BLOCK; }
    int length(int b) const {
        int end = (b / split + 1) * group < in ? (b / split + 1) * group : in;
        int left = end - start(b);
        return left < 0 ? 0 : left < LONGEST_BLOCK ? left : LONGEST_BLOCK;
    }
};

// Packs codes [out, in], scales and zeros [out, groups] (of `group` inputs each; `zeros` may be
// null) and bias [out] (null: none) in `parts` whose units take turns. Returns what is wrong with
// them, or null.
const char* pack(Packed& to, const std::uint8_t* codes, const float* scales,
                 const std::uint8_t* zeros, const float* bias, int out, int in, int bits, int group,
                 int groups, int parts);

// Writes a row of a matrix of one part: `in` numbers.
void unpack_row(const Packed& m, int row, float* to);

}  // namespace outrider
