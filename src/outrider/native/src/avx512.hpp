// Sixteen lanes in a register of 512 bits.
#pragma once

#include <immintrin.h>

#include "numbers.hpp"

namespace outrider {

// Rows of a product whose sums stay in registers, of bf16 and of fp32, and how many sums do.
constexpr int MAX_ROWS = 8, MAX_FLOAT_ROWS = 8;
constexpr int MAX_SUMS = 24;

struct F32x16 {
    __m512 v;
};
struct Pairs {  // sixteen pairs of bf16
    __m512i v;
};

inline F32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Of these two the second operand is returned where one is NaN.
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// b where x < y, else a.
inline F32x16 where_less(F32x16 x, F32x16 y, F32x16 b, F32x16 a) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), a.v, b.v)};
}
// a * 2^n, n being in the low bits of `shifted`; see exp.
inline F32x16 scale2(F32x16 a, F32x16 shifted) {
    __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), n))};
}
inline F32x16 load(const bf16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Pairs load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
inline Pairs splat_pair(const bf16* p) {
    std::int32_t pair;
    std::memcpy(&pair, p, 4);
    return {_mm512_set1_epi32(pair)};
}
inline F32x16 low(Pairs a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
inline F32x16 high(Pairs a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(-65536)))};
}
inline float total(F32x16 a) {
    __m256 s = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline float highest(F32x16 a) { return _mm512_reduce_max_ps(a.v); }

struct Ints {
    __m512i v;
};
inline Ints ints(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline std::int32_t total(Ints a) { return _mm512_reduce_add_epi32(a.v); }
inline std::int32_t highest(Ints a) { return _mm512_reduce_max_epi32(a.v); }
inline Ints magnitude(F32x16 a) {
    return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))};
}
inline Ints rounded(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F32x16 to_float(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F32x16 load_half(const std::uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
inline F32x16 load_signed(const std::uint8_t* p) {
    return to_float(Ints{_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))});
}
// The low nibbles of sixteen bytes, or with a shift of 4 the high ones.
inline F32x16 load_nibbles(const std::uint8_t* p, int shift) {
    const __m128i bytes =
        _mm_srl_epi16(_mm_loadu_si128((const __m128i*)p), _mm_cvtsi32_si128(shift));
    return to_float(Ints{_mm512_cvtepu8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(15)))});
}
// Sixteen pairs (zero, 128 * zero), to be multiplied with a BlockSummary's (low, high).
inline Ints load_zeros(const std::uint8_t* p) {
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return {_mm512_or_si512(wide, _mm512_slli_epi32(wide, 23))};
}
inline __m512i repeated(const void* p) {
    std::int32_t four;
    std::memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}

// A register of numbers, for noise.
constexpr int WORDS = 16;
typedef std::uint32_t Words __attribute__((vector_size(64)));
struct Wide {  // 64-bit products
    Words high, low;
};
inline std::uint32_t least(Words x) { return _mm512_reduce_min_epu32((__m512i)x); }
// Compilers do not find the instruction for this.
inline Wide multiply(Words x, std::uint32_t by) {
    const __m512i m = _mm512_set1_epi32(std::int32_t(by));
    const __m512i even = _mm512_mul_epu32((__m512i)x, m);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), m);
    const __mmask16 odds = 0xaaaa;
    return {(Words)_mm512_mask_blend_epi32(odds, _mm512_srli_epi64(even, 32), odd),
            (Words)_mm512_mask_blend_epi32(odds, even, _mm512_slli_epi64(odd, 32))};
}

// Each instruction adds PRODUCTS products to a register of sums.
using Register = __m512i;
struct FloatProducts {
    static constexpr int PRODUCTS = 16;
    static Register add(Register sum, Register a, Register b) {
        return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
    }
};
// Keeps the compiler from knowing what a register holds.
inline void hide(Register& x) { asm volatile("" : "+v"(x)); }

#if defined(__AVX512BF16__)
inline void store(bf16* p, F32x16 a) {
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v));
}
inline F32x16 dot(F32x16 sum, Pairs a, Pairs b) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
}
constexpr bool WIDENS_BF16 = false;
struct HalfProducts {
    static constexpr int PRODUCTS = 32;
    static Register add(Register sum, Register a, Register b) {
        return (Register)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
};
#else
// Rounded to bf16, in the upper half of each lane; the lower is left over.
inline __m512i rounded_up(F32x16 a) {
    __m512i bits = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
}
inline void store(bf16* p, F32x16 a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_up(a), 16)));
}
inline F32x16 as_bf16(F32x16 a) { return high({rounded_up(a)}); }
inline F32x16 dot(F32x16 sum, Pairs a, Pairs b) {
    return fma(high(a), high(b), fma(low(a), low(b), sum));
}
constexpr bool WIDENS_BF16 = true;
using HalfProducts = FloatProducts;
#endif

}  // namespace outrider
