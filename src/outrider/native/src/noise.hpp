// The shared Gumbel noise: the function that sampling/noise.py specifies, the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace outrider {

constexpr int NOISE_BLOCK = 128;     // tokens that are drawn together
constexpr float MOST_NOISE = 22.9f;  // above every g

struct NoiseKey {
    std::uint32_t low, high;  // of the seed
    std::uint32_t position, sample;
};

// A register of numbers.
#if defined(__AVX512F__)
constexpr int WORDS = 16;
#elif defined(__AVX2__)
constexpr int WORDS = 8;
#else
constexpr int WORDS = 4;
#endif
typedef std::uint32_t Words __attribute__((vector_size(4 * WORDS)));
typedef std::int32_t Integers __attribute__((vector_size(4 * WORDS)));
typedef float Floats __attribute__((vector_size(4 * WORDS)));

struct Wide {  // 64-bit products
    Words high, low;
};

// Compilers do not find the instruction for this.
inline Wide multiply(Words x, std::uint32_t by) {
#if defined(__AVX512F__)
    const __m512i m = _mm512_set1_epi32(std::int32_t(by));
    const __m512i even = _mm512_mul_epu32((__m512i)x, m);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), m);
    const __mmask16 odds = 0xaaaa;
    return {(Words)_mm512_mask_blend_epi32(odds, _mm512_srli_epi64(even, 32), odd),
            (Words)_mm512_mask_blend_epi32(odds, even, _mm512_slli_epi64(odd, 32))};
#elif defined(__AVX2__)
    const __m256i m = _mm256_set1_epi32(std::int32_t(by));
    const __m256i even = _mm256_mul_epu32((__m256i)x, m);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), m);
    return {(Words)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa),
            (Words)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa)};
#else
    Wide out;
    for (int i = 0; i < WORDS; ++i) {
        const std::uint64_t product = std::uint64_t(by) * x[i];
        out.high[i] = std::uint32_t(product >> 32);
        out.low[i] = std::uint32_t(product);
    }
    return out;
#endif
}

inline Floats floats_of(Integers x) { return __builtin_convertvector(x, Floats); }

// n log 2 - log(1 + f)
inline Floats neg_log(Floats f, Floats n) {
    Floats q = f * -0x1.07c964p-3f;
    q = (q + 0x1.1e678cp-3f) * f;
    q = (q + -0x1.f332a6p-4f) * f;
    q = (q + 0x1.1ed662p-3f) * f;
    q = (q + -0x1.559c46p-3f) * f;
    q = (q + 0x1.99d044p-3f) * f;
    q = (q + -0x1.fffefcp-3f) * f;
    q = (q + 0x1.555506p-2f) * f;
    q = (q + -0x1p-1f) * f;
    q = q * f;
    Floats r = n * 0x1.2fefa2p-17f;
    r = r - q;
    r = r - f;
    return r + n * 0x1.62e3p-1f;
}

inline Integers exponents(Floats x) { return (Integers)((Words)x - 0x3f2aaaabu) & -0x800000; }

inline Floats gumbel_of(Words k) {
    // 2k + 1 as the sum of two exact numbers, which is rounded once.
    Floats w = floats_of((Integers)(k >> 16)) * 0x1p17f +
               floats_of((Integers)((k << 1 & 0x1ffffu) | 1u));
    w = w * 0x1p-33f;
    w = w < 0x1.fffffep-1f ? w : Floats{} + 0x1.fffffep-1f;
    Integers s = exponents(1.0f - w);
    const Floats t = (Floats)(0x3f800000 - s);
    const Floats e = neg_log((t - 1.0f) - w * t, floats_of(s) * -0x1p-23f);
    s = exponents(e);
    const Floats f = (Floats)((Integers)e - s) - 1.0f;
    return neg_log(f, floats_of(s) * -0x1p-23f);
}

// The noise of tokens first .. first + 127, `first` a multiple of 4. Philox4x32-10 (Salmon et al.,
// SC 2011), two registers of counters at a time, since one would wait for its own products.
inline void gumbel_block(const NoiseKey& key, std::uint32_t first, float* g) {
    Words count;
    for (int j = 0; j < WORDS; ++j) count[j] = std::uint32_t(j);
    for (int start = 0; start < NOISE_BLOCK; start += 8 * WORDS) {
        Words c0[2], c1[2], c2[2], c3[2];
        for (int i = 0; i < 2; ++i) {
            c0[i] = Words{} + key.position;
            c1[i] = count + ((first + start) / 4 + WORDS * i);
            c2[i] = Words{} + key.sample;
            c3[i] = Words{};
        }
        std::uint32_t k0 = key.low, k1 = key.high;
        for (int round = 0; round < 10; ++round) {
            for (int i = 0; i < 2; ++i) {
                const Wide a = multiply(c0[i], 0xD2511F53u), b = multiply(c2[i], 0xCD9E8D57u);
                c0[i] = b.high ^ c1[i] ^ k0;
                c1[i] = b.low;
                c2[i] = a.high ^ c3[i] ^ k1;
                c3[i] = a.low;
            }
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        for (int i = 0; i < 2; ++i) {
            const Floats lanes[4] = {gumbel_of(c0[i]), gumbel_of(c1[i]), gumbel_of(c2[i]),
                                     gumbel_of(c3[i])};
            float* to = g + start + 4 * WORDS * i;
            for (int j = 0; j < WORDS; ++j)
                for (int lane = 0; lane < 4; ++lane) to[4 * j + lane] = lanes[lane][j];
        }
    }
}

}  // namespace outrider
