// What sums in registers of 256 bits share; `add_pairs` is of each set.
#pragma once

#include <type_traits>

#include "packed.hpp"
#include "word_digits.hpp"

namespace outrider {

constexpr int DIGIT_BYTES = 2;
constexpr int MOST_SUMS = 8;  // registers that hold a block's sums
// Finishes a sum before the next row's begins: side by side they would need more registers than
// there are. A volatile asm would take twice as long, since it also keeps its place among others.
inline void pin(__m256i& a, __m256i& b) { asm("" : "+x"(a), "+x"(b)); }
// Bytes whose bits from FROM on stand from TO on, and nothing else; `mask` has these.
template <int FROM, int TO>
inline __m256i moved(__m256i x, int mask) {
    if constexpr (TO > FROM) x = _mm256_slli_epi16(x, TO - FROM);
    if constexpr (TO < FROM) x = _mm256_srli_epi16(x, FROM - TO);
    return _mm256_and_si256(x, _mm256_set1_epi8(char(mask)));
}
// Step P of a cell, see packed.hpp: of eight outputs of it, whose bytes begin at `cell`.
template <int BITS, int P>
inline __m256i codes_of(const std::uint8_t* cell, const std::uint8_t* map) {
    auto line = [&](int i) { return _mm256_loadu_si256((const __m256i*)(cell + i * 64)); };
    if constexpr (BITS == 8) {
        return line(P);
    } else if constexpr (BITS <= 3 && BITS != MAPPED) {
        const __m256i two = moved<P % 4 * 2, 0>(line(P / 4), 3);
        if constexpr (BITS == 2) return two;
        return _mm256_or_si256(two, moved<P, 2>(line(2), 4));
    } else {
        const __m256i four = moved<P % 2 * 4, 0>(line(P / 2), 15);
        if constexpr (BITS == 5) return _mm256_or_si256(four, moved<P, 4>(line(4), 16));
        if constexpr (BITS == 6)
            return _mm256_or_si256(four, moved<P % 4 * 2, 4>(line(4 + P / 4), 48));
        if constexpr (BITS == MAPPED)
            return _mm256_shuffle_epi8(
                _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)map)), four);
        return four;
    }
}
// The codes of four inputs, as bytes.
struct ByteCodes {
    __m256i a, b;
    template <int BITS, int P>
    static ByteCodes of(const std::uint8_t* cell, const std::uint8_t* map) {
        return {codes_of<BITS, P>(cell, map), codes_of<BITS, P>(cell + 32, map)};
    }
};
// The same as words: of the first and the third input, of the second and the fourth.
struct WordCodes {
    __m256i odd_a, odd_b, even_a, even_b;
    template <int BITS, int P>
    static WordCodes of(const std::uint8_t* cell, const std::uint8_t* map) {
        if constexpr (BITS == 4) {  // out of the words at once
            auto line = [&](int i) {
                return _mm256_loadu_si256((const __m256i*)(cell + P / 2 * 64 + i));
            };
            const __m256i a = line(0), b = line(32), mask = _mm256_set1_epi16(15);
            auto word = [&](__m256i x, auto shift) {
                const __m256i moved = _mm256_srli_epi16(x, shift);
                return shift < 12 ? _mm256_and_si256(moved, mask) : moved;
            };
            const std::integral_constant<int, P % 2 * 4> odd;
            const std::integral_constant<int, P % 2 * 4 + 8> even;
            return {word(a, odd), word(b, odd), word(a, even), word(b, even)};
        } else {
            const ByteCodes bytes = ByteCodes::of<BITS, P>(cell, map);
            const __m256i mask = _mm256_set1_epi16(255);
            return {_mm256_and_si256(bytes.a, mask), _mm256_and_si256(bytes.b, mask),
                    _mm256_srli_epi16(bytes.a, 8), _mm256_srli_epi16(bytes.b, 8)};
        }
    }
};
// Adds products of words, two to a lane.
inline void add_pairs(Ints& sum, __m256i a, __m256i b, Ints digits);
inline __m256i narrowed(Ints digits) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(digits.a, digits.b), 0xd8);
}
inline Ints four_digits(const void* p) { return repeated(p); }

struct Sums {
    using FourCodes = WordCodes;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 2, ROWS = 4;
    Ints sum;
    Sums() : sum(ints(0)) {}
    Sums(Ints zeros, const void* less) : sum(ints(0)) {
        add_pairs(sum, zeros.a, zeros.b, repeated(less));
    }
    void add(const FourCodes& codes, const std::int8_t* row, int, int at) {
        add_pairs(sum, codes.odd_a, codes.odd_b, repeated(row + 2 * at));
        add_pairs(sum, codes.even_a, codes.even_b, repeated(row + 2 * at + 4));
        pin(sum.a, sum.b);
    }
    void settle() {}
    Ints all() const { return sum; }
};

}  // namespace outrider
