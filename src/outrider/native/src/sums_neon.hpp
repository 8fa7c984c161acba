// Sums by the word products of Advanced SIMD.
#pragma once

#include "codes_neon.hpp"

namespace outrider {

constexpr int DIGIT_BYTES = 2;
constexpr int MOST_SUMS = 16;  // registers that hold a block's sums

// The codes of four inputs as words, of each input those of all outputs.
struct WordCodes {
    int16x8_t of_input[4][2];
    template <int BITS, int P>
    static WordCodes of(const std::uint8_t* cell, const std::uint8_t* map) {
        WordCodes to;
        for (int half = 0; half < 2; ++half) {
            const uint8x16_t a = codes_of<BITS, P>(cell + half * 32, map);
            const uint8x16_t b = codes_of<BITS, P>(cell + half * 32 + 16, map);
            // Of the first and the third input, of the second and the fourth.
            const uint8x16_t odd = vuzp1q_u8(a, b), even = vuzp2q_u8(a, b);
            const uint8x16_t of[4] = {vuzp1q_u8(odd, odd), vuzp1q_u8(even, even),
                                      vuzp2q_u8(odd, odd), vuzp2q_u8(even, even)};
            for (int i = 0; i < 4; ++i)
                to.of_input[i][half] = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(of[i])));
        }
        return to;
    }
};

struct Sums {
    using FourCodes = WordCodes;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 4, ROWS = 4;
    Ints sum;
    Sums() : sum(ints(0)) {}
    Sums(Ints zeros, const void* less) : sum(begun(zeros, less)) {}
    [[gnu::always_inline]] void add(const FourCodes& codes, const std::int8_t* row, int, int at) {
        std::int16_t digits[4];
        std::memcpy(digits, row + 2 * at, 8);
        const int16x4_t four = vld1_s16(digits);
        add_input(codes.of_input[0], vdup_lane_s16(four, 0));
        add_input(codes.of_input[1], vdup_lane_s16(four, 1));
        add_input(codes.of_input[2], vdup_lane_s16(four, 2));
        add_input(codes.of_input[3], vdup_lane_s16(four, 3));
    }
    void settle() {}
    Ints all() const { return sum; }

private:
    [[gnu::always_inline]] void add_input(const int16x8_t (&codes)[2], int16x4_t digit) {
        for (int half = 0; half < 2; ++half) {
            int32x4_t* to = sum.v + 2 * half;
            to[0] = pinned(vmlal_s16(to[0], vget_low_s16(codes[half]), digit));
            to[1] = pinned(vmlal_s16(to[1], vget_high_s16(codes[half]), digit));
        }
    }
};
template <int BITS>
using Short = Sums;

inline void put_digits(std::int8_t* row, int, int at, Ints digits, bool) {
    for (int i = 0; i < 4; ++i) {
        const int16x4_t words = vmovn_s32(digits.v[i]);
        std::memcpy(row + 2 * (at + 4 * i), &words, 8);
    }
}

struct WordProducts {
    static constexpr int PRODUCTS = 4;
    static Register add(Register sum, Register a, Register b) {
        return vmlal_s16(sum, vget_low_s16(vreinterpretq_s16_s32(a)),
                         vget_low_s16(vreinterpretq_s16_s32(b)));
    }
};
using ByteProducts = WordProducts;
using NibbleProducts = WordProducts;

}  // namespace outrider
