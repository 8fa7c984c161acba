// Sixteen lanes in two registers of 256 bits.
#pragma once

#include <immintrin.h>

#include "numbers.hpp"

namespace outrider {

// Rows of a product whose sums stay in registers, of bf16 and of fp32, and how many sums do.
constexpr int MAX_ROWS = 4, MAX_FLOAT_ROWS = 6;  // bf16 wants some to widen numbers in
constexpr int MAX_SUMS = 4;
constexpr bool WIDENS_BF16 = true;

struct F32x16 {
    __m256 a, b;
};
struct Pairs {
    __m256i a, b;
};

inline F32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32x16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F32x16 operator+(F32x16 x, F32x16 y) {
    return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
inline F32x16 operator-(F32x16 x, F32x16 y) {
    return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
inline F32x16 operator*(F32x16 x, F32x16 y) {
    return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
inline F32x16 operator/(F32x16 x, F32x16 y) {
    return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
inline F32x16 fma(F32x16 x, F32x16 y, F32x16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F32x16 max(F32x16 x, F32x16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F32x16 min(F32x16 x, F32x16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F32x16 where_less(F32x16 x, F32x16 y, F32x16 b, F32x16 a) {
    return {_mm256_blendv_ps(a.a, b.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(a.b, b.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline __m256 scale2(__m256 a, __m256 shifted) {
    __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), n));
}
inline F32x16 scale2(F32x16 x, F32x16 shifted) {
    return {scale2(x.a, shifted.a), scale2(x.b, shifted.b)};
}
inline __m256 widen8(const bf16* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F32x16 load(const bf16* p) { return {widen8(p), widen8(p + 8)}; }
// Rounded to bf16, in the upper half of each lane; the lower is left over.
inline __m256i rounded_up(__m256 a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(up, quiet, nan);
}
inline void narrow8(bf16* p, __m256 a) {
    __m256i up = _mm256_srli_epi32(rounded_up(a), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(up, up), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
inline void store(bf16* p, F32x16 x) {
    narrow8(p, x.a);
    narrow8(p + 8, x.b);
}
inline Pairs load_pairs(const bf16* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))};
}
inline Pairs splat_pair(const bf16* p) {
    std::int32_t pair;
    std::memcpy(&pair, p, 4);
    return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
inline F32x16 low(Pairs x) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
inline F32x16 high(Pairs x) {
    __m256i mask = _mm256_set1_epi32(-65536);
    return {_mm256_castsi256_ps(_mm256_and_si256(x.a, mask)),
            _mm256_castsi256_ps(_mm256_and_si256(x.b, mask))};
}
inline F32x16 as_bf16(F32x16 x) { return high({rounded_up(x.a), rounded_up(x.b)}); }
inline F32x16 dot(F32x16 sum, Pairs a, Pairs b) {
    return fma(high(a), high(b), fma(low(a), low(b), sum));
}

inline float total(F32x16 x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

struct Ints {
    __m256i a, b;
};
inline Ints ints(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints operator+(Ints x, Ints y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
inline Ints max(Ints x, Ints y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline Ints magnitude(F32x16 x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return {_mm256_and_si256(_mm256_castps_si256(x.a), mask),
            _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
}
inline Ints rounded(F32x16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F32x16 to_float(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline F32x16 load_half(const std::uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline F32x16 widened_bytes(__m128i bytes) {
    return to_float(
        Ints{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))});
}
inline F32x16 load_signed(const std::uint8_t* p) {
    return widened_bytes(_mm_loadu_si128((const __m128i*)p));
}
// The low nibbles of sixteen bytes, or with a shift of 4 the high ones.
inline F32x16 load_nibbles(const std::uint8_t* p, int shift) {
    const __m128i bytes =
        _mm_srl_epi16(_mm_loadu_si128((const __m128i*)p), _mm_cvtsi32_si128(shift));
    return widened_bytes(_mm_and_si128(bytes, _mm_set1_epi8(15)));
}
inline __m256i load_zeros8(const std::uint8_t* p) {
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_or_si256(wide, _mm256_slli_epi32(wide, 23));
}
inline Ints load_zeros(const std::uint8_t* p) { return {load_zeros8(p), load_zeros8(p + 8)}; }
inline Ints repeated(const void* p) {
    std::int32_t two;
    std::memcpy(&two, p, 4);
    return ints(two);
}

// A register of numbers, for noise.
constexpr int WORDS = 8;
typedef std::uint32_t Words __attribute__((vector_size(32)));
struct Wide {  // 64-bit products
    Words high, low;
};
// Compilers do not find the instruction for this.
inline Wide multiply(Words x, std::uint32_t by) {
    const __m256i m = _mm256_set1_epi32(std::int32_t(by));
    const __m256i even = _mm256_mul_epu32((__m256i)x, m);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), m);
    return {(Words)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa),
            (Words)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa)};
}

// Each instruction adds PRODUCTS products to a register of sums.
using Register = __m256i;
struct FloatProducts {
    static constexpr int PRODUCTS = 8;
    static Register add(Register sum, Register a, Register b) {
        return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
    }
};
using HalfProducts = FloatProducts;

// Keeps the compiler from knowing what a register holds.
inline void hide(Register& x) { asm volatile("" : "+x"(x)); }

}  // namespace outrider
