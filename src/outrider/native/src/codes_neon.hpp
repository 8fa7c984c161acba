// Codes of sixteen outputs in four registers of 128 bits.
#pragma once

#include "isa.hpp"
#include "packed.hpp"

namespace outrider {

// Bytes whose bits from FROM on stand from TO on, and nothing else; `mask` has these.
template <int FROM, int TO>
inline uint8x16_t moved(uint8x16_t x, int mask) {
    if constexpr (TO > FROM) x = vshlq_n_u8(x, TO - FROM);
    if constexpr (TO < FROM) {
        x = vshrq_n_u8(x, FROM - TO);
        if (mask == 255 >> (FROM - TO)) return x;
    }
    return vandq_u8(x, vdupq_n_u8(std::uint8_t(mask)));
}
// Step P of a cell, see packed.hpp: of four outputs of it, whose bytes begin at `cell`.
template <int BITS, int P>
inline uint8x16_t codes_of(const std::uint8_t* cell, const std::uint8_t* map) {
    auto line = [&](int i) { return vld1q_u8(cell + i * 64); };
    if constexpr (BITS == 8) {
        return line(P);
    } else if constexpr (BITS <= 3 && BITS != MAPPED) {
        const uint8x16_t two = moved<P % 4 * 2, 0>(line(P / 4), 3);
        if constexpr (BITS == 2) return two;
        return vorrq_u8(two, moved<P, 2>(line(2), 4));
    } else {
        const uint8x16_t four = moved<P % 2 * 4, 0>(line(P / 2), 15);
        if constexpr (BITS == 5) return vorrq_u8(four, moved<P, 4>(line(4), 16));
        if constexpr (BITS == 6) return vorrq_u8(four, moved<P % 4 * 2, 4>(line(4 + P / 4), 48));
        if constexpr (BITS == MAPPED) return vqtbl1q_u8(vld1q_u8(map), four);
        return four;
    }
}

// Finishes a sum before the next row's begins: gcc would keep the digits of all instead, for which
// there are too few registers.
inline int32x4_t pinned(int32x4_t sum) {
    asm("" : "+w"(sum));
    return sum;
}

// What sums begin with: -(sum of the digits) times the zeros of their outputs.
inline Ints begun(Ints zeros, const void* less) {
    std::int16_t both[2];
    std::memcpy(both, less, 4);
    const std::int32_t all = both[0] + 128 * both[1];
    return each_int([&](int i) { return vmulq_n_s32(zeros.v[i], all); });
}

}  // namespace outrider
