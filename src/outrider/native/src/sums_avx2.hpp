// Sums by the word products of AVX2.
#pragma once

#include <type_traits>

#include "sums256.hpp"

namespace outrider {

inline void add_pairs(Ints& sum, __m256i a, __m256i b, Ints digits) {
    sum.a = _mm256_add_epi32(sum.a, _mm256_madd_epi16(a, digits.a));
    sum.b = _mm256_add_epi32(sum.b, _mm256_madd_epi16(b, digits.b));
}

// Pairs of products of codes of few bits and digits of 8 bits, as many as fit: see UNSETTLED.
struct Bytes {
    __m256i a, b;
    Bytes() : a(_mm256_setzero_si256()), b(_mm256_setzero_si256()) {}
    void add(const ByteCodes& codes, Ints digits) {
        a = _mm256_add_epi16(a, _mm256_maddubs_epi16(codes.a, digits.a));
        b = _mm256_add_epi16(b, _mm256_maddubs_epi16(codes.b, digits.b));
        pin(a, b);
    }
    Ints all() const {
        const __m256i one = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one)};
    }
};

// Sums of digits of 8 bits: of few-bit codes pairs of products in words (`Bytes`), taken up in
// time.
struct ByteSums {
    using FourCodes = ByteCodes;
    static constexpr int DIGIT = 1, REGISTERS = 2 * Sums::REGISTERS, ROWS = Sums::ROWS;
    Sums sums;
    Bytes bytes;
    ByteSums() = default;
    ByteSums(Ints zeros, const void* less) : sums(zeros, less) {}
    void add(const FourCodes& codes, const std::int8_t* row, int, int at) {
        bytes.add(codes, four_digits(row + at));
    }
    void settle() {
        sums.sum = sums.sum + bytes.all();
        bytes = Bytes();
    }
    Ints all() const { return sums.sum; }
};
template <int BITS>
using Short = std::conditional_t<BITS != MAPPED && BITS <= 6, ByteSums, Sums>;

struct WordProducts {
    static constexpr int PRODUCTS = 16;
    static Register add(Register sum, Register a, Register b) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    }
};
struct NibbleProducts {
    static constexpr int PRODUCTS = 32;
    static Register add(Register sum, Register a, Register b) {
        return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
    }
};
using ByteProducts = WordProducts;

}  // namespace outrider
