// Attention of a few queries of one key head over their sequence's blocks of keys.
//
// A query meets its keys in position order, sixteen to a block and 256 to a chunk of the softmax,
// counted from the sequence's first token: whoever else is run, however the sequence is spread over
// pages, and whether its end is a chain or a branch of a tree, its sums are taken in the same
// order. 1024 positions are a stretch: their sums are taken apart, by whichever thread, and joined
// in order.
#pragma once

#include <cmath>
#include <type_traits>

#include "attention_codes.hpp"

namespace outrider {

// The queries of a tile, as T, over all they see in a cache of elements E.
template <class T, class E>
class Attention {
public:
    // `sinks` are scores of a key without a value, of all heads, or null.
    Attention(const Cache<E>& cache, const Rows& rows, const Tasks& tasks, const Config& c,
              const float* sinks)
        : cache_(cache),
          rows_(rows),
          tasks_(tasks),
          scale_(c.scale),
          cap_(c.attention_cap),
          head_dim_(c.head_dim),
          sinks_(sinks),
          group_(c.heads / c.kv_heads) {}

    // `q` and `out` are the rows' first heads of the task's key head, `q_stride` and `out_stride`
    // apart from row to row, and heads `width` and `head_dim`. `parts` has room for all parts.
    void run(AttentionScratch<E>& b, int number, const T* q, std::size_t q_stride, T* out,
             std::size_t out_stride, float* parts) const {
        const Task& task = tasks_.all[number];
        const Tile& tile = *task.tile;
        const int width = cache_.width, heads = tile.heads;
        const int queries = queries_of(tile);
        for (int i = 0; i < queries; ++i) {
            const T* from = q + (tile.first_row + i / heads) * q_stride +
                            std::size_t(tile.first_head + i % heads) * width;
            if constexpr (std::is_same_v<T, typename Factor<E>::type>)
                std::memcpy(b.q[i], from, width * sizeof(T));
            else
                for (int d = 0; d < width; d += LANES) store(b.q[i] + d, load(from + d));
        }
        if (number != b.ahead.expected) begin_asking(b.ahead, number);
        b.ahead.expected = number + 1;
        const Tally now = b.now(), before = Tally::in(b.before, width);
        clear(now, queries);
        bool first_stretch = true;
        for (int first = task.span.chunk(); first < task.span.last; first += CHUNK_BLOCKS) {
            if (first % STRETCH == 0 && first > task.span.first) {
                join(before, now, queries, first_stretch);
                first_stretch = false;
                clear(now, queries);
            }
            run_chunk(b, task, task.span, first);
        }
        if (task.part >= 0) {
            join(Tally::in(parts + task.part * Tally::size(width), width), now, queries, true);
            return;
        }
        if (!first_stretch) join(before, now, queries, false);
        finish(first_stretch ? now : before, tile, task.head, out, out_stride);
    }

    // Makes one of the parts of a joint.
    void unite(AttentionScratch<E>& b, const Joint& joint, float* parts, T* out,
               std::size_t out_stride) const {
        const int width = cache_.width, queries = queries_of(*joint.tile);
        const Tally all = b.now();
        for (int i = 0; i < joint.count; ++i) {
            float* from = parts + (joint.first + i) * Tally::size(width);
            join(all, Tally::in(from, width), queries, i == 0);
        }
        finish(all, *joint.tile, joint.head, out, out_stride);
    }

private:
    const Cache<E>& cache_;
    const Rows& rows_;
    const Tasks& tasks_;
    const float scale_;
    const float cap_;  // 0: none
    const int head_dim_;
    const float* const sinks_;
    const int group_;                     // heads of a key head
    const int blocks_ = cache_.blocks();  // of a page

    static int queries_of(const Tile& tile) {
        return (tile.last_row - tile.first_row) * tile.heads;
    }

    void clear(const Tally& s, int queries) const {
        std::fill(s.most, s.most + QUERIES, -INFINITY);
        std::fill(s.mass, s.mass + QUERIES, 0.0f);
        for (int q = 0; q < queries; ++q)
            std::memset(s.sums + q * s.stride, 0, cache_.width * sizeof(float));
    }

