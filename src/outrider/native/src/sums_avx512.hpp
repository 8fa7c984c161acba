// Sums by the word products of AVX-512, without VNNI.
#pragma once

#include <type_traits>

#include "codes512.hpp"
#include "packed.hpp"
#include "word_digits.hpp"

namespace outrider {

constexpr int DIGIT_BYTES = 2;
constexpr int MOST_SUMS = 16;  // registers that hold a block's sums
// The same as words: of the first and the third input, of the second and the fourth.
struct WordCodes {
    __m512i odd, even;
    template <int BITS, int P>
    static WordCodes of(const std::uint8_t* cell, const std::uint8_t* map) {
        const __m512i bytes = ByteCodes::of<BITS, P>(cell, map).v;
        return {_mm512_and_si512(bytes, _mm512_set1_epi16(255)), _mm512_srli_epi16(bytes, 8)};
    }
};
// Finishes a sum before the next one's begins: gcc would keep all products of a block instead, for
// which there are too few registers.
inline __m512i pinned(__m512i sum) {
    asm("" : "+v"(sum));
    return sum;
}
inline void add_pairs(Ints& sum, __m512i codes, __m512i digits) {
    sum.v = pinned(_mm512_add_epi32(sum.v, _mm512_madd_epi16(codes, digits)));
}
inline __m256i narrowed(Ints digits) { return _mm512_cvtepi32_epi16(digits.v); }

// Pairs of products of codes of few bits and digits of 8 bits, as many as fit: see UNSETTLED.
struct Bytes {
    __m512i v;
    Bytes() : v(_mm512_setzero_si512()) {}
    void add(ByteCodes codes, Ints digits) {
        v = pinned(_mm512_add_epi16(v, _mm512_maddubs_epi16(codes.v, digits.v)));
    }
    Ints all() const { return {_mm512_madd_epi16(v, _mm512_set1_epi16(1))}; }
};
inline Ints four_digits(const void* p) { return {repeated(p)}; }

struct Sums {
    using FourCodes = WordCodes;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 1, ROWS = 8;
    Ints sum;
    Sums() : sum(ints(0)) {}
    Sums(Ints zeros, const void* less) : sum{_mm512_madd_epi16(zeros.v, repeated(less))} {}
    void add(const FourCodes& codes, const std::int8_t* row, int, int at) {
        add_pairs(sum, codes.odd, repeated(row + 2 * at));
        add_pairs(sum, codes.even, repeated(row + 2 * at + 4));
    }
    void settle() {}
    Ints all() const { return sum; }
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
    static constexpr int PRODUCTS = 32;
    static Register add(Register sum, Register a, Register b) {
        return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
    }
};
struct NibbleProducts {
    static constexpr int PRODUCTS = 64;
    static Register add(Register sum, Register a, Register b) {
        return _mm512_add_epi16(sum, _mm512_maddubs_epi16(a, b));
    }
};
using ByteProducts = WordProducts;

}  // namespace outrider
