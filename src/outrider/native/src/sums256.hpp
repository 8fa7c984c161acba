// What sums in registers of 256 bits share.
#pragma once

#include <type_traits>

#include "packed.hpp"
#include "word_digits.hpp"

namespace outrider {

constexpr int DIGIT_BYTES = 2;
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
// Of eight outputs as words: of the first and the third input, of the second and the
// fourth.
struct HalfWords {
    __m256i odd, even;
    template <int BITS, int P>
    static HalfWords of(const std::uint8_t* cell, const std::uint8_t* map) {
        if constexpr (BITS == 4) {  // out of the words at once
            const __m256i line = _mm256_loadu_si256((const __m256i*)(cell + P / 2 * 64));
            auto word = [&](auto shift) {
                const __m256i moved = _mm256_srli_epi16(line, shift);
                return shift < 12 ? _mm256_and_si256(moved, _mm256_set1_epi16(15)) : moved;
            };
            return {word(std::integral_constant<int, P % 2 * 4>()),
                    word(std::integral_constant<int, P % 2 * 4 + 8>())};
        } else {
            const __m256i bytes = codes_of<BITS, P>(cell, map);
            return {_mm256_and_si256(bytes, _mm256_set1_epi16(255)), _mm256_srli_epi16(bytes, 8)};
        }
    }
};
// Finishes a sum before the next row's begins: side by side they, or gcc's products that wait to be
// added, would need more registers than there are. A volatile asm would take twice as long, since
// it also keeps its place among others.
inline __m256i pinned(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
}
inline __m256i narrowed(Ints digits) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(digits.a, digits.b), 0xd8);
}

}  // namespace outrider
