// Linear attention: a matrix of each value head that every token decays and adds to.
//
// Of gated delta nets what is added corrects what the matrix knows of its key (Yang et al., "Gated
// delta networks: improving Mamba2 with delta rule", 2025), of Mamba-2 it is the value (Dao and Gu,
// "Transformers are SSMs", 2024), whose B are keys, C queries and dt strengths. Columns of a matrix
// never mix, so each line of 16 goes through all rows by itself, sums over keys in one order.
#pragma once

#include <array>
#include <cmath>
#include <tuple>
#include <utility>

#include "isa.hpp"
#include "model.hpp"
#include "product.hpp"

namespace outrider {

// What rows bring to the states of a layer, and what comes out of them.
struct LinearRows {
    float* mixed;  // [rows, stride]: queries, keys and values
    std::size_t stride;
    float* rates;  // [rows, 2 * value heads]: strengths of updates, and decays
    float* out;    // [rows, values]
};

struct LinearAttention {
    const Config& c;
    int keys = c.key_heads * c.key_dim, values = linear_values(c);
    std::size_t row = heads_size(c).row;

    // The heads' part of a layer's walk, behind that of its convolution.
    LayerWalk behind(LayerWalk all, const Walk& walk) const {
        const StateSize conv = conv_size(c, MIXER_LINEAR);
        return {all.state + conv.state, all.inputs + std::size_t(walk.before) * conv.row,
                all.next + std::size_t(walk.drafted) * conv.row,
                walk.kept ? all.kept + conv.state : nullptr};
    }
    // Value heads that share a key head, where they are grouped.
    int group() const { return c.value_heads / c.key_heads; }

    // Makes the rates of a row what they stand for and, of a delta net, its queries and keys
    // vectors of length 1, queries then shorter.
    void prepare(float* mixed, float* rates, const float* decay, const float* dt_bias) const {
        for (int head = 0; !c.mamba && head < 2 * c.key_heads; ++head) {
            float* from = mixed + head * c.key_dim;
            F32x16 sum = splat(0.0f);
            for (int i = 0; i < c.key_dim; i += LANES)
                sum = fma(load(from + i), load(from + i), sum);
            float by = 1 / std::sqrt(total(sum) + 1e-6f);
            if (head < c.key_heads) by /= std::sqrt(float(c.key_dim));
            for (int i = 0; i < c.key_dim; i += LANES) store(from + i, load(from + i) * splat(by));
        }
        for (int head = 0; head < c.value_heads; ++head) {
            const double step = double(rates[c.value_heads + head]) * c.step_scale + dt_bias[head];
            const double soft = step > 20 ? step : std::log1p(std::exp(step));
            rates[head] = float(c.mamba ? soft : 1 / (1 + std::exp(-double(rates[head]))));
            rates[c.value_heads + head] = float(std::exp(decay[head] * soft));
        }
    }

    // Lines of 16 columns that go through the rows together, which share what is read of queries
    // and keys; their part of a state stays in the first-level cache.
    int together() const { return c.value_dim % (2 * LANES) || c.key_dim > NEAR_KEYS ? 1 : 2; }

    // Walks the columns of a head's state from `at` on. `part` is that of the states. What comes
    // out has `skip` times the head's values added.
    void walk(const Walk& walk, LayerWalk part, int head, int at, float skip,
              const LinearRows& rows) const {
        if (together() == 2)
            walk_lines<2>(walk, part, head, at, skip, rows);
        else
            walk_lines<1>(walk, part, head, at, skip, rows);
    }

    // The first value head of a key head.
    int first_of(int key_head) const { return c.tiled_heads ? key_head : key_head * group(); }

