// Attention of a few queries of one key head over their sequence's blocks of keys.
//
// A query meets its keys in position order, sixteen to a block and 256 to a chunk of the softmax,
// counted from the sequence's first token: whoever else is run, however the sequence is spread over
// pages, and whether its end is a chain or a branch of a tree, its sums are taken in the same order.
#pragma once

#include <cmath>
#include <vector>

#include "cache.hpp"
#include "model.hpp"
#include "tiles.hpp"

namespace outrider {

constexpr int MAX_HEAD_DIM = 256;
constexpr int CHUNK_BLOCKS = 16;
constexpr int CHUNK = CHUNK_BLOCKS * BLOCK;
constexpr int QUERIES = 16;  // of a tile

// Queries of one key head: those of rows first..last of one segment, or some of one row's.
struct Tile {
    int first_row, last_row;
    int first_head, heads;  // of each row, within the key head's group
};

// What a tile works in.
template <class T>
struct alignas(64) Bench {
    float scores[QUERIES][CHUNK];
    float sums[QUERIES][MAX_HEAD_DIM];
    T law[QUERIES][CHUNK];
    T q[QUERIES][MAX_HEAD_DIM];
    T keys[BLOCK * MAX_HEAD_DIM], values[CHUNK_BLOCKS][BLOCK * MAX_HEAD_DIM];  // of a tree's row
    float most[QUERIES], mass[QUERIES];
};

// scores[r, 16 lanes] = q[r] . keys of a block, for R queries.
template <class T, int R>
inline void score_some(float* scores, const T* keys, const T* q, int width) {
    F16 sums[R];
    for (F16& sum : sums) sum = splat(0.0f);
    constexpr int pair = PER_LANE<T>;
    for (int d = 0; d < width; d += pair) {
        const auto k = load_pairs(keys + d * BLOCK);
        for (int r = 0; r < R; ++r)
            sums[r] = dot(sums[r], k, splat_pair(q + std::size_t(r) * MAX_HEAD_DIM + d));
    }
    for (int r = 0; r < R; ++r) store(scores + std::size_t(r) * CHUNK, sums[r]);
}

template <class T, int R = MAX_ROWS>
inline void score(float* scores, const T* keys, const T* q, int width, int count) {
    for (; count >= R; count -= R) {
        score_some<T, R>(scores, keys, q, width);
        scores += std::size_t(R) * CHUNK;
        q += std::size_t(R) * MAX_HEAD_DIM;
    }
    if constexpr (R > 1) {
        if (count) score<T, R / 2>(scores, keys, q, width, count);
    }
}

// sums[r, D units of 16] += law[r] . values of a block, for R queries.
template <class T, int R, int D>
inline void weigh_some(float* sums, const T* values, const T* law, int width) {
    F16 s[R][D];
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < D; ++d) s[r][d] = load(sums + std::size_t(r) * MAX_HEAD_DIM + d * LANES);
    constexpr int pair = PER_LANE<T>;
    for (int j = 0; j < BLOCK; j += pair) {
        decltype(load_pairs(values)) v[D];
        for (int d = 0; d < D; ++d) v[d] = load_pairs(values + j * width + d * LANES * pair);
        for (int r = 0; r < R; ++r) {
            const auto p = splat_pair(law + std::size_t(r) * CHUNK + j);
            for (int d = 0; d < D; ++d) s[r][d] = dot(s[r][d], v[d], p);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < D; ++d) store(sums + std::size_t(r) * MAX_HEAD_DIM + d * LANES, s[r][d]);
}

constexpr int WEIGHED = MAX_ROWS >= 4 ? 4 : MAX_ROWS;

template <class T, int R = WEIGHED>
inline void weigh(float* sums, const T* values, const T* law, int width, int count) {
    constexpr int D = MAX_ROWS >= 4 ? 4 : 2;
    for (; count >= R; count -= R) {
        int d = 0;
        for (; d + D * LANES <= width; d += D * LANES)
            weigh_some<T, R, D>(sums + d, values + d * PER_LANE<T>, law, width);
        for (; d < width; d += LANES)
            weigh_some<T, R, 1>(sums + d, values + d * PER_LANE<T>, law, width);
        sums += std::size_t(R) * MAX_HEAD_DIM;
        law += std::size_t(R) * CHUNK;
    }
    if constexpr (R > 1) {
        if (count) weigh<T, R / 2>(sums, values, law, width, count);
    }
}

// A chunk's products for queries [first, last): by the kernels above, or by AMX's tiles.
template <class T>
struct Products {
    static void scores(Bench<T>& b, int first, int last, const T* const* keys, int from, int to, int width) {
        for (int i = from; i < to; ++i)
            score(b.scores[first] + i * BLOCK, keys[i], b.q[first], width, last - first);
    }
    static void weigh(Bench<T>& b, int first, int last, const T* const* values, int from, int to,
               int width) {
        for (int i = from; i < to; ++i)
            outrider::weigh(b.sums[first], values[i], b.law[first] + i * BLOCK, width, last - first);
    }
};

#if defined(__AMX_BF16__)

// Tiles 0 to 3 hold sums, 4 queries, 5 keys, 6 laws of a block, 7 its values.
template <>
struct Products<bf16> {
    static void configure(int queries) {
        TileConfig config(queries);
        config.lines[4] = std::uint8_t(queries);
        config.lines[6] = std::uint8_t(queries);
        config.bytes[6] = 2 * BLOCK;
        config.lines[7] = BLOCK / 2;
        asm volatile("" ::"r"(&config) : "memory");
        _tile_loadconfig(&config);
    }
    static void scores(Bench<bf16>& b, int first, int last, const bf16* const* keys, int from, int to,
                int width) {
        configure(last - first);
        asm volatile("" ::"r"(&b) : "memory");
        constexpr std::size_t stride = CHUNK * sizeof(float);
        for (int i = from; i < to; i += 4) {
            const int count = to - i < 4 ? to - i : 4;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int d = 0; d < width; d += TILE_INPUTS) {
                _tile_loadd(4, b.q[first] + d, MAX_HEAD_DIM * sizeof(bf16));
                _tile_loadd(5, keys[i] + d * BLOCK, 64);
                _tile_dpbf16ps(0, 4, 5);
                if (count == 1) continue;
                _tile_loadd(5, keys[i + 1] + d * BLOCK, 64);
                _tile_dpbf16ps(1, 4, 5);
                if (count == 2) continue;
                _tile_loadd(5, keys[i + 2] + d * BLOCK, 64);
                _tile_dpbf16ps(2, 4, 5);
                if (count == 3) continue;
                _tile_loadd(5, keys[i + 3] + d * BLOCK, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
            float* to_scores = b.scores[first] + i * BLOCK;
            _tile_stored(0, to_scores, stride);
            if (count > 1) _tile_stored(1, to_scores + BLOCK, stride);
            if (count > 2) _tile_stored(2, to_scores + 2 * BLOCK, stride);
            if (count > 3) _tile_stored(3, to_scores + 3 * BLOCK, stride);
        }
        asm volatile("" ::"r"(&b) : "memory");
        _tile_release();
    }
    static void weigh(Bench<bf16>& b, int first, int last, const bf16* const* values, int from, int to,
               int width) {
        configure(last - first);
        asm volatile("" ::"r"(&b) : "memory");
        constexpr std::size_t stride = MAX_HEAD_DIM * sizeof(float);
        const std::size_t line = std::size_t(width) * 2 * sizeof(bf16);
        for (int d = 0; d < width; d += 2 * LANES) {  // a head's width is a multiple of 32
            float* sums = b.sums[first] + d;
            _tile_loadd(0, sums, stride);
            _tile_loadd(1, sums + LANES, stride);
            for (int i = from; i < to; ++i) {
                _tile_loadd(6, b.law[first] + i * BLOCK, CHUNK * sizeof(bf16));
                _tile_loadd(7, values[i] + 2 * d, line);
                _tile_dpbf16ps(0, 6, 7);
                _tile_loadd(7, values[i] + 2 * (d + LANES), line);
                _tile_dpbf16ps(1, 6, 7);
            }
            _tile_stored(0, sums, stride);
            _tile_stored(1, sums + LANES, stride);
        }
        asm volatile("" ::"r"(&b) : "memory");
        _tile_release();
    }
};

#endif

// The queries of a tile over all they see; `q` and `out` are the rows' first heads of this key
// head, `q_stride` and `out_stride` apart from row to row, and heads `width` and `head_dim`.
template <class T>
class Attention {
public:
    Attention(const Cache<T>& cache, const Rows& rows, int head, int window, float scale,
              int head_dim)
        : cache_(cache), rows_(rows), head_(head), window_(window), scale_(scale),
          head_dim_(head_dim) {}

