// Numbers of 16 and 32 bits, one by one.
#pragma once

#include <cstdint>
#include <cstring>

namespace outrider {

constexpr int LANES = 16;

using bf16 = std::uint16_t;

inline float widen(bf16 x) {
    std::uint32_t bits = std::uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Rounds to nearest even as torch does; a NaN stays one.
inline bf16 narrow(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40);
    return bf16((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
inline void narrow_to(float* p, float x) { *p = x; }
inline void narrow_to(bf16* p, float x) { *p = narrow(x); }
inline float widen(float x) { return x; }

// A finite fp16 number: exponent and mantissa moved into place, the biases' difference multiplied
// in.
inline float from_half(std::uint16_t x) {
    const std::uint32_t bits = std::uint32_t(x & 0x7fff) << 13;
    float out;
    std::memcpy(&out, &bits, 4);
    return out * (x & 0x8000 ? -0x1p112f : 0x1p112f);
}
// Elements of T that one lane of a dot product takes.
template <class T>
constexpr int PER_LANE = 4 / int(sizeof(T));

}  // namespace outrider