    // Writes a row's output, each of its groups normalised and gated, in that order or the other.
    template <class T>
    void gate(T* to, float* out, const float* gates, const float* norm) const {
        auto by_gate = [&](int at) { return silu(load(gates + at) * splat(c.gate_scale)); };
        const int groups = c.norm_groups > 0 ? c.norm_groups : 1, size = values / groups;
        for (int first = 0; first < values; first += size) {
            F32x16 sum = splat(0.0f);
            for (int at = first; at < first + size; at += LANES) {
                if (c.gate_first) store(out + at, load(out + at) * by_gate(at));
                sum = fma(load(out + at), load(out + at), sum);
            }
            const float by = c.norm_groups ? 1 / std::sqrt(total(sum) / size + c.norm_eps) : 1;
            for (int at = first; at < first + size; at += LANES) {
                const F32x16 gate = c.gate_first ? splat(1.0f) : by_gate(at);
                store(to + at, load(out + at) * splat(by) * load(norm + at) * gate);
            }
        }
    }

private:
    static constexpr int NEAR_KEYS = 128;

    template <int W>
    using Lines = std::array<F32x16, W>;

    // Sums over keys, which are taken in turns: in the same order, whatever else a pass does.
    template <int W>
    struct Sums {
        F32x16 parts[W][4];
        Sums() {
            for (auto& line : parts)
                for (F32x16& part : line) part = splat(0.0f);
        }
        void add(int w, int turn, F32x16 by, F32x16 x) {
            parts[w][turn] = fma(by, x, parts[w][turn]);
        }
        Lines<W> all() const {
            Lines<W> sums;
            for (int w = 0; w < W; ++w)
                sums[w] = (parts[w][0] + parts[w][1]) + (parts[w][2] + parts[w][3]);
            return sums;
        }
    };

    // body(w, i, turn, line) for the lines of columns, key by key, each of which has its turn among
    // four. These loops must be gone before sums can be in registers.
    template <int W, class Body>
    void each_line(float* memory, Body body) const {
        const std::size_t size = std::size_t(c.key_dim) * LANES;
        for (int i = 0; i < c.key_dim; i += 4, memory += 4 * LANES) {
#pragma GCC unroll 4
            for (int turn = 0; turn < 4; ++turn)
#pragma GCC unroll 2
                for (int w = 0; w < W; ++w)
                    body(w, i + turn, turn, memory + w * size + turn * LANES);
        }
    }

    // Lets columns decay; returns what they know of a key then.
    template <int W>
    Lines<W> decayed(float* memory, const float* k, F32x16 decay) const {
        Sums<W> known;
        each_line<W>(memory, [&](int w, int i, int turn, float* line) {
            const F32x16 less = load(line) * decay;
            store(line, less);
            known.add(w, turn, splat(k[i]), less);
        });
        return known.all();
    }

    // Adds updates at a key to columns, which decay before where `decays`; returns what a query
    // finds then.
    template <int W, bool decays>
    Lines<W> added(float* memory, const float* q, const float* k, const Lines<W>& update,
                   F32x16 decay) const {
        Sums<W> found;
        each_line<W>(memory, [&](int w, int i, int turn, float* line) {
            const F32x16 before = decays ? load(line) * decay : load(line);
            const F32x16 more = fma(splat(k[i]), update[w], before);
            store(line, more);
            found.add(w, turn, splat(q[i]), more);
        });
        return found.all();
    }

    // As `added` and then `decayed` for the next row, whose key and decay these are: what comes out
    // of both, in one pass.
    template <int W>
    std::pair<Lines<W>, Lines<W>> added_and_decayed(float* memory, const float* q, const float* k,
                                                    const Lines<W>& update, const float* next,
                                                    F32x16 decay) const {
        Sums<W> found, known;
        each_line<W>(memory, [&](int w, int i, int turn, float* line) {
            const F32x16 more = fma(splat(k[i]), update[w], load(line));
            found.add(w, turn, splat(q[i]), more);
            const F32x16 less = more * decay;
            store(line, less);
            known.add(w, turn, splat(next[i]), less);
        });
        return {found.all(), known.all()};
    }

