// Attention of a few queries of one key head over their sequence's blocks of keys.
//
// A query meets its keys in position order, sixteen to a block and 256 to a chunk of the softmax,
// counted from the sequence's first token: whoever else is run, however the sequence is spread over
// pages, and whether its end is a chain or a branch of a tree, its sums are taken in the same order.
#pragma once

#include <cmath>
#include <vector>

#include "cache.hpp"
#include "fetch.hpp"
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
    int start, of_segment;  // the segment's first tile, and how many it has
};

// A tile's queries of one key head.
struct Task {
    const Tile* tile;
    int head;
    bool fresh;  // no other tile has just read the same keys
};

// All that attention has to do: segment after segment, and of each head after head, so that what is
// read next lies near what was read before.
class Tasks {
public:
    // `group` query heads share each of `heads` key heads.
    Tasks(const Rows& all, int group, int heads) : heads_(heads) {
        const int together = std::min(group, QUERIES), rows = QUERIES / together;
        const auto& list = all.rows;
        int start = 0;
        for (int first = 0, last; first < int(list.size()); first = last) {
            // Chains, and trees behind one prefix.
            const Row& row = list[first];
            last = first + 1;
            while (last < int(list.size()) && last - first < rows &&
                   list[last].pages == row.pages &&
                   (list[last].num_above > 0) == (row.num_above > 0))
                ++last;
            for (int head = 0; head < group; head += together)
                tiles_.push_back({first, last, head, std::min(together, group - head), start, 0});
            if (last < int(list.size()) && list[last].pages == row.pages) continue;
            for (int i = start; i < int(tiles_.size()); ++i)
                tiles_[i].of_segment = int(tiles_.size()) - start;
            start = int(tiles_.size());
        }
    }
    int count() const { return int(tiles_.size()) * heads_; }
    Task operator[](int number) const {
        const Tile& first = tiles_[tiles_[number / heads_].start];
        const int place = number - first.start * heads_, tile = place % first.of_segment;
        return {&first + tile, place / first.of_segment, tile == 0};
    }

private:
    std::vector<Tile> tiles_;
    const int heads_;
};

// Blocks [first, last) that a tile sees, in chunks that start at multiples of CHUNK_BLOCKS.
struct Span {
    int first, last;
    int chunk() const { return first / CHUNK_BLOCKS * CHUNK_BLOCKS; }
};

// What is asked of memory: keys and values chunk by chunk, in the order in which they will be read,
// a chunk of keys ahead. Each chunk that is worked on asks for as much as it reads.
struct Ahead {
    int task = -1, chunk = 0;  // being asked for
    bool values = false;       // of the chunk; else its keys
    Span span{0, 0};
    Fetch<CHUNK_BLOCKS> blocks;
    int owed = 0;       // lines
    int expected = -1;  // the task that is worked on next
};

// What a tile works in.
template <class T>
struct alignas(64) Bench {
    float scores[QUERIES][CHUNK];
    float sums[QUERIES][MAX_HEAD_DIM];
    T law[QUERIES][CHUNK];
    T q[QUERIES][MAX_HEAD_DIM];
    T keys[BLOCK * MAX_HEAD_DIM], values[CHUNK_BLOCKS][BLOCK * MAX_HEAD_DIM];  // of a tree's row
    float most[QUERIES], mass[QUERIES], shrunk[QUERIES];
    int configured = 0;  // lines of AMX's tiles
    Ahead ahead;
};

