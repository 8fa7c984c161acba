// Products of attention: a tile's queries with a chunk's keys, and its weights with their values.
#pragma once

#include <type_traits>

#include "attention_tasks.hpp"
#include "steps.hpp"
#include "tiles.hpp"

namespace outrider {

constexpr int MAX_HEAD_DIM = 256;
constexpr int CHUNK = CHUNK_BLOCKS * BLOCK;

// What elements of a cache are multiplied with: those that are widened are so once for several
// factors, which are widened once for all elements.
template <class E>
struct Factor {
    using type = std::conditional_t<WIDENS<E>, float, E>;
};
template <>
struct Factor<Codes> {
    using type = float;
};
// Factors that a lane of elements meets one after the other.
template <class E>
constexpr int TURNS = sizeof(typename Factor<E>::type) / sizeof(E);
// Sixteen lanes of elements, of their pairs those that meet factor `turn`.
template <int TURN, class E>
inline auto elements(const E* p) {
    const auto all = load_pairs(p);
    if constexpr (TURNS<E> == 1)
        return all;
    else if constexpr (TURN == 0)
        return low(all);
    else
        return high(all);
}

// What queries have summed: the highest score, and of weights relative to it their sum and that of
// values.
struct Tally {
    float *most, *mass;  // [QUERIES]
    float* sums;         // [QUERIES][stride]
    std::size_t stride;

    static std::size_t size(int width) { return std::size_t(QUERIES) * (2 + width); }
    static Tally in(float* room, int width) {
        return {room, room + QUERIES, room + 2 * QUERIES, std::size_t(width)};
    }
};

// What a tile works in.
template <class E>
struct alignas(64) AttentionScratch {
    static constexpr int IN_BLOCK = BLOCK * MAX_HEAD_DIM / NUMBERS<E>;
    float scores[QUERIES][CHUNK];
    float sums[QUERIES][MAX_HEAD_DIM];
    float before[QUERIES * (2 + MAX_HEAD_DIM)];  // Tally of earlier stretches
    typename Factor<E>::type probs[QUERIES][CHUNK];
    typename Factor<E>::type q[QUERIES][MAX_HEAD_DIM];
    // Blocks of a tree's row.
    E keys[CHUNK_BLOCKS][IN_BLOCK], values[CHUNK_BLOCKS][IN_BLOCK];
    float most[QUERIES], mass[QUERIES], shrunk[QUERIES];
    Tally now() { return {most, mass, sums[0], MAX_HEAD_DIM}; }
    int configured = 0;  // lines of AMX's tiles
    Ahead ahead;
};

// Blocks [from, to) of a chunk, counted from its first.
template <class E>
struct Chunk {
    int from, to;
    int token[CHUNK_BLOCKS], room[CHUNK_BLOCKS];  // first token, and how many there can be
    const E *keys[CHUNK_BLOCKS], *values[CHUNK_BLOCKS];
};

// A weight as values are multiplied with it.
template <class E, class F>
inline F weight(F p) {
    if constexpr (WIDENS<E>)
        return as_bf16(p);
    else
        return p;
}

constexpr int SCORED = 4;  // blocks side by side, at most
// Queries that meet the same elements, which are widened once for all of them.
constexpr int TOGETHER = MAX_SUMS >= QUERIES ? QUERIES : MAX_ROWS;
constexpr int beside(int queries) {
    return 4 * queries <= MAX_SUMS ? 4 : 2 * queries <= MAX_SUMS ? 2 : 1;
}

// scores[r, 16 lanes of B blocks] = q[r] . keys of the blocks, for R queries.
template <class E, class F, int R, int B>
inline void score_some(float* scores, const E* const* keys, const F* q, int width) {
    F32x16 sums[R][B];
    for (auto& line : sums)
        for (F32x16& sum : line) sum = splat(0.0f);
    for (int d = 0; d < width; d += PER_LANE<E>)
        each_step<0, TURNS<E>>([&](auto turn) __attribute__((always_inline)) {
            decltype(elements<turn>(keys[0])) k[B];
            for (int b = 0; b < B; ++b) k[b] = elements<turn>(keys[b] + d * BLOCK);
            for (int r = 0; r < R; ++r) {
                const auto value = splat_pair(q + std::size_t(r) * MAX_HEAD_DIM + d + turn);
                for (int b = 0; b < B; ++b) sums[r][b] = dot(sums[r][b], k[b], value);
            }
        });
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b) store(scores + std::size_t(r) * CHUNK + b * BLOCK, sums[r][b]);
}

