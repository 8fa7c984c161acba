// Products of attention: a tile's queries with a chunk's keys, and its weights with their values.
#pragma once

#include "attention_tasks.hpp"
#include "tiles.hpp"

namespace outrider {

constexpr int MAX_HEAD_DIM = 256;
constexpr int CHUNK = CHUNK_BLOCKS * BLOCK;

// What elements of a cache are multiplied with.
template <class E>
struct Factor {
    using type = E;
};
template <>
struct Factor<Codes> {
    using type = float;
};

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

// scores[r, 16 lanes of B blocks] = q[r] . keys of the blocks, for R queries.
template <class T, int R, int B>
inline void score_some(float* scores, const T* const* keys, const T* q, int width) {
    F32x16 sums[R][B];
    for (auto& line : sums)
        for (F32x16& sum : line) sum = splat(0.0f);
    constexpr int pair = PER_LANE<T>;
    for (int d = 0; d < width; d += pair) {
        decltype(load_pairs(q)) k[B];
        for (int b = 0; b < B; ++b) k[b] = load_pairs(keys[b] + d * BLOCK);
        for (int r = 0; r < R; ++r) {
            const auto value = splat_pair(q + std::size_t(r) * MAX_HEAD_DIM + d);
            for (int b = 0; b < B; ++b) sums[r][b] = dot(sums[r][b], k[b], value);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b) store(scores + std::size_t(r) * CHUNK + b * BLOCK, sums[r][b]);
}

template <class T, int R, int B>
inline void score_blocks(float* scores, const T* const* keys, int blocks, const T* q, int width) {
    for (; blocks >= B; blocks -= B) {
        score_some<T, R, B>(scores, keys, q, width);
        scores += B * BLOCK;
        keys += B;
    }
    if constexpr (B > 1) {
        if (blocks) score_blocks<T, R, B / 2>(scores, keys, blocks, q, width);
    }
}

constexpr int SCORED = 4;  // blocks side by side, at most

// Tally wait for themselves: few queries take several blocks at a time.
template <class T, int R = MAX_ROWS>
inline void score(float* scores, const T* const* keys, int blocks, const T* q, int width,
                  int queries) {
    constexpr int most = MAX_ROWS / R, side = most < SCORED ? most : SCORED;
    for (; queries >= R; queries -= R) {
        score_blocks<T, R, side>(scores, keys, blocks, q, width);
        scores += std::size_t(R) * CHUNK;
        q += std::size_t(R) * MAX_HEAD_DIM;
    }
    if constexpr (R > 1) {
        if (queries) score<T, R / 2>(scores, keys, blocks, q, width, queries);
    }
}

// sums[r, D units of 16] += probs[r] . values of a block, for R queries.
template <class T, int R, int D>
inline void weigh_some(float* sums, const T* values, const T* probs, int width) {
    F32x16 s[R][D];
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < D; ++d)
            s[r][d] = load(sums + std::size_t(r) * MAX_HEAD_DIM + d * LANES);
    constexpr int pair = PER_LANE<T>;
    for (int j = 0; j < BLOCK; j += pair) {
        decltype(load_pairs(values)) v[D];
        for (int d = 0; d < D; ++d) v[d] = load_pairs(values + j * width + d * LANES * pair);
        for (int r = 0; r < R; ++r) {
            const auto p = splat_pair(probs + std::size_t(r) * CHUNK + j);
            for (int d = 0; d < D; ++d) s[r][d] = dot(s[r][d], v[d], p);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < D; ++d)
            store(sums + std::size_t(r) * MAX_HEAD_DIM + d * LANES, s[r][d]);
}

constexpr int WEIGHED = MAX_ROWS >= 4 ? 4 : MAX_ROWS;

template <class T, int R = WEIGHED>
inline void weigh(float* sums, const T* values, const T* probs, int width, int count) {
    constexpr int D = MAX_ROWS >= 4 ? 4 : 2;
    for (; count >= R; count -= R) {
        int d = 0;
        for (; d + D * LANES <= width; d += D * LANES)
            weigh_some<T, R, D>(sums + d, values + d * PER_LANE<T>, probs, width);
        for (; d < width; d += LANES)
            weigh_some<T, R, 1>(sums + d, values + d * PER_LANE<T>, probs, width);
        sums += std::size_t(R) * MAX_HEAD_DIM;
        probs += std::size_t(R) * CHUNK;
    }
    if constexpr (R > 1) {
        if (count) weigh<T, R / 2>(sums, values, probs, width, count);
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
            score(b.scores[first] + i * BLOCK, chunk.keys + i, count, b.q[first], width,
                  last - first);
        }
    }
    static void done(AttentionScratch<E>&) {}
    template <class Ask>
    static void weigh(AttentionScratch<E>& b, int first, int last, const Chunk<E>& chunk, int width,
                      Ask& ask, int share) {
        for (int i = chunk.from; i < chunk.to; ++i) {
            ask(share);
            outrider::weigh(b.sums[first], chunk.values[i], b.probs[first] + i * BLOCK, width,
                            last - first);
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
