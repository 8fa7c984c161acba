// Sixteen 32-bit integers on every instruction set, beside the lanes of isa.hpp.
#pragma once

#include "isa.hpp"

namespace outrider {

// A finite fp16 number: exponent and mantissa moved into place, the biases' difference multiplied in.
inline float from_half(std::uint16_t x) {
    const std::uint32_t bits = std::uint32_t(x & 0x7fff) << 13;
    float out;
    std::memcpy(&out, &bits, 4);
    return out * (x & 0x8000 ? -0x1p112f : 0x1p112f);
}

#if defined(__AVX512F__)

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
// Sixteen pairs (zero, 128 * zero), to be multiplied with a Part's (low, high).
inline Ints load_zeros(const std::uint8_t* p) {
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return {_mm512_or_si512(wide, _mm512_slli_epi32(wide, 23))};
}
inline __m512i repeated(const void* p) {
    std::int32_t four;
    std::memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}

#elif defined(__AVX2__)

struct Ints {
    __m256i a, b;
};
inline Ints ints(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints operator+(Ints x, Ints y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
inline Ints max(Ints x, Ints y) {
    return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)};
}
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

#else

struct Ints {
    std::int32_t v[16];
};
template <class Make>
inline Ints each_int(Make make) {
    Ints out;
    for (int i = 0; i < LANES; ++i) out.v[i] = make(i);
    return out;
}
inline Ints ints(std::int32_t x) {
    return each_int([&](int) { return x; });
}
inline Ints operator+(Ints a, Ints b) {
    return each_int([&](int i) { return a.v[i] + b.v[i]; });
}
inline Ints max(Ints a, Ints b) {
    return each_int([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Ints magnitude(F32x16 a) {
    Ints out;
    std::memcpy(out.v, a.v, 64);
    return each_int([&](int i) { return out.v[i] & 0x7fffffff; });
}
inline Ints rounded(F32x16 a) {
    float near[LANES];
    const F32x16 magic = splat(12582912.0f);  // the sum's last bit is worth 1
    store(near, (a + magic) - magic);
    return each_int([&](int i) { return std::int32_t(near[i]); });
}
inline F32x16 to_float(Ints a) {
    float out[LANES];
    for (int i = 0; i < LANES; ++i) out[i] = float(a.v[i]);
    return load(out);
}
inline F32x16 load_half(const std::uint16_t* p) {
    float out[LANES];
    for (int i = 0; i < LANES; ++i) out[i] = from_half(p[i]);
    return load(out);
}
inline Ints load_zeros(const std::uint8_t* p) {
    return each_int([&](int i) { return p[i] | std::int32_t(p[i]) << 23; });
}

#endif

#if !defined(__AVX512F__)
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
