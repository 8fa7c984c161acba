// Sixteen fp32 lanes on every instruction set. A kernel written over F32x16 sums in the same order
// whatever the registers' width; only fused products and dot products of bf16 differ between sets.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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

#if defined(__AVX512F__)

constexpr int MAX_ROWS = 8;  // rows whose sums stay in registers
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
#if defined(__AVX512BF16__)
inline void store(bf16* p, F32x16 a) {
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v));
}
inline F32x16 dot(F32x16 sum, Pairs a, Pairs b) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
}
#else
inline void store(bf16* p, F32x16 a) {
    __m512i bits = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 bad = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, bad, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}
inline F32x16 dot(F32x16 sum, Pairs a, Pairs b) { return fma(high(a), high(b), fma(low(a), low(b), sum)); }
#endif

inline float total(F32x16 a) {
    __m256 s = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

#elif defined(__AVX2__)

constexpr int MAX_ROWS = 4;
constexpr int MAX_SUMS = 4;

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
inline F32x16 operator+(F32x16 x, F32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F32x16 operator-(F32x16 x, F32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F32x16 operator*(F32x16 x, F32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F32x16 operator/(F32x16 x, F32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
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
inline void narrow8(bf16* p, __m256 a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i bad = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    up = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, bad), 16);
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
inline F32x16 dot(F32x16 sum, Pairs a, Pairs b) { return fma(high(a), high(b), fma(low(a), low(b), sum)); }

inline float total(F32x16 x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

#else  // any CPU: the compiler's vectors of four

constexpr int MAX_ROWS = 1;
constexpr int MAX_SUMS = 2;

typedef float V4 __attribute__((vector_size(16)));
typedef std::uint32_t U4 __attribute__((vector_size(16)));

struct F32x16 {
    V4 v[4];
};
struct Pairs {
    U4 v[4];
};

template <class Make>
inline F32x16 each(Make make) {
    return {{make(0), make(1), make(2), make(3)}};
}
inline V4 load4(const float* p) {
    V4 out;
    std::memcpy(&out, p, 16);
    return out;
}
inline F32x16 splat(float x) {
    return each([&](int) { return V4{x, x, x, x}; });
}
inline F32x16 load(const float* p) {
    return each([&](int i) { return load4(p + 4 * i); });
}
inline void store(float* p, F32x16 a) { std::memcpy(p, a.v, 64); }
inline F32x16 operator+(F32x16 a, F32x16 b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline F32x16 operator-(F32x16 a, F32x16 b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline F32x16 operator*(F32x16 a, F32x16 b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline F32x16 operator/(F32x16 a, F32x16 b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return a * b + c; }
inline F32x16 where_less(F32x16 x, F32x16 y, F32x16 b, F32x16 a) {
    return each([&](int i) {
        U4 mask = (U4)(x.v[i] < y.v[i]);
        return (V4)(((U4)b.v[i] & mask) | ((U4)a.v[i] & ~mask));
    });
}
inline F32x16 max(F32x16 a, F32x16 b) { return where_less(b, a, a, b); }
inline F32x16 min(F32x16 a, F32x16 b) { return where_less(a, b, a, b); }
inline F32x16 scale2(F32x16 a, F32x16 shifted) {
    return each([&](int i) { return (V4)((U4)a.v[i] + ((U4)shifted.v[i] << 23)); });
}
inline F32x16 load(const bf16* p) {
    float wide[16];
    for (int i = 0; i < 16; ++i) wide[i] = widen(p[i]);
    return load(wide);
}
inline void store(bf16* p, F32x16 a) {
    float wide[16];
    store(wide, a);
    for (int i = 0; i < 16; ++i) p[i] = narrow(wide[i]);
}
inline Pairs load_pairs(const bf16* p) {
    Pairs out;
    std::memcpy(out.v, p, 64);
    return out;
}
inline Pairs splat_pair(const bf16* p) {
    std::uint32_t x;
    std::memcpy(&x, p, 4);
    U4 all = {x, x, x, x};
    return {{all, all, all, all}};
}
inline F32x16 low(Pairs a) {
    return each([&](int i) { return (V4)(a.v[i] << 16); });
}
inline F32x16 high(Pairs a) {
    return each([&](int i) { return (V4)(a.v[i] & 0xffff0000u); });
}
inline F32x16 dot(F32x16 sum, Pairs a, Pairs b) { return fma(high(a), high(b), fma(low(a), low(b), sum)); }
inline float total(F32x16 a) {
    V4 s = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
    return (s[0] + s[2]) + (s[1] + s[3]);
}

#endif

// Rows of a product whose sums stay in registers: bf16 in AVX2 wants some to widen numbers in.
template <class T>
constexpr int MOST_ROWS = MAX_ROWS;
#if defined(__AVX2__) && !defined(__AVX512F__)
template <>
inline constexpr int MOST_ROWS<float> = 6;
#endif

// Whether many rows and their weights are widened once, rather than for every product of two.
template <class T>
constexpr bool WIDENS = false;
#if defined(__AVX2__) && !defined(__AVX512BF16__)
template <>
inline constexpr bool WIDENS<bf16> = true;
#endif

// For fp32 a "pair" is one number, so that kernels read alike in both.
inline F32x16 load_pairs(const float* p) { return load(p); }
inline F32x16 splat_pair(const float* p) { return splat(*p); }
inline F32x16 dot(F32x16 sum, F32x16 a, F32x16 b) { return fma(a, b, sum); }
inline void narrow_to(float* p, float x) { *p = x; }
inline void narrow_to(bf16* p, float x) { *p = narrow(x); }
inline float widen(float x) { return x; }

// Elements of T that one lane of a dot product takes.
template <class T>
constexpr int PER_LANE = 4 / int(sizeof(T));

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

inline float highest(F32x16 a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(a.v);
#else
    float all[LANES];
    store(all, a);
    float best = all[0];
    for (int i = 1; i < LANES; ++i) best = all[i] > best ? all[i] : best;
    return best;
#endif
}

}  // namespace outrider