// R queries, or all that there are if these are fewer.
template <class E, class F, int R = TOGETHER, int B = beside(R)>
inline void score(float* scores, const E* const* keys, int blocks, const F* q, int width,
                  int queries) {
    if constexpr (R > 1) {
        if (queries < R) return score<E, F, R - 1>(scores, keys, blocks, q, width, queries);
    }
    for (; blocks >= B; blocks -= B, scores += B * BLOCK, keys += B)
        score_some<E, F, R, B>(scores, keys, q, width);
    if constexpr (B > 1) {
        if (blocks) score<E, F, R, B / 2>(scores, keys, blocks, q, width, queries);
    }
}

// sums[r, D units of 16] += probs[r] . values of some blocks, for R queries.
template <class E, class F, int R, int D>
inline void weigh_some(float* sums, const E* const* values, int blocks, std::size_t from,
                       const F* probs, int width) {
    F32x16 s[R][D];
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < D; ++d)
            s[r][d] = load(sums + std::size_t(r) * MAX_HEAD_DIM + d * LANES);
    for (int i = 0; i < blocks; ++i, probs += BLOCK) {
        const E* block = values[i] + from;
        for (int j = 0; j < BLOCK; j += PER_LANE<E>, block += width * PER_LANE<E>)
            each_step<0, TURNS<E>>([&](auto turn) __attribute__((always_inline)) {
                decltype(elements<turn>(block)) v[D];
                for (int d = 0; d < D; ++d) v[d] = elements<turn>(block + d * LANES * PER_LANE<E>);
                for (int r = 0; r < R; ++r) {
                    const auto p = splat_pair(probs + std::size_t(r) * CHUNK + j + turn);
                    for (int d = 0; d < D; ++d) s[r][d] = dot(s[r][d], v[d], p);
                }
            });
    }
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < D; ++d)
            store(sums + std::size_t(r) * MAX_HEAD_DIM + d * LANES, s[r][d]);
}

// The same from element `d` of the values on, for R queries or all that there are.
template <class E, class F, int R = TOGETHER, int D = beside(R)>
inline void weigh(float* sums, const E* const* values, int blocks, int d, const F* probs, int width,
                  int queries) {
    if constexpr (R > 1) {
        if (queries < R) return weigh<E, F, R - 1>(sums, values, blocks, d, probs, width, queries);
    }
    for (; d + D * LANES <= width; d += D * LANES)
        weigh_some<E, F, R, D>(sums + d, values, blocks, d * PER_LANE<E>, probs, width);
    if constexpr (D > 1) {
        if (d < width) weigh<E, F, R, D / 2>(sums, values, blocks, d, probs, width, queries);
    }
}

// A chunk's products for queries [first, last): by the kernels above, by those of
// attention_codes.hpp, or by AMX's tiles. Beside every block `share` lines of memory are asked for.
template <class E>
struct Products {
    template <class Ask>
    static void scores(AttentionScratch<E>& b, int first, int last, const Chunk<E>& chunk, int from,
                       int to, int width, Ask& ask, int share) {
        for (int i = from; i < to; i += SCORED) {
            const int count = to - i < SCORED ? to - i : SCORED;
            ask(count * share);
            each_tile(last - first, tiles_of(last - first, TOGETHER), [&](int q, int queries) {
                q += first;
                score(b.scores[q] + i * BLOCK, chunk.keys + i, count, b.q[q], width, queries);
            });
        }
    }
    static void done(AttentionScratch<E>&) {}
    template <class Ask>
    static void weigh(AttentionScratch<E>& b, int first, int last, const Chunk<E>& chunk, int width,
                      Ask& ask, int share) {
        for (int i = chunk.from; i < chunk.to; i += SCORED) {
            const int count = chunk.to - i < SCORED ? chunk.to - i : SCORED;
            ask(count * share);
            each_tile(last - first, tiles_of(last - first, TOGETHER), [&](int q, int queries) {
                q += first;
                outrider::weigh(b.sums[q], chunk.values + i, count, 0, b.probs[q] + i * BLOCK,
                                width, queries);
            });
        }
    }
};

#if defined(__AMX_BF16__)