    // Adds those of a later stretch, or takes them as they are.
    void join(const Tally& to, const Tally& more, int queries, bool first) const {
        const int width = cache_.width;
        if (first) {
            std::memcpy(to.most, more.most, QUERIES * sizeof(float));
            std::memcpy(to.mass, more.mass, QUERIES * sizeof(float));
            for (int q = 0; q < queries; ++q)
                std::memcpy(to.sums + q * to.stride, more.sums + q * more.stride,
                            width * sizeof(float));
            return;
        }
        const F32x16 most = max(load(more.most), load(to.most));
        // Who has seen nothing yet has weights of zero.
        const F32x16 shift = where_less(most, splat(-3e38f), splat(0.0f), most);
        alignas(64) float old[QUERIES], fresh[QUERIES];
        store(old, exp(load(to.most) - shift));
        store(fresh, exp(load(more.most) - shift));
        store(to.mass, load(to.mass) * load(old) + load(more.mass) * load(fresh));
        store(to.most, most);
        for (int q = 0; q < queries; ++q) {
            const F32x16 a = splat(old[q]), c = splat(fresh[q]);
            float* sums = to.sums + q * to.stride;
            for (int d = 0; d < width; d += LANES)
                store(sums + d, load(sums + d) * a + load(more.sums + q * more.stride + d) * c);
        }
    }

    void finish(const Tally& s, const Tile& tile, int head, T* out, std::size_t out_stride) const {
        const int queries = queries_of(tile), heads = tile.heads;
        for (int i = 0; i < queries; ++i) {
            T* to = out + (tile.first_row + i / heads) * out_stride +
                    std::size_t(tile.first_head + i % heads) * head_dim_;
            const float* sums = s.sums + i * s.stride;
            float whole = s.mass[i];
            if (sinks_) [[unlikely]]
                whole += std::exp(sinks_[head * group_ + tile.first_head + i % heads] - s.most[i]);
            const F32x16 mass = splat(whole);
            int d = 0;
            for (; d + LANES <= head_dim_; d += LANES) store(to + d, load(sums + d) / mass);
            for (; d < head_dim_; ++d) narrow_to(to + d, sums[d] / whole);
        }
    }

    int length_of(const Row& row) const { return tasks_.length_of(row); }
    int first_of(const Row& row) const { return tasks_.first_of(row); }
    int block_of(int token) const { return tasks_.block_of(token); }
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
    int lines() const { return padded(int(cache_.block_bytes()), 256) / 64; }

    // Sets out to ask for the keys or values of a chunk.
    void turn_to(Ahead& a, int chunk, bool values) const {
        const Task& task = tasks_.all[a.task];
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
        a.span = tasks_.all[task].span;
        turn_to(a, a.span.chunk(), false);
        a.blocks(a.blocks.lines());
        a.owed = 0;
    }

    // Asks for some of the lines that are owed.
    void ask(Ahead& a, int count) const {
        count = std::min(count, a.owed);
        a.owed -= count;
        const int tasks = int(tasks_.all.size());
        while (count > 0 && a.task < tasks) {
            count = a.blocks(count);
            if (count <= 0) break;
            if (!a.values) {
                turn_to(a, a.chunk, true);
            } else if (a.chunk + CHUNK_BLOCKS < a.span.last) {
                turn_to(a, a.chunk + CHUNK_BLOCKS, false);
            } else {
                do ++a.task;
                while (a.task < tasks && !tasks_.all[a.task].fresh);
                if (a.task == tasks) break;
                a.span = tasks_.all[a.task].span;
                turn_to(a, a.span.chunk(), false);
            }
        }
    }

    // Puts the ancestors of a tree's row where a chain would have them; what lies behind them in
    // these blocks is masked.
    void patch(AttentionScratch<E>& b, const Row& row, int head, const Chunk<E>& chunk,
               int from) const {
        const int end = length_of(row);
        for (int i = from; i < chunk.to; ++i) {
            const int token = std::max(row.prefix, chunk.token[i]);
            const int last = std::min(end, chunk.token[i] + chunk.room[i]);
            for (int t = token; t < last; ++t)
                cache_.copy(rows_.above[row.above + t - row.prefix], head, b.keys[i], b.values[i],
                            t - chunk.token[i]);
        }
    }