    void run(Bench<T>& b, const Tile& tile, const T* q, std::size_t q_stride, T* out,
             std::size_t out_stride) const {
        const int width = cache_.width, heads = tile.heads;
        const int queries = (tile.last_row - tile.first_row) * heads;
        int begin = 0x7fffffff, end = 0;  // tokens that any of them sees
        for (int i = 0; i < queries; ++i) {
            const T* from = q + (tile.first_row + i / heads) * q_stride +
                            std::size_t(tile.first_head + i % heads) * width;
            std::memcpy(b.q[i], from, width * sizeof(T));
            std::memset(b.sums[i], 0, width * sizeof(float));
            b.most[i] = -INFINITY;
            b.mass[i] = 0;
            const Row& row = rows_.rows[tile.first_row + i / heads];
            begin = std::min(begin, first_of(row));
            end = std::max(end, length_of(row));
        }
        const int last = block_of(end - 1) + 1;
        for (int chunk = block_of(begin) / CHUNK_BLOCKS * CHUNK_BLOCKS; chunk < last;
             chunk += CHUNK_BLOCKS)
            run_chunk(b, tile, chunk, std::max(block_of(begin), chunk),
                      std::min(last, chunk + CHUNK_BLOCKS));
        for (int i = 0; i < queries; ++i) {
            T* to = out + (tile.first_row + i / heads) * out_stride +
                    std::size_t(tile.first_head + i % heads) * head_dim_;
            const F16 mass = splat(b.mass[i]);
            int d = 0;
            for (; d + LANES <= head_dim_; d += LANES) store(to + d, load(b.sums[i] + d) / mass);
            for (; d < head_dim_; ++d) narrow_to(to + d, b.sums[i][d] / b.mass[i]);
        }
    }

private:
    const Cache<T>& cache_;
    const Rows& rows_;
    const int head_, window_;
    const float scale_;
    const int head_dim_;

