// Sums by the byte products of Arm's dot products.
#pragma once

#include "codes_neon.hpp"

namespace outrider {

constexpr int DIGIT_BYTES = 1;  // from a digit to the next
constexpr int MOST_SUMS = 16;   // registers that hold a block's sums

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool SIGNED_CODES = false;
inline int32x4_t with_products(int32x4_t sum, uint8x16_t codes, int8x8_t digits) {
    return vusdotq_lane_s32(sum, codes, digits, 0);
}
#else
constexpr bool SIGNED_CODES = true;  // as both factors are
inline int32x4_t with_products(int32x4_t sum, uint8x16_t codes, int8x8_t digits) {
    return vdotq_lane_s32(sum, vreinterpretq_s8_u8(codes), digits, 0);
}
#endif

// The codes of four inputs, as bytes.
struct ByteCodes {
    // What codes of eight bits are less by where they have to be signed.
    template <int BITS>
    static constexpr int CENTRE = SIGNED_CODES && (BITS == 8 || BITS == MAPPED) ? 128 : 0;
    uint8x16_t v[4];
    template <int BITS, int P>
    static ByteCodes of(const std::uint8_t* cell, const std::uint8_t* map) {
        ByteCodes to;
        for (int i = 0; i < 4; ++i) {
            to.v[i] = codes_of<BITS, P>(cell + 16 * i, map);
            if constexpr (CENTRE<BITS> != 0) to.v[i] = veorq_u8(to.v[i], vdupq_n_u8(128));
        }
        return to;
    }
};
// Adds products with the digits of four inputs.
inline void add_products(Ints& sum, const ByteCodes& codes, const std::int8_t* digits) {
    std::int32_t four;
    std::memcpy(&four, digits, 4);
    const int8x8_t lane = vreinterpret_s8_s32(int32x2_t{four, 0});
    for (int i = 0; i < 4; ++i) sum.v[i] = pinned(with_products(sum.v[i], codes.v[i], lane));
}

// Sums over a block: 256 * high + low.
struct Sums {
    using FourCodes = ByteCodes;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 8, ROWS = 2;
    Ints high, low;
    Sums() : high(ints(0)), low(ints(0)) {}
    Sums(Ints zeros, const void* less) : high(ints(0)), low(begun(zeros, less)) {}
    void add(const FourCodes& codes, const std::int8_t* row, int half, int at) {
        add_products(high, codes, row + at);
        add_products(low, codes, row + half + at);
    }
    void settle() {}
    Ints all() const {
        return each_int([&](int i) { return vaddq_s32(vshlq_n_s32(high.v[i], 8), low.v[i]); });
    }
};

// The same of digits of 8 bits.
struct ShortSums {
    using FourCodes = ByteCodes;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 4, ROWS = 4;
    Ints low;
    ShortSums() : low(ints(0)) {}
    ShortSums(Ints zeros, const void* less) : low(begun(zeros, less)) {}
    void add(const FourCodes& codes, const std::int8_t* row, int half, int at) {
        add_products(low, codes, row + half + at);
    }
    void settle() {}
    Ints all() const { return low; }
};
template <int BITS>
using Short = ShortSums;

// The lowest bytes of sixteen numbers.
inline int8x16_t lowest_bytes(Ints x) {
    const int16x8_t first = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]));
    const int16x8_t second = vcombine_s16(vmovn_s32(x.v[2]), vmovn_s32(x.v[3]));
    return vcombine_s8(vmovn_s16(first), vmovn_s16(second));
}
inline void put_digits(std::int8_t* row, int half, int at, Ints digits, bool) {
    const Ints upper =
        each_int([&](int i) { return vshrq_n_s32(vaddq_s32(digits.v[i], vdupq_n_s32(128)), 8); });
    vst1q_s8(row + at, lowest_bytes(upper));
    vst1q_s8(row + half + at, lowest_bytes(digits));
}

struct ByteProducts {
    static constexpr int PRODUCTS = 16;
    static Register add(Register sum, Register a, Register b) {
        return with_products(sum, vreinterpretq_u8_s32(a), vreinterpret_s8_s32(vget_low_s32(b)));
    }
};
struct WordProducts : ByteProducts {
    static constexpr int PRODUCTS = ByteProducts::PRODUCTS / 2;  // a digit is two bytes
};
using NibbleProducts = ByteProducts;

}  // namespace outrider