// Tiles 0 to 3 hold sums, 4 queries, 5 keys, 6 probs of a block, 7 its values.
template <>
struct Products<bf16> {
    static void configure(AttentionScratch<bf16>& b, int queries) {
        if (b.configured != queries) {
            TileConfig config(queries);
            config.lines[4] = std::uint8_t(queries);
            config.lines[6] = std::uint8_t(queries);
            config.bytes[6] = 2 * BLOCK;
            config.lines[7] = BLOCK / 2;
            asm volatile("" ::"r"(&config) : "memory");
            _tile_loadconfig(&config);
            b.configured = queries;
        }
        // The compiler does not know what the tile instructions read.
        asm volatile("" ::"r"(&b) : "memory");
    }
    static void done(AttentionScratch<bf16>& b) {
        if (b.configured) _tile_release();
        b.configured = 0;
    }
    template <class Ask>
    static void scores(AttentionScratch<bf16>& b, int first, int last, const Chunk<bf16>& chunk,
                       int from, int to, int width, Ask& ask, int share) {
        configure(b, last - first);
        constexpr std::size_t stride = CHUNK * sizeof(float);
        for (int i = from; i < to; i += 4) {
            const int count = to - i < 4 ? to - i : 4;
            const bf16* const* keys = chunk.keys + i;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int d = 0; d < width; d += TILE_INPUTS) {
                ask(count * share * TILE_INPUTS / width);
                _tile_loadd(4, b.q[first] + d, MAX_HEAD_DIM * sizeof(bf16));
                _tile_loadd(5, keys[0] + d * BLOCK, 64);
                _tile_dpbf16ps(0, 4, 5);
                if (count == 1) continue;
                _tile_loadd(5, keys[1] + d * BLOCK, 64);
                _tile_dpbf16ps(1, 4, 5);
                if (count == 2) continue;
                _tile_loadd(5, keys[2] + d * BLOCK, 64);
                _tile_dpbf16ps(2, 4, 5);
                if (count == 3) continue;
                _tile_loadd(5, keys[3] + d * BLOCK, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
            float* to_scores = b.scores[first] + i * BLOCK;
            _tile_stored(0, to_scores, stride);
            if (count > 1) _tile_stored(1, to_scores + BLOCK, stride);
            if (count > 2) _tile_stored(2, to_scores + 2 * BLOCK, stride);
            if (count > 3) _tile_stored(3, to_scores + 3 * BLOCK, stride);
        }
        asm volatile("" ::"r"(&b) : "memory");
    }
    template <class Ask>
    static void weigh(AttentionScratch<bf16>& b, int first, int last, const Chunk<bf16>& chunk,
                      int width, Ask& ask, int share) {
        configure(b, last - first);
        int d = 0;
        for (; d + 4 * LANES <= width; d += 4 * LANES)
            weigh_units<4>(b, first, chunk, width, d, ask, share);
        for (; d < width; d += 2 * LANES)  // a head's width is a multiple of 32
            weigh_units<2>(b, first, chunk, width, d, ask, share);
        asm volatile("" ::"r"(&b) : "memory");
    }

private:
    // N units of 16 of the sums, from element `d` on.
    template <int N, class Ask>
    static void weigh_units(AttentionScratch<bf16>& b, int first, const Chunk<bf16>& chunk,
                            int width, int d, Ask& ask, int share) {
        constexpr std::size_t stride = MAX_HEAD_DIM * sizeof(float);
        const std::size_t line = std::size_t(width) * 2 * sizeof(bf16);
        float* sums = b.sums[first] + d;
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + LANES, stride);
        if constexpr (N > 2) {
            _tile_loadd(2, sums + 2 * LANES, stride);
            _tile_loadd(3, sums + 3 * LANES, stride);
        }
        for (int i = chunk.from; i < chunk.to; ++i) {
            const bf16* values = chunk.values[i] + 2 * d;
            ask(share * N * LANES / width);
            _tile_loadd(6, b.probs[first] + i * BLOCK, CHUNK * sizeof(bf16));
            _tile_loadd(7, values, line);
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(7, values + 2 * LANES, line);
            _tile_dpbf16ps(1, 6, 7);
            if constexpr (N > 2) {
                _tile_loadd(7, values + 4 * LANES, line);
                _tile_dpbf16ps(2, 6, 7);
                _tile_loadd(7, values + 6 * LANES, line);
                _tile_dpbf16ps(3, 6, 7);
            }
        }
        _tile_stored(0, sums, stride);
        _tile_stored(1, sums + LANES, stride);
        if constexpr (N > 2) {
            _tile_stored(2, sums + 2 * LANES, stride);
            _tile_stored(3, sums + 3 * LANES, stride);
        }
    }
};

#endif

}  // namespace outrider
