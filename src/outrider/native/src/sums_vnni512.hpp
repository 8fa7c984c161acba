// Sums by the byte products of AVX-512 VNNI.
#pragma once

#include "codes512.hpp"
#include "packed.hpp"

namespace outrider {

constexpr int DIGIT_BYTES = 1;  // from a digit to the next
constexpr int MOST_SUMS = 16;   // registers that hold a block's sums
// Rows that do not pass by in bundles or, with AMX, by tiles.
#if defined(__AMX_INT8__)
constexpr int ROWS_IN_LANES = 2;
#else
constexpr int ROWS_IN_LANES = 1;
#endif

// Sums over a block: 256 * high + low.
struct Sums {
    using FourCodes = ByteCodes;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 2, ROWS = ROWS_IN_LANES;
    static constexpr int BUNDLE = 4, WIDE_BUNDLE = 6;
    __m512i high, low;
    Sums() : high(_mm512_setzero_si512()), low(_mm512_setzero_si512()) {}
    explicit Sums(Ints begin) : high(_mm512_setzero_si512()), low(begin.v) {}
    Sums(Ints zeros, const void* less)
        : high(_mm512_setzero_si512()), low(_mm512_dpwssd_epi32(high, zeros.v, repeated(less))) {}
    void add(FourCodes codes, const std::int8_t* row, int half, int at) {
        high = _mm512_dpbusd_epi32(high, codes.v, repeated(row + at));
        low = _mm512_dpbusd_epi32(low, codes.v, repeated(row + half + at));
    }
    void settle() {}
    Ints all() const { return {_mm512_add_epi32(_mm512_slli_epi32(high, 8), low)}; }
};

// The same of digits of 8 bits.
struct ShortSums {
    using FourCodes = ByteCodes;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 1, ROWS = ROWS_IN_LANES;
    static constexpr int BUNDLE = 6, WIDE_BUNDLE = 8;
    __m512i low;
    ShortSums() : low(_mm512_setzero_si512()) {}
    explicit ShortSums(Ints begin) : low(begin.v) {}
    ShortSums(Ints zeros, const void* less) : low(Sums(zeros, less).low) {}
    void add(FourCodes codes, const std::int8_t* row, int half, int at) {
        low = _mm512_dpbusd_epi32(low, codes.v, repeated(row + half + at));
    }
    void settle() {}
    Ints all() const { return {low}; }
};
template <int BITS>
using Short = ShortSums;

inline void put_digits(std::int8_t* row, int half, int at, Ints digits, bool) {
    const __m512i upper = _mm512_add_epi32(digits.v, _mm512_set1_epi32(128));
    _mm_storeu_si128((__m128i*)(row + at), _mm512_cvtepi32_epi8(_mm512_srai_epi32(upper, 8)));
    _mm_storeu_si128((__m128i*)(row + half + at), _mm512_cvtepi32_epi8(digits.v));
}

struct ByteProducts {
    static constexpr int PRODUCTS = 64;
    static Register add(Register sum, Register a, Register b) {
        return _mm512_dpbusd_epi32(sum, a, b);
    }
};
struct WordProducts : ByteProducts {
    static constexpr int PRODUCTS = ByteProducts::PRODUCTS / 2;  // a digit is two bytes
};
using NibbleProducts = ByteProducts;

}  // namespace outrider
