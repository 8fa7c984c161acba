// Codes of sixteen outputs in a register of 512 bits.
#pragma once

#include "isa.hpp"
#include "packed.hpp"

namespace outrider {

// Bytes whose bits from FROM on stand from TO on, and nothing else; `mask` has these.
template <int FROM, int TO>
inline __m512i moved(__m512i x, int mask) {
    if constexpr (TO > FROM) x = _mm512_slli_epi16(x, TO - FROM);
    if constexpr (TO < FROM) x = _mm512_srli_epi16(x, FROM - TO);
    return _mm512_and_si512(x, _mm512_set1_epi8(char(mask)));
}
// The codes of four inputs, as bytes.
struct ByteCodes {
    __m512i v;
    ByteCodes() = default;
    explicit ByteCodes(__m512i v) : v(v) {}
    // Step P of a cell, see packed.hpp.
    template <int BITS, int P>
    static ByteCodes of(const std::uint8_t* cell, const std::uint8_t* map) {
        auto line = [&](int i) { return _mm512_loadu_si512(cell + i * 64); };
        if constexpr (BITS == 8) {
            return ByteCodes(line(P));
        } else if constexpr (BITS <= 3 && BITS != MAPPED) {
            const __m512i two = moved<P % 4 * 2, 0>(line(P / 4), 3);
            if constexpr (BITS == 2) return ByteCodes(two);
            return ByteCodes(_mm512_or_si512(two, moved<P, 2>(line(2), 4)));
        } else {
            const __m512i four = moved<P % 2 * 4, 0>(line(P / 2), 15);
            if constexpr (BITS == 5)
                return ByteCodes(_mm512_or_si512(four, moved<P, 4>(line(4), 16)));
            if constexpr (BITS == 6)
                return ByteCodes(_mm512_or_si512(four, moved<P % 4 * 2, 4>(line(4 + P / 4), 48)));
            if constexpr (BITS == MAPPED) {
                const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)map));
                return ByteCodes(_mm512_shuffle_epi8(all, four));
            }
            return ByteCodes(four);
        }
    }
};

}  // namespace outrider
