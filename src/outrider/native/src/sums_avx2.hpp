// Sums by the word products of AVX2.
#pragma once

#include <type_traits>

#include "sums256.hpp"

namespace outrider {

// Sums of eight outputs, see quantized_halves.hpp.
struct Sums {
    using FourCodes = HalfWords;
    static constexpr int DIGIT = DIGIT_BYTES;
    __m256i sum;
    Sums() = default;
    Sums(__m256i zeros, const void* less) : sum(_mm256_madd_epi16(zeros, repeated(less).a)) {}
    void add(const FourCodes& codes, const std::int8_t* row, int at) {
        auto pairs = [&](__m256i words, int i) {
            return _mm256_madd_epi16(words, repeated(row + 2 * at + i).a);
        };
        sum = pinned(_mm256_add_epi32(sum, pairs(codes.odd, 0)));
        sum = pinned(_mm256_add_epi32(sum, pairs(codes.even, 4)));
    }
    void settle() {}
};

// The same of digits of 8 bits beside codes of few. Words take pairs of products, as many as fit:
// see UNSETTLED.
struct ByteSums {
    struct FourCodes {
        __m256i v;
        template <int BITS, int P>
        static FourCodes of(const std::uint8_t* cell, const std::uint8_t* map) {
            return {codes_of<BITS, P>(cell, map)};
        }
    };
    static constexpr int DIGIT = 1;
    __m256i sum, words;
    ByteSums() : sum(_mm256_setzero_si256()), words(_mm256_setzero_si256()) {}
    ByteSums(__m256i zeros, const void* less)
        : sum(Sums(zeros, less).sum), words(_mm256_setzero_si256()) {}
    void add(const FourCodes& codes, const std::int8_t* row, int at) {
        words =
            pinned(_mm256_add_epi16(words, _mm256_maddubs_epi16(codes.v, repeated(row + at).a)));
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