    int length_of(const Row& row) const { return row.prefix + row.num_above; }
    int first_of(const Row& row) const {
        const int length = length_of(row);
        return window_ && length > window_ ? length - window_ : 0;
    }
    // Blocks are counted page after page.
    int block_of(int token) const {
        return token / cache_.page_size * cache_.blocks() + token % cache_.page_size / BLOCK;
    }
    int token_of(int block) const {
        return block / cache_.blocks() * cache_.page_size + block % cache_.blocks() * BLOCK;
    }
    int tokens_in(int block) const {
        return std::min(BLOCK, cache_.page_size - block % cache_.blocks() * BLOCK);
    }
    int page_of(const Row& row, int block) const {
        return rows_.pages[row.pages + block / cache_.blocks()];
    }

    // A block of a tree's row as a chain would have it.
    void gather(const Row& row, int block, T* keys, T* values) const {
        alignas(64) T key[MAX_HEAD_DIM], value[MAX_HEAD_DIM];
        const int first = token_of(block), width = cache_.width;
        std::memset(keys, 0, BLOCK * width * sizeof(T));
        std::memset(values, 0, BLOCK * width * sizeof(T));
        for (int lane = 0; lane < tokens_in(block); ++lane) {
            const int token = first + lane;
            if (token >= length_of(row)) break;
            const int slot =
                token < row.prefix
                    ? page_of(row, block) * cache_.page_size + token % cache_.page_size
                    : rows_.above[row.above + token - row.prefix];
            cache_.get(slot, head_, key, value);
            for (int d = 0; d < width; ++d) cache_.key_at(keys, lane, d) = key[d];
            for (int d = 0; d < width; ++d) cache_.value_at(values, lane, d) = value[d];
        }
    }

