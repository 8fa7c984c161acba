// Sums one by one.
#pragma once

#include "isa.hpp"
#include "packed.hpp"

namespace outrider {

constexpr int DIGIT_BYTES = 2;
constexpr int MOST_SUMS = 1;

// The codes of four inputs, as bytes.
struct ByteCodes {
    std::uint8_t bytes[64];
    // Step P of a cell, see packed.hpp.
    template <int BITS, int P>
    static ByteCodes of(const std::uint8_t* cell, const std::uint8_t* map) {
        ByteCodes to;
        for (int i = 0; i < 64; ++i) {
            auto line = [&](int j) { return cell[j * 64 + i]; };
            if constexpr (BITS == 8) {
                to.bytes[i] = line(P);
            } else if constexpr (BITS <= 3 && BITS != MAPPED) {
                const int third = BITS == 3 ? (line(2) >> P & 1) << 2 : 0;
                to.bytes[i] = std::uint8_t((line(P / 4) >> P % 4 * 2 & 3) | third);
            } else {
                const int four = line(P / 2) >> P % 2 * 4 & 15;
                const int more = BITS == 5   ? (line(4) >> P & 1) << 4
                                 : BITS == 6 ? (line(4 + P / 4) >> P % 4 * 2 & 3) << 4
                                             : 0;
                to.bytes[i] = BITS == MAPPED ? map[four] : std::uint8_t(four | more);
            }
        }
        return to;
    }
};

struct Sums {
    using FourCodes = ByteCodes;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 1, ROWS = 2;
    Ints sum;
    Sums() : sum(ints(0)) {}
    Sums(Ints zeros, const void* less) {
        std::int16_t both[2];
        std::memcpy(both, less, 4);
        sum = each_int([&](int i) { return (zeros.v[i] & 255) * (both[0] + 128 * both[1]); });
    }
    void add(const FourCodes& codes, const std::int8_t* row, int, int at) {
        std::int16_t d[4];
        std::memcpy(d, row + 2 * at, 8);
        for (int i = 0; i < LANES; ++i) {
            auto code = [&](int j) { return int(codes.bytes[4 * i + j]); };
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