    // The chunk from block `first` on.
    void run_chunk(AttentionScratch<E>& b, const Task& task, const Span& span, int first) const {
        const Tile& tile = *task.tile;
        const int width = cache_.width, heads = tile.heads;
        const int queries = (tile.last_row - tile.first_row) * heads;
        const Row& row = rows_.rows[tile.first_row];
        Chunk<E> chunk;
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
            Products<E>::weigh(b, from, to, chunk, width, ask, share);
        };
        if (shared > chunk.from)
            Products<E>::scores(b, 0, queries, chunk, chunk.from, shared, width, ask, share);
        if (shared == chunk.to) {
            soften(0, queries);
            ask(b.ahead.owed);
            return;
        }
        const std::size_t bytes = cache_.block_bytes();
        for (int i = shared; i < chunk.to; ++i) {
            const int page = page_of(row, first + i), block = (first + i) % blocks_;
            std::memcpy(b.keys[i], cache_.keys(page, block, task.head), bytes);
            std::memcpy(b.values[i], cache_.values(page, block, task.head), bytes);
            chunk.keys[i] = b.keys[i];
            chunk.values[i] = b.values[i];
        }
        for (int r = tile.first_row; r < tile.last_row; ++r) {
            const int q = (r - tile.first_row) * heads;
            patch(b, rows_.rows[r], task.head, chunk, shared);
            Products<E>::scores(b, q, q + heads, chunk, shared, chunk.to, width, ask, 0);
            soften(q, q + heads);
        }
        ask(b.ahead.owed);
    }

    // Makes weights of scores of queries [first, last), and rescales what they have summed. `share`
    // lines of memory are asked for beside every four blocks.
    template <class Ask>
    void soften(AttentionScratch<E>& b, const Tile& tile, int first, int last,
                const Chunk<E>& chunk, Ask& ask, int share) const {
        alignas(64) float now[QUERIES], mass[QUERIES];
        std::memcpy(now, b.most, sizeof now);
        std::memset(mass, 0, sizeof mass);
        for (int q = first; q < last; ++q)
            now[q] = scale(b.scores[q], rows_.rows[tile.first_row + q / tile.heads], chunk, now[q]);
        // Who has seen nothing yet has weights of zero.
        const F32x16 most = load(now), shift = where_less(most, splat(-3e38f), splat(0.0f), most);
        const F32x16 shrunk = exp(load(b.most) - shift);
        store(b.most, most);
        store(b.shrunk, shrunk);
        store(now, shift);
        for (int q = first; q < last; ++q) {
            const F32x16 less = splat(now[q]);
            F32x16 all = splat(0.0f);
            for (int i = chunk.from; i < chunk.to; ++i) {
                if (i % 4 == 0) ask(share);
                const F32x16 p = exp(load(b.scores[q] + i * BLOCK) - less);
                store(b.probs[q] + i * BLOCK, weight<E>(p));
                all = all + p;
            }
            mass[q] = total(all);
        }
        store(b.mass, load(b.mass) * shrunk + load(mass));
        for (int q = first; q < last; ++q) {
            const F32x16 by = splat(b.shrunk[q]);
            for (int d = 0; d < cache_.width; d += LANES)
                store(b.sums[q] + d, load(b.sums[q] + d) * by);
        }
    }

    // Scales and masks a row's scores of a chunk; returns the largest of them and `best`.
    float scale(float* scores, const Row& row, const Chunk<E>& chunk, float best) const {
        alignas(64) static constexpr float lanes[LANES] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                           8, 9, 10, 11, 12, 13, 14, 15};
        const int least = first_of(row), length = length_of(row);
        const F32x16 never = splat(-INFINITY);
        F32x16 most = splat(best);
        for (int i = chunk.from; i < chunk.to; ++i) {
            float* at = scores + i * BLOCK;
            const int low = least - chunk.token[i];
            const int high = std::min(chunk.room[i], length - chunk.token[i]);
            F32x16 s = load(at) * splat(scale_);
            if (cap_ > 0) [[unlikely]]
                s = capped(s, cap_);
            if (low > 0) s = where_less(load(lanes), splat(float(low)), never, s);
            if (high < BLOCK) s = where_less(load(lanes), splat(float(high)), s, never);
            store(at, s);
            most = max(most, s);
        }
        return highest(most);
    }
};

// Multiplies what a row's heads attended to [size] by its gates.
template <class T>
void gate_heads(T* to, const float* gates, int size) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, load(to + i) * sigmoid(load(gates + i)));
    for (; i < size; ++i) narrow_to(to + i, widen(to[i]) / (1 + std::exp(-gates[i])));
}

}  // namespace outrider
