// The shared Gumbel noise: the function that sampling/noise.py specifies, the same bits.
#pragma once

#include "isa.hpp"
#include "pipeline.hpp"

namespace outrider {

typedef std::int32_t Integers __attribute__((vector_size(4 * WORDS)));
typedef float Floats __attribute__((vector_size(4 * WORDS)));

constexpr float NOISE_ERROR = 1e-3f;  // far above the errors of gumbel_of

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
    Floats w =
        floats_of((Integers)(k >> 16)) * 0x1p17f + floats_of((Integers)((k << 1 & 0x1ffffu) | 1u));
    w = w * 0x1p-33f;
    w = w < 0x1.fffffep-1f ? w : Floats{} + 0x1.fffffep-1f;
    Integers s = exponents(1.0f - w);
    const Floats t = (Floats)(0x3f800000 - s);
    const Floats e = neg_log((t - 1.0f) - w * t, floats_of(s) * -0x1p-23f);
    s = exponents(e);
    const Floats f = (Floats)((Integers)e - s) - 1.0f;
    return neg_log(f, floats_of(s) * -0x1p-23f);
}

// The random words of the tokens first .. first + 127, `first` a multiple of 4: token 4 * j + lane
// of each 4 * WORDS has lane j of the word `lane`.
struct NoiseWords {
    Words of[NOISE_BLOCK / WORDS];

    // Philox4x32-10 (Salmon et al., SC 2011), two registers of counters at a time, since one would
    // wait for its own products.
    NoiseWords(const NoiseKey& key, std::uint32_t first) {
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
                Words* to = of + start / WORDS + 4 * i;
                to[0] = c0[i], to[1] = c1[i], to[2] = c2[i], to[3] = c3[i];
            }
        }
    }

    // At least the largest noise of the block, and less than one more: of a word k it is no more
    // than -log((k + 0.5) / 2^32), but for errors of rounding.
    float most() const {
        Words smallest = of[0];
        for (const Words& word : of) smallest = word < smallest ? word : smallest;
        const std::uint32_t k = least(smallest);
        return float(k ? 1 + __builtin_clz(k) : 33) * 0.693147182f + NOISE_ERROR;
    }

    void write(float* g) const {
        for (int start = 0; start < NOISE_BLOCK; start += 4 * WORDS) {
            const Words* words = of + start / WORDS;
            const Floats lanes[4] = {gumbel_of(words[0]), gumbel_of(words[1]), gumbel_of(words[2]),
                                     gumbel_of(words[3])};
            for (int j = 0; j < WORDS; ++j)
                for (int lane = 0; lane < 4; ++lane) g[start + 4 * j + lane] = lanes[lane][j];
        }
    }
};

}  // namespace outrider
