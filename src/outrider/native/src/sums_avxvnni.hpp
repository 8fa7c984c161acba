// Sums by the products of AVX-VNNI.
#pragma once

#include "sums256.hpp"

namespace outrider {

inline void add_pairs(Ints& sum, __m256i a, __m256i b, Ints digits) {
    sum.a = _mm256_dpwssd_avx_epi32(sum.a, a, digits.a);
    sum.b = _mm256_dpwssd_avx_epi32(sum.b, b, digits.b);
}

// Sums of digits of 8 bits.
struct ShortSums {
    using FourCodes = ByteCodes;
    static constexpr int DIGIT = 1, REGISTERS = 2, ROWS = 6;
    Ints sum;
    ShortSums() : sum(ints(0)) {}
    ShortSums(Ints zeros, const void* less) : sum(Sums(zeros, less).sum) {}
    void add(const FourCodes& codes, const std::int8_t* row, int, int at) {
        const Ints digits = four_digits(row + at);
        sum.a = _mm256_dpbusd_avx_epi32(sum.a, codes.a, digits.a);
        sum.b = _mm256_dpbusd_avx_epi32(sum.b, codes.b, digits.b);
        pin(sum.a, sum.b);
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
