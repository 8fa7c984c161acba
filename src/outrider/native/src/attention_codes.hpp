// Keys and values in codes of 8 bits: how they are made, and their products with queries and
// weights, which are fp32.
#pragma once

#include "attention_products.hpp"

namespace outrider {

// Writes `width` numbers as codes; zeros, and false, where one is no number.
template <class T>
inline bool encode(CodeRow* to, const T* from, int width) {
    bool finite = true;
    for (int at = 0; at < width; at += Codes::WIDTH, ++to) {
        const F32x16 x[2] = {load(from + at), load(from + at + LANES)};
        const std::int32_t bits = highest(max(magnitude(x[0]), magnitude(x[1])));
        float most;
        std::memcpy(&most, &bits, 4);
        finite &= std::isfinite(most);
        to->scale = std::isfinite(most) ? narrow(most / 127) : bf16(0);
        const float scale = widen(to->scale);
        if (scale == 0) {
            std::memset(to->codes, 0, sizeof to->codes);
            continue;
        }
        for (int half = 0; half < 2; ++half) {
            std::int32_t codes[LANES];
            const Ints near = rounded(x[half] / splat(scale));
            std::memcpy(codes, &near, sizeof codes);
            for (int i = 0; i < LANES; ++i)
                to->codes[half * LANES + i] = std::int8_t(std::clamp(codes[i], -127, 127));
        }
    }
    return finite;
}

inline F32x16 load_code(const std::int8_t* p) {
    return load_signed(reinterpret_cast<const std::uint8_t*>(p));
}

// scores[r, 16 lanes of B blocks] = q[r] . keys of the blocks, for R queries.
template <int R, int B>
inline void score_codes(float* scores, const Codes* const* keys, const float* q, int groups) {
    for (int g = 0; g < groups; ++g) {
        F32x16 sums[R][B];
        for (auto& line : sums)
            for (F32x16& sum : line) sum = splat(0.0f);
        for (int d = 0; d < Codes::WIDTH; ++d) {
            F32x16 k[B];
            for (int b = 0; b < B; ++b) k[b] = load_code(keys[b][g].codes + d * BLOCK);
            for (int r = 0; r < R; ++r) {
                const F32x16 value = splat(q[std::size_t(r) * MAX_HEAD_DIM + g * Codes::WIDTH + d]);
                for (int b = 0; b < B; ++b) sums[r][b] = fma(k[b], value, sums[r][b]);
            }
        }
        for (int b = 0; b < B; ++b) {
            const F32x16 scale = load(keys[b][g].scales);
            for (int r = 0; r < R; ++r) {
                float* to = scores + std::size_t(r) * CHUNK + b * BLOCK;
                store(to, fma(sums[r][b], scale, g ? load(to) : splat(0.0f)));
            }
        }
    }
}

// sums[r, D units of 32] += probs[r] . values of a block, for R queries.
template <int R>
inline void weigh_codes(float* sums, const Codes* values, const float* probs, int groups) {
    for (int g = 0; g < groups; ++g, ++values, sums += Codes::WIDTH) {
        F32x16 s[R][2];
        alignas(64) float scaled[R][BLOCK];
        for (int r = 0; r < R; ++r) {
            const F32x16 p = load(probs + std::size_t(r) * CHUNK);
            store(scaled[r], p * load(values->scales));
            s[r][0] = load(sums + std::size_t(r) * MAX_HEAD_DIM);
            s[r][1] = load(sums + std::size_t(r) * MAX_HEAD_DIM + LANES);
        }
        for (int j = 0; j < BLOCK; ++j) {
            const F32x16 low = load_code(values->codes + j * Codes::WIDTH);
            const F32x16 high = load_code(values->codes + j * Codes::WIDTH + LANES);
            for (int r = 0; r < R; ++r) {
                const F32x16 p = splat(scaled[r][j]);
                s[r][0] = fma(low, p, s[r][0]);
                s[r][1] = fma(high, p, s[r][1]);
            }
        }
        for (int r = 0; r < R; ++r) {
            store(sums + std::size_t(r) * MAX_HEAD_DIM, s[r][0]);
            store(sums + std::size_t(r) * MAX_HEAD_DIM + LANES, s[r][1]);
        }
    }
}

template <>
struct Products<Codes> {
    using Scratch = AttentionScratch<Codes>;
    // Codes are widened once for all queries of a pass.
    static constexpr int SCORES = MAX_ROWS, WEIGHTS = MAX_ROWS >= 8 ? 8 : MAX_ROWS >= 4 ? 2 : 1;

    template <class Ask>
    static void scores(Scratch& b, int first, int last, const Chunk<Codes>& chunk, int from, int to,
                       int width, Ask& ask, int share) {
        for (int i = from; i < to; i += SCORED) {
            const int count = std::min(to - i, SCORED);
            ask(count * share);
            for (int at = first; at < last; at += SCORES)
                score<SCORES>(b.scores[at] + i * BLOCK, chunk.keys + i, count, b.q[at],
                              width / Codes::WIDTH, last - at);
        }
    }
    template <class Ask>
    static void weigh(Scratch& b, int first, int last, const Chunk<Codes>& chunk, int width,
                      Ask& ask, int share) {
        for (int i = chunk.from; i < chunk.to; ++i) {
            ask(share);
            for (int at = first; at < last; at += WEIGHTS)
                weigh<WEIGHTS>(b.sums[at], chunk.values[i], b.probs[at] + i * BLOCK,
                               width / Codes::WIDTH, last - at);
        }
    }
    static void done(Scratch&) {}

private:
    // R queries, or all that there are if these are fewer.
    template <int R>
    static void score(float* scores, const Codes* const* keys, int blocks, const float* q,
                      int groups, int queries) {
        if constexpr (R > 1) {
            if (queries < R) return score<R - 1>(scores, keys, blocks, q, groups, queries);
        }
        constexpr int SIDE = std::min(MAX_ROWS / R, SCORED);
        int i = 0;
        for (; i + SIDE <= blocks; i += SIDE)
            score_codes<R, SIDE>(scores + i * BLOCK, keys + i, q, groups);
        for (; i < blocks; ++i) score_codes<R, 1>(scores + i * BLOCK, keys + i, q, groups);
    }
    template <int R>
    static void weigh(float* sums, const Codes* values, const float* probs, int groups,
                      int queries) {
        if constexpr (R > 1) {
            if (queries < R) return weigh<R - 1>(sums, values, probs, groups, queries);
        }
        weigh_codes<R>(sums, values, probs, groups);
    }
};

}  // namespace outrider
