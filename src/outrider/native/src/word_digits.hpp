// Digits as 16-bit words.
#pragma once

#include "isa.hpp"

namespace outrider {

// Sixteen digits as words.
inline __m256i narrowed(Ints digits);

inline void put_digits(std::int8_t* row, int, int at, Ints digits, bool bytes) {
    __m256i words = narrowed(digits);
    if (bytes) {
        const __m128i low = _mm256_castsi256_si128(words);
        const __m128i high = _mm256_extracti128_si256(words, 1);
        return _mm_storeu_si128((__m128i*)(row + at), _mm_packs_epi16(low, high));
    }
    words = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i*)(row + 2 * at), words);
}

}  // namespace outrider