    template <int W>
    void walk_lines(const Walk& walk, LayerWalk part, int head, int at, float skip,
                    const LinearRows& rows) const {
        alignas(64) float memory[(W == 1 ? MAX_KEY_DIM : W * NEAR_KEYS) * LANES];
        const int size = c.key_dim, lines = c.value_dim / LANES;
        const int key_head = c.tiled_heads ? head % c.key_heads : head / group();
        float* home = part.state + std::size_t(head * lines + at / LANES) * size * LANES;
        const std::size_t bytes = std::size_t(W) * size * LANES * sizeof(float);
        const int value = head * c.value_dim + at, key = key_head * size;
        float* kept = walk.kept ? part.kept + (home - part.state) : nullptr;
        std::memcpy(memory, home, bytes);
        for (int r = 0; r < walk.accepted; ++r) {
            const float* from = part.inputs + r * row;
            const F32x16 decay = splat(from[keys + values + head]);
            each_line<W>(memory, [&](int w, int i, int, float* line) {
                const F32x16 update = load(from + keys + value + w * LANES);
                store(line, fma(splat(from[key + i]), update, load(line) * decay));
            });
            if (r + 1 == walk.kept) std::memcpy(kept, memory, bytes);
        }
        const int count = walk.committed + walk.drafted;
        auto mixed = [&](int r) { return rows.mixed + std::size_t(walk.first + r) * rows.stride; };
        auto rates = [&](int r) {
            return rows.rates + std::size_t(walk.first + r) * 2 * c.value_heads;
        };
        auto decay = [&](int r) { return splat(rates(r)[c.value_heads + head]); };
        auto key_of = [&](int r) { return mixed(r) + keys + key; };
        Lines<W> known, update, out;
        bool knows = false;  // the next row's
        for (int r = 0; r < count; ++r) {
            const float *q = mixed(r) + key, *k = key_of(r);
            const F32x16 strength = splat(rates(r)[head]);
            const bool keeps = walk.accepted + r + 1 == walk.kept, stays = r == walk.committed - 1;
            if (!c.mamba && !knows) known = decayed<W>(memory, k, decay(r));
            for (int w = 0; w < W; ++w) {
                const F32x16 v = load(mixed(r) + 2 * keys + value + w * LANES);
                update[w] = (c.mamba ? v : v - known[w]) * strength;
            }
            knows = !c.mamba && !keeps && !stays && r + 1 < count;
            if (c.mamba)
                out = added<W, true>(memory, q, k, update, decay(r));
            else if (knows)
                std::tie(out, known) =
                    added_and_decayed<W>(memory, q, k, update, key_of(r + 1), decay(r + 1));
            else
                out = added<W, false>(memory, q, k, update, decay(r));
            float* to = rows.out + std::size_t(walk.first + r) * values + value;
            for (int w = 0; w < W; ++w) {
                if (c.mamba)
                    out[w] = out[w] + load(mixed(r) + 2 * keys + value + w * LANES) * splat(skip);
                store(to + w * LANES, out[w]);
            }
            if (keeps) std::memcpy(kept, memory, bytes);
            if (stays) std::memcpy(home, memory, bytes);
            if (r >= walk.committed)
                leave<W>(walk, part, r, head, value, key_head, k, rates(r), update);
        }
    }

    // Leaves the inputs of a drafted row: its updates here and, once for all columns, the rest.
    template <int W>
    void leave(const Walk& walk, LayerWalk part, int r, int head, int value, int key_head,
               const float* k, const float* rates, const Lines<W>& update) const {
        float* to = part.next + (r - walk.committed) * row;
        for (int w = 0; w < W; ++w) store(to + keys + value + w * LANES, update[w]);
        if (value == head * c.value_dim) to[keys + values + head] = rates[c.value_heads + head];
        if (value == first_of(key_head) * c.value_dim)
            std::memcpy(to + key_head * c.key_dim, k, c.key_dim * sizeof(float));
    }
};

}  // namespace outrider