// Blocks [from, to) of a chunk, counted from its first, and the lines of memory to be asked for beside
// each of its parts.
template <class T>
struct Chunk {
    int from, to;
    int token[CHUNK_BLOCKS], room[CHUNK_BLOCKS];  // first token, and how many there can be
    const T *keys[CHUNK_BLOCKS], *values[CHUNK_BLOCKS];
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

// A chunk's products for queries [first, last): by the kernels above, or by AMX's tiles. Beside every
// block `share` lines of memory are asked for.
template <class T>
struct Products {
    template <class Ask>
    static void scores(Bench<T>& b, int first, int last, const Chunk<T>& chunk, int from, int to,
                       int width, Ask& ask, int share) {
        for (int i = from; i < to; ++i) {
            ask(share);
            score(b.scores[first] + i * BLOCK, chunk.keys[i], b.q[first], width, last - first);
        }
    }
    static void done(Bench<T>&) {}
    template <class Ask>
    static void weigh(Bench<T>& b, int first, int last, const Chunk<T>& chunk, int width, Ask& ask,
                      int share) {
        for (int i = chunk.from; i < chunk.to; ++i) {
            ask(share);
            outrider::weigh(b.sums[first], chunk.values[i], b.law[first] + i * BLOCK, width,
                            last - first);
        }
    }
};

#if defined(__AMX_BF16__)

// Tiles 0 to 3 hold sums, 4 queries, 5 keys, 6 laws of a block, 7 its values.
template <>
struct Products<bf16> {
    static void configure(Bench<bf16>& b, int queries) {
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
    static void done(Bench<bf16>& b) {
        if (b.configured) _tile_release();
        b.configured = 0;
    }
    template <class Ask>
    static void scores(Bench<bf16>& b, int first, int last, const Chunk<bf16>& chunk, int from,
                       int to, int width, Ask& ask, int share) {
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
    static void weigh(Bench<bf16>& b, int first, int last, const Chunk<bf16>& chunk, int width,
                      Ask& ask, int share) {
        configure(b, last - first);
        constexpr std::size_t stride = MAX_HEAD_DIM * sizeof(float);
        const std::size_t line = std::size_t(width) * 2 * sizeof(bf16);
        int d = 0;
        for (; d + 4 * LANES <= width; d += 4 * LANES) {
            float* sums = b.sums[first] + d;
            _tile_loadd(0, sums, stride);
            _tile_loadd(1, sums + LANES, stride);
            _tile_loadd(2, sums + 2 * LANES, stride);
            _tile_loadd(3, sums + 3 * LANES, stride);
            for (int i = chunk.from; i < chunk.to; ++i) {
                const bf16* values = chunk.values[i] + 2 * d;
                ask(share * 4 * LANES / width);
                _tile_loadd(6, b.law[first] + i * BLOCK, CHUNK * sizeof(bf16));
                _tile_loadd(7, values, line);
                _tile_dpbf16ps(0, 6, 7);
                _tile_loadd(7, values + 2 * LANES, line);
                _tile_dpbf16ps(1, 6, 7);
                _tile_loadd(7, values + 4 * LANES, line);
                _tile_dpbf16ps(2, 6, 7);
                _tile_loadd(7, values + 6 * LANES, line);
                _tile_dpbf16ps(3, 6, 7);
            }
            _tile_stored(0, sums, stride);
            _tile_stored(1, sums + LANES, stride);
            _tile_stored(2, sums + 2 * LANES, stride);
            _tile_stored(3, sums + 3 * LANES, stride);
        }
        for (; d < width; d += 2 * LANES) {  // a head's width is a multiple of 32
            float* sums = b.sums[first] + d;
            _tile_loadd(0, sums, stride);
            _tile_loadd(1, sums + LANES, stride);
            for (int i = chunk.from; i < chunk.to; ++i) {
                const bf16* values = chunk.values[i] + 2 * d;
                ask(share * 2 * LANES / width);
                _tile_loadd(6, b.law[first] + i * BLOCK, CHUNK * sizeof(bf16));
                _tile_loadd(7, values, line);
                _tile_dpbf16ps(0, 6, 7);
                _tile_loadd(7, values + 2 * LANES, line);
                _tile_dpbf16ps(1, 6, 7);
            }
            _tile_stored(0, sums, stride);
            _tile_stored(1, sums + LANES, stride);
        }
        asm volatile("" ::"r"(&b) : "memory");
    }
};

#endif

// The queries of a tile over all they see.
template <class T>
class Attention {
public:
    Attention(const Cache<T>& cache, const Rows& rows, const Tasks& tasks, int window, float scale,
              int head_dim)
        : cache_(cache), rows_(rows), tasks_(tasks), window_(window), scale_(scale),
          head_dim_(head_dim) {}

    // `q` and `out` are the rows' first heads of the task's key head, `q_stride` and `out_stride`
    // apart from row to row, and heads `width` and `head_dim`.
    void run(Bench<T>& b, int number, const T* q, std::size_t q_stride, T* out,
             std::size_t out_stride) const {
        const Task task = tasks_[number];
        const Tile& tile = *task.tile;
        const int width = cache_.width, heads = tile.heads;
        const int queries = (tile.last_row - tile.first_row) * heads;
        for (int i = 0; i < queries; ++i) {
            const T* from = q + (tile.first_row + i / heads) * q_stride +
                            std::size_t(tile.first_head + i % heads) * width;
            std::memcpy(b.q[i], from, width * sizeof(T));
            std::memset(b.sums[i], 0, width * sizeof(float));
        }
        for (int i = 0; i < QUERIES; ++i) {
            b.most[i] = -INFINITY;
            b.mass[i] = 0;
        }
        if (number != b.ahead.expected) begin_asking(b.ahead, number);
        b.ahead.expected = number + 1;
        const Span span = span_of(tile);
        for (int first = span.chunk(); first < span.last; first += CHUNK_BLOCKS)
            run_chunk(b, task, span, first);
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
    const Tasks& tasks_;
    const int window_;
    const float scale_;
    const int head_dim_;
    const int blocks_ = cache_.blocks();  // of a page

    Span span_of(const Tile& tile) const {
        int begin = 0x7fffffff, end = 0;  // tokens
        for (int r = tile.first_row; r < tile.last_row; ++r) {
            begin = std::min(begin, first_of(rows_.rows[r]));
            end = std::max(end, length_of(rows_.rows[r]));
        }
        return {block_of(begin), block_of(end - 1) + 1};
    }
    int length_of(const Row& row) const { return row.prefix + row.num_above; }
    int first_of(const Row& row) const {
        const int length = length_of(row);
        return window_ && length > window_ ? length - window_ : 0;
    }
    // Blocks are counted page after page.
    int block_of(int token) const {
        return token / cache_.page_size * blocks_ + token % cache_.page_size / BLOCK;
    }
    // body(block, its page's place in the sequence, its place in the page)
    template <class Body>
    void each_block(int from, int to, Body body) const {
        int page = from / blocks_, block = from % blocks_;
        for (int i = from; i < to; ++i) {
            body(i, page, block);
            if (++block == blocks_) {
                block = 0;
                ++page;
            }
        }
    }
    int page_of(const Row& row, int block) const {
        return rows_.pages[row.pages + block / blocks_];
    }
    // Blocks that lie in the cache as all rows of a tile see them.
    int shared(const Tile& tile, const Span& span) const {
        const Row& row = rows_.rows[tile.first_row];
        return row.num_above ? std::min(block_of(row.prefix), span.last) : span.last;
    }
    int lines() const { return BLOCK * cache_.width * int(sizeof(T)) / 64; }

    // Sets out to ask for the keys or values of a chunk.
    void turn_to(Ahead& a, int chunk, bool values) const {
        const Task task = tasks_[a.task];
        const Row& row = rows_.rows[task.tile->first_row];
        const int last = std::min(shared(*task.tile, a.span), chunk + CHUNK_BLOCKS);
        a.chunk = chunk;
        a.values = values;
        a.blocks = Fetch<CHUNK_BLOCKS>(lines());
        each_block(std::max(a.span.first, chunk), last, [&](int, int page, int block) {
            page = rows_.pages[row.pages + page];
            a.blocks.add(values ? cache_.values(page, block, task.head)
                                : cache_.keys(page, block, task.head));
        });
    }

    void begin_asking(Ahead& a, int task) const {
        a.task = task;
        a.span = span_of(*tasks_[task].tile);
        turn_to(a, a.span.chunk(), false);
        a.blocks(a.blocks.lines());
        a.owed = 0;
    }

    // Asks for some of the lines that are owed.
    void ask(Ahead& a, int count) const {
        count = std::min(count, a.owed);
        a.owed -= count;
        while (count > 0 && a.task < tasks_.count()) {
            count = a.blocks(count);
            if (count <= 0) break;
            if (!a.values) {
                turn_to(a, a.chunk, true);
            } else if (a.chunk + CHUNK_BLOCKS < a.span.last) {
                turn_to(a, a.chunk + CHUNK_BLOCKS, false);
            } else {
                do ++a.task;
                while (a.task < tasks_.count() && !tasks_[a.task].fresh);
                if (a.task == tasks_.count()) break;
                a.span = span_of(*tasks_[a.task].tile);
                turn_to(a, a.span.chunk(), false);
            }
        }
    }

    // A block of a tree's row as a chain would have it.
    void gather(const Row& row, int head, int block, int first, int room, T* keys,
                T* values) const {
        alignas(64) T key[MAX_HEAD_DIM], value[MAX_HEAD_DIM];
        const int width = cache_.width;
        std::memset(keys, 0, BLOCK * width * sizeof(T));
        std::memset(values, 0, BLOCK * width * sizeof(T));
        for (int lane = 0; lane < room; ++lane) {
            const int token = first + lane;
            if (token >= length_of(row)) break;
            const int slot =
                token < row.prefix
                    ? page_of(row, block) * cache_.page_size + token % cache_.page_size
                    : rows_.above[row.above + token - row.prefix];
            cache_.get(slot, head, key, value);
            for (int d = 0; d < width; ++d) cache_.key_at(keys, lane, d) = key[d];
            for (int d = 0; d < width; ++d) cache_.value_at(values, lane, d) = value[d];
        }
    }

    // The chunk from block `first` on.
    void run_chunk(Bench<T>& b, const Task& task, const Span& span, int first) const {
        const Tile& tile = *task.tile;
        const int width = cache_.width, heads = tile.heads;
        const int queries = (tile.last_row - tile.first_row) * heads;
        const Row& row = rows_.rows[tile.first_row];
        Chunk<T> chunk;
        chunk.from = std::max(span.first - first, 0);
        chunk.to = std::min(span.last - first, CHUNK_BLOCKS);
        const int shared = std::clamp(this->shared(tile, span) - first, chunk.from, chunk.to);
        each_block(first + chunk.from, first + chunk.to, [&](int i, int page, int block) {
            i -= first;
            chunk.token[i] = page * cache_.page_size + block * BLOCK;
            chunk.room[i] = std::min(BLOCK, cache_.page_size - block * BLOCK);
            if (i >= shared) return;  // a tree's rows go on by themselves
            page = rows_.pages[row.pages + page];
            chunk.keys[i] = cache_.keys(page, block, task.head);
            chunk.values[i] = cache_.values(page, block, task.head);
        });
        // Weights of many queries take longer than products, and the asking goes by time.
        const int each = task.fresh ? 2 * lines() : 0;
        const int softened = each * queries / (queries + 8), share = (each - softened) / 2;
        b.ahead.owed += each * (shared - chunk.from);
        auto ask = [&](int count) { this->ask(b.ahead, count); };
        auto soften = [&](int from, int to) {
            this->soften(b, tile, from, to, chunk, ask, 4 * softened / queries);
            Products<T>::weigh(b, from, to, chunk, width, ask, share);
        };
        if (shared > chunk.from)
            Products<T>::scores(b, 0, queries, chunk, chunk.from, shared, width, ask, share);
        if (shared == chunk.to) {
            soften(0, queries);
            ask(b.ahead.owed);
            return;
        }
        for (int r = tile.first_row; r < tile.last_row; ++r) {
            const int q = (r - tile.first_row) * heads;
            for (int i = shared; i < chunk.to; ++i) {
                gather(rows_.rows[r], task.head, first + i, chunk.token[i], chunk.room[i], b.keys,
                       b.values[i]);
                chunk.keys[i] = b.keys;
                chunk.values[i] = b.values[i];
                Products<T>::scores(b, q, q + heads, chunk, i, i + 1, width, ask, 0);
            }
            soften(q, q + heads);
        }
        ask(b.ahead.owed);
    }

    // Makes weights of scores of queries [first, last), and rescales what they have summed. `share`
    // lines of memory are asked for beside every four blocks.
    template <class Ask>
    void soften(Bench<T>& b, const Tile& tile, int first, int last, const Chunk<T>& chunk, Ask& ask,
                int share) const {
        alignas(64) float now[QUERIES], mass[QUERIES];
        std::memcpy(now, b.most, sizeof now);
        std::memset(mass, 0, sizeof mass);
        for (int q = first; q < last; ++q)
            now[q] = scale(b.scores[q], rows_.rows[tile.first_row + q / tile.heads], chunk, now[q]);
        // Who has seen nothing yet has weights of zero.
        const F16 most = load(now), shift = where_less(most, splat(-3e38f), splat(0.0f), most);
        const F16 shrunk = exp(load(b.most) - shift);
        store(b.most, most);
        store(b.shrunk, shrunk);
        store(now, shift);
        for (int q = first; q < last; ++q) {
            const F16 less = splat(now[q]);
            F16 all = splat(0.0f);
            for (int i = chunk.from; i < chunk.to; ++i) {
                if (i % 4 == 0) ask(share);
                const F16 p = exp(load(b.scores[q] + i * BLOCK) - less);
                store(b.law[q] + i * BLOCK, p);
                all = all + p;
            }
            mass[q] = total(all);
        }
        store(b.mass, load(b.mass) * shrunk + load(mass));
        for (int q = first; q < last; ++q) {
            const F16 by = splat(b.shrunk[q]);
            for (int d = 0; d < cache_.width; d += LANES)
                store(b.sums[q] + d, load(b.sums[q] + d) * by);
        }
    }

    // Scales and masks a row's scores of a chunk; returns the largest of them and `best`.
    float scale(float* scores, const Row& row, const Chunk<T>& chunk, float best) const {
        alignas(64) static constexpr float lanes[LANES] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                           8, 9, 10, 11, 12, 13, 14, 15};
        const int least = first_of(row), length = length_of(row);
        const F16 never = splat(-INFINITY);
        F16 most = splat(best);
        for (int i = chunk.from; i < chunk.to; ++i) {
            float* at = scores + i * BLOCK;
            const int low = least - chunk.token[i];
            const int high = std::min(chunk.room[i], length - chunk.token[i]);
            F16 s = load(at) * splat(scale_);
            if (low > 0) s = where_less(load(lanes), splat(float(low)), never, s);
            if (high < BLOCK) s = where_less(load(lanes), splat(float(high)), s, never);
            store(at, s);
            most = max(most, s);
        }
        return highest(most);
    }
};

}  // namespace outrider
