// Sums by the word products of AVX2.
#pragma once

#include <type_traits>

#include "sums256.hpp"

namespace outrider {

// Sums of eight outputs, see quantized_halves.hpp.
struct Sums {
    static constexpr int DIGIT = DIGIT_BYTES, PARTS = 2;
    __m256i sum;
    Sums() : sum(_mm256_setzero_si256()) {}
    Sums(__m256i zeros, const void* less) : sum(_mm256_madd_epi16(zeros, repeated(less).a)) {}
    template <int BITS, int P, int PART>
    static __m256i part_of(const std::uint8_t* cell, const std::uint8_t* map) {
        const HalfWords words = HalfWords::of<BITS, P>(cell, map);
        return PART ? words.even : words.odd;
    }
    template <int PART>
    void add_part(__m256i words, const std::int8_t* row, int at) {
        const __m256i digits = repeated(row + 2 * at + 4 * PART).a;
        sum = pinned(_mm256_add_epi32(sum, _mm256_madd_epi16(words, digits)));
    }
    void settle() {}
};

// The same of digits of 8 bits beside codes of few. Words take pairs of products, as many as fit:
// see UNSETTLED.
struct ByteSums {
    static constexpr int DIGIT = 1, PARTS = 1;
    __m256i sum, words;
    ByteSums() : sum(_mm256_setzero_si256()), words(_mm256_setzero_si256()) {}
    ByteSums(__m256i zeros, const void* less)
        : sum(Sums(zeros, less).sum), words(_mm256_setzero_si256()) {}
    template <int BITS, int P, int PART>
    static __m256i part_of(const std::uint8_t* cell, const std::uint8_t* map) {
        return codes_of<BITS, P>(cell, map);
    }
    template <int PART>
    void add_part(__m256i codes, const std::int8_t* row, int at) {
        words = pinned(_mm256_add_epi16(words, _mm256_maddubs_epi16(codes, repeated(row + at).a)));
    }
    void settle() {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
        words = _mm256_setzero_si256();
    }
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
