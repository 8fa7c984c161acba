// Sixteen fp32 lanes on every instruction set. A kernel written over F32x16 sums in the same order
// whatever the registers' width; only fused products and dot products of bf16 differ between sets.
//
// A set has a file of its own with the same names: the types F32x16 (sixteen fp32), Pairs (sixteen
// pairs of bf16) and Ints (sixteen int32), what is done with them, and the registers that kernels
// may fill.
#pragma once

#if defined(__AVX512F__)
#include "avx512.hpp"
#elif defined(__AVX2__)
#include "avx2.hpp"
#elif defined(OUTRIDER_NEON)
#include "neon.hpp"
#else
#include "any.hpp"
#endif

namespace outrider {

// Rows of a product whose sums stay in registers.
template <class T>
constexpr int MOST_ROWS = sizeof(T) == sizeof(float) ? MAX_FLOAT_ROWS : MAX_ROWS;

// Whether rows, and the weights of many, are widened once rather than for every product of two.
template <class T>
constexpr bool WIDENS = sizeof(T) == sizeof(bf16) && WIDENS_BF16;

// For fp32 a "pair" is one number, so that kernels read alike in both.
inline F32x16 load_pairs(const float* p) { return load(p); }
inline F32x16 splat_pair(const float* p) { return splat(*p); }
inline F32x16 dot(F32x16 sum, F32x16 a, F32x16 b) { return fma(a, b, sum); }

// Two inputs of a row of fp32, for products with pairs of bf16.
struct TwoInputs {
    F32x16 low, high;
};
inline F32x16 dot(F32x16 sum, Pairs a, TwoInputs b) {
    return fma(high(a), b.high, fma(low(a), b.low, sum));
}
// What a pair of inputs to a product with weights of T is multiplied by.
template <class T, class X>
inline auto splat_inputs(const X* p) {
    if constexpr (sizeof(X) > sizeof(T))
        return TwoInputs{splat(p[0]), splat(p[1])};
    else
        return splat_pair(p);
}

// e^x to about 1 ulp, 0 below -87; a NaN stays one (see max and min).
inline F32x16 exp(F32x16 x) {
    const F32x16 lowest = splat(-87.0f), magic = splat(12582912.0f);
    F32x16 y = min(splat(88.0f), max(lowest, x));
    F32x16 shifted = fma(y, splat(1.44269504088896341f), magic);
    F32x16 n = shifted - magic;
    F32x16 r = fma(n, splat(-0.693359375f), y);
    r = fma(n, splat(2.12194440e-4f), r);
    F32x16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    return where_less(x, lowest, splat(0.0f), scale2(p, shifted));
}

#if !defined(__AVX512F__)
inline float highest(F32x16 a) {
    float all[LANES];
    store(all, a);
    float best = all[0];
    for (int i = 1; i < LANES; ++i) best = all[i] > best ? all[i] : best;
    return best;
}

inline std::uint32_t least(Words x) {
    std::uint32_t best = x[0];
    for (int i = 1; i < WORDS; ++i) best = x[i] < best ? x[i] : best;
    return best;
}
inline std::int32_t total(Ints a) {
    std::int32_t all[LANES], sum = 0;
    std::memcpy(all, &a, 64);
    for (std::int32_t x : all) sum += x;
    return sum;
}
inline std::int32_t highest(Ints a) {
    std::int32_t all[LANES], best;
    std::memcpy(all, &a, 64);
    best = all[0];
    for (std::int32_t x : all) best = x > best ? x : best;
    return best;
}
#endif

}  // namespace outrider
