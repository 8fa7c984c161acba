// Sums one by one.
#pragma once

#include "isa.hpp"
#include "packed.hpp"

namespace outrider {

constexpr int DIGIT_BYTES = 2;
constexpr int MOST_SUMS = 1;

template <int BITS>
struct Codes {
    std::uint8_t bytes[64];
    Codes() = default;
    explicit Codes(const std::uint8_t* p) { std::memcpy(bytes, p, 64); }
};
// The codes of four inputs, where they stand.
struct CodesInPlace {
    const std::uint8_t* bytes;
    int shift, mask;
    CodesInPlace() = default;
    template <int BITS>
    CodesInPlace(const Codes<BITS>& codes, int p)
        : bytes(codes.bytes), shift(4 * p), mask((1 << BITS) - 1) {}
};

struct Sums {
    using FourCodes = CodesInPlace;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 1, ROWS = 2;
    Ints sum;
    Sums() : sum(ints(0)) {}
    Sums(Ints zeros, const BlockSummary& block)
        : sum(each_int(
              [&](int i) { return (zeros.v[i] & 255) * (block.low + 128 * block.high); })) {}
    void add(const FourCodes& codes, const std::int8_t* row, int, int at) {
        std::int16_t d[4];
        std::memcpy(d, row + 2 * at, 8);
        for (int i = 0; i < LANES; ++i) {
            auto code = [&](int j) { return codes.bytes[4 * i + j] >> codes.shift & codes.mask; };
            sum.v[i] += code(0) * d[0] + code(2) * d[1] + code(1) * d[2] + code(3) * d[3];
        }
    }
    void settle() {}
    Ints all() const { return sum; }
};
template <int BITS>
using Short = Sums;

inline void put_digits(std::int8_t* row, int, int at, Ints digits, bool) {
    for (int i = 0; i < LANES; ++i) {
        const int place = i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
        const std::int16_t digit = std::int16_t(digits.v[i]);
        std::memcpy(row + 2 * (at + place), &digit, 2);
    }
}

using WordProducts = FloatProducts;
using ByteProducts = FloatProducts;
using NibbleProducts = FloatProducts;

}  // namespace outrider
