// Matrices of 2 to 8 bits, packed for products.
#pragma once

#include <cstddef>

#include "memory.hpp"
#include "numbers.hpp"

namespace outrider {

constexpr int LONGEST_BLOCK = 128;
// Codes stand in cells of 32 inputs and 16 outputs.
constexpr int CELL = 32;

// How many bits codes have, and how they stand in a cell. It is made of lines of 64 bytes, [16
// outputs][4]; step p is the inputs 4p to 4p + 3, one to each of an output's four bytes.
//   8 bits: line p has step p.
//   4 bits: line p / 2 has step p, in the low nibbles where p is even.
//   5 and 6 bits: as 4 bits; the fifth bit of step p is bit p of the fifth line, the fifth and
//     sixth of step p are bits 2 (p % 4) and up of the fifth or sixth line.
//   2 bits: bits 2 (p % 4) and up of line p / 4.
//   3 bits: as 2 bits; the third bit of step p is bit p of the third line.
// MAPPED: as 4 bits, numbers of a table of sixteen codes of 8 bits.
constexpr int MAPPED = 0;
constexpr int lines_of(int bits) { return bits == MAPPED ? 4 : bits; }
// Whether blocks are of 16 inputs, so that a cell holds two.
constexpr bool halved(int bits) { return bits == 2 || bits == 3 || bits == 6; }

// What a block of activations brings along.
struct BlockSummary {
    float scale, minus;      // -(sum of the digits) * scale
    std::int16_t low, high;  // -(sum of the digits) = low + 128 * high
};

// How scales are stored, in records one behind the other for each unit.
enum class Scaling {
    halves,   // fp16 for each group
    wides,    // bf16 for each group
    steps,    // fp16 for eight or sixteen groups, times int8 for each group
    nibbles,  // fp16 for sixteen groups, times the low nibbles of a byte for each
};

// How a matrix [out, in] is packed, w = scale * (code - zero) - less, in units of 16 outputs.
// Inputs are padded group by group: one of up to 128 is a block, a longer one several of 128. Zeros
// stand in for what pads.
//
// A record has the scales of its groups, [16] numbers of 16 bits, the same of `less` if there are
// any, and then for every group [16] int8 or, in nibbles, scale and less, and if there are any [16]
// int8 of every group's `less`.
struct Coding {
    float factor = 1;  // a power of two
    Scaling scaling = Scaling::halves;
    bool lessened = false;           // whether there is a `less`
    int record = 0, per_record = 1;  // bytes of a record, groups of a record
    int zero = 0;
    std::uint8_t map[16] = {};  // of MAPPED codes
    int in = 0, bits = 0;
    int group = 0, groups = 0;
    int block = 0, split = 0;  // padded inputs of a block (16, 32, 64, 128), blocks of a group

    int blocks() const { return groups * split; }
    int width() const { return blocks() * block; }
    // Half of the bytes of a row of digits: an odd number of cache lines, since rows a power of two
    // apart would share few of the cache's sets.
    int half() const { return ((width() + 63) / 64 | 1) * 64; }
    std::size_t unit_size() const { return std::size_t(width()) / CELL * lines_of(bits) * 64; }
    std::size_t scales_size() const { return std::size_t(groups / per_record) * record; }
    // The first input of a block, and how many there are.
    int start(int b) const { return b / split * group + b % split * LONGEST_BLOCK; }
    int length(int b) const {
        int end = (b / split + 1) * group < in ? (b / split + 1) * group : in;
        int left = end - start(b);
        return left < 0 ? 0 : left < LONGEST_BLOCK ? left : LONGEST_BLOCK;
    }
    // Where in a record the 16 bytes of the group at `place` stand.
    int step_at(int place) const { return (lessened ? 64 : 32) + place * LANES; }
    int less_at(int place) const { return step_at(place) + per_record * LANES; }
};

struct Packed : Coding {
    Memory<std::uint8_t> codes;   // [units][cells][lines][16][4]
    Memory<std::uint8_t> scales;  // [units][records][record]; those of fp16 times `factor`
    Memory<std::uint8_t> zeros;   // [units][groups][16], or empty: `zero`
    Memory<float> bias;           // [units * 16] or empty
    int units = 0;

    bool empty() const { return units == 0; }
    std::size_t bytes() const {
        return codes.bytes() + scales.bytes() + zeros.bytes() + bias.bytes();
    }
    bool same(const Packed& other) const {
        return bits == other.bits && in == other.in && group == other.group &&
               factor == other.factor && scaling == other.scaling && zero == other.zero &&
               codes.same(other.codes) && scales.same(other.scales) && zeros.same(other.zeros) &&
               bias.same(other.bias) && !std::memcmp(map, other.map, sizeof map);
    }
    const std::uint8_t* record_of(int unit, int g) const {
        return records_of(unit) + std::size_t(g / per_record) * record;
    }
    const std::uint8_t* records_of(int unit) const { return scales.data() + unit * scales_size(); }
};

// Packs codes [out, in], scales and zeros [out, groups] (of `group` inputs each; `zeros` may be
// null) and bias [out] (null: none) in `parts` whose units take turns. Returns what is wrong with
// them, or null.
const char* pack(Packed& to, const std::uint8_t* codes, const float* scales,
                 const std::uint8_t* zeros, const float* bias, int out, int in, int bits, int group,
                 int groups, int parts);

// Puts the codes of 32 inputs of an output, four to a word, into its lane of a cell.
void encode(std::uint8_t* cell, int lane, int bits, const std::uint32_t codes[8]);

// Makes a matrix of zeros of so many rows, coded as another is.
Packed empty_like(const Packed& from, int rows);

// Copies a row of a matrix of one part to another that is coded as it is.
void copy_row(Packed& to, int place, const Packed& from, int row);

// Writes a row of a matrix of one part: `in` numbers.
void unpack_row(const Packed& m, int row, float* to);

}  // namespace outrider