    void ask_for(const T* block) const {
        const char* at = reinterpret_cast<const char*>(block);
        const char* end = at + BLOCK * cache_.width * sizeof(T);
        for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
    }

    void run_chunk(Bench<T>& b, const Tile& tile, int chunk, int from, int to) const {
        const int width = cache_.width, heads = tile.heads;
        const int queries = (tile.last_row - tile.first_row) * heads;
        const Row& first = rows_.rows[tile.first_row];
        // Blocks that lie in the cache as all rows see them; a tree's rows go on by themselves.
        const int shared = first.num_above ? std::clamp(block_of(first.prefix), from, to) : to;
        const T* keys[CHUNK_BLOCKS];
        const T* values[CHUNK_BLOCKS];
        for (int i = from; i < shared; ++i) {
            keys[i - chunk] = cache_.keys(page_of(first, i), i % cache_.blocks(), head_);
            values[i - chunk] = cache_.values(page_of(first, i), i % cache_.blocks(), head_);
        }
        // Blocks lie apart, too short for the hardware to see where it goes.
        for (int i = from; i < shared; ++i) ask_for(values[i - chunk]);
        if (shared > from)
            Products<T>::scores(b, 0, queries, keys, from - chunk, shared - chunk, width);
        if (shared == to) {
            for (int i = 0; i < queries; ++i) soften(b, tile, i, chunk, from, to);
            Products<T>::weigh(b, 0, queries, values, from - chunk, to - chunk, width);
            return;
        }
        for (int r = tile.first_row; r < tile.last_row; ++r) {
            const int q = (r - tile.first_row) * heads;
            for (int i = shared; i < to; ++i) {
                gather(rows_.rows[r], i, b.keys, b.values[i - chunk]);
                keys[i - chunk] = b.keys;
                values[i - chunk] = b.values[i - chunk];
                Products<T>::scores(b, q, q + heads, keys, i - chunk, i - chunk + 1, width);
            }
            for (int i = q; i < q + heads; ++i) soften(b, tile, i, chunk, from, to);
            Products<T>::weigh(b, q, q + heads, values, from - chunk, to - chunk, width);
        }
    }

    // Makes weights of a query's scores in blocks from..to, and rescales what it has summed.
    void soften(Bench<T>& b, const Tile& tile, int query, int chunk, int from, int to) const {
        const Row& row = rows_.rows[tile.first_row + query / tile.heads];
        const int least = first_of(row), length = length_of(row);
        float* scores = b.scores[query];
        T* law = b.law[query];
        F16 best = splat(b.most[query]);
        for (int i = from; i < to; ++i) {
            float* at = scores + (i - chunk) * BLOCK;
            const int token = token_of(i);
            const int low = std::max(0, least - token);
            const int high = std::min(tokens_in(i), length - token);
            F16 s = load(at) * splat(scale_);
            if (low > 0 || high < BLOCK) {
                float lanes[LANES];
                store(lanes, s);
                for (int lane = 0; lane < LANES; ++lane)
                    if (lane < low || lane >= high) lanes[lane] = -INFINITY;
                s = load(lanes);
            }
            store(at, s);
            best = max(best, s);
        }
        const float now = highest(best);
        F16 all = splat(0.0f);
        if (now == -INFINITY) {  // sees nothing of this chunk, nor of those before
            for (int i = from; i < to; ++i) store(law + (i - chunk) * BLOCK, all);
            return;
        }
        const F16 shift = splat(now);
        for (int i = from; i < to; ++i) {
            const F16 p = exp(load(scores + (i - chunk) * BLOCK) - shift);
            store(law + (i - chunk) * BLOCK, p);
            all = all + p;
        }
        float old[LANES];
        store(old, exp(splat(b.most[query]) - shift));
        b.mass[query] = b.mass[query] * old[0] + total(all);
        b.most[query] = now;
        for (int d = 0; d < cache_.width; d += LANES)
            store(b.sums[query] + d, load(b.sums[query] + d) * splat(old[0]));
    }
};

}  // namespace outrider
