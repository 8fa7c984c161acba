// Sums by the products of AVX-VNNI.
#pragma once

#include "sums256.hpp"

namespace outrider {

constexpr int MOST_SUMS = 8;  // registers that hold a block's sums
// The codes of four inputs, as bytes.
struct ByteCodes {
    __m256i a, b;
    template <int BITS, int P>
    static ByteCodes of(const std::uint8_t* cell, const std::uint8_t* map) {
        return {codes_of<BITS, P>(cell, map), codes_of<BITS, P>(cell + 32, map)};
    }
};
// The same as words.
struct WordCodes {
    HalfWords a, b;
    template <int BITS, int P>
    static WordCodes of(const std::uint8_t* cell, const std::uint8_t* map) {
        return {HalfWords::of<BITS, P>(cell, map), HalfWords::of<BITS, P>(cell + 32, map)};
    }
};
// Adds products of words, two to a lane.
inline void add_pairs(Ints& sum, __m256i a, __m256i b, Ints digits) {
    sum.a = _mm256_dpwssd_avx_epi32(sum.a, a, digits.a);
    sum.b = _mm256_dpwssd_avx_epi32(sum.b, b, digits.b);
}

struct Sums {
    using FourCodes = WordCodes;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 2, ROWS = 4;
    Ints sum;
    Sums() : sum(ints(0)) {}
    Sums(Ints zeros, const void* less) : sum(ints(0)) {
        add_pairs(sum, zeros.a, zeros.b, repeated(less));
    }
    void add(const FourCodes& codes, const std::int8_t* row, int, int at) {
        add_pairs(sum, codes.a.odd, codes.b.odd, repeated(row + 2 * at));
        add_pairs(sum, codes.a.even, codes.b.even, repeated(row + 2 * at + 4));
        sum = {pinned(sum.a), pinned(sum.b)};
    }
    void settle() {}
    Ints all() const { return sum; }
};

// Sums of digits of 8 bits.
struct ShortSums {
    using FourCodes = ByteCodes;
    static constexpr int DIGIT = 1, REGISTERS = 2, ROWS = 6;
    Ints sum;
    ShortSums() : sum(ints(0)) {}
    ShortSums(Ints zeros, const void* less) : sum(Sums(zeros, less).sum) {}
    void add(const FourCodes& codes, const std::int8_t* row, int, int at) {
        const Ints digits = repeated(row + at);
        sum.a = _mm256_dpbusd_avx_epi32(sum.a, codes.a, digits.a);
        sum.b = _mm256_dpbusd_avx_epi32(sum.b, codes.b, digits.b);
        sum = {pinned(sum.a), pinned(sum.b)};
    }
    void settle() {}
    Ints all() const { return sum; }
};
template <int BITS>
using Short = ShortSums;

struct WordProducts {
    static constexpr int PRODUCTS = 16;
    static Register add(Register sum, Register a, Register b) {
        return _mm256_dpwssd_avx_epi32(sum, a, b);
    }
};
struct ByteProducts {
    static constexpr int PRODUCTS = 32;
    static Register add(Register sum, Register a, Register b) {
        return _mm256_dpbusd_avx_epi32(sum, a, b);
    }
};
using NibbleProducts = ByteProducts;

}  // namespace outrider
