// Linear attention: a matrix of each value head that every token decays and adds to.
//
// Of gated delta nets what is added corrects what the matrix knows of its key (Yang et al., "Gated
// delta networks: improving Mamba2 with delta rule", 2025), of Mamba-2 it is the value (Dao and Gu,
// "Transformers are SSMs", 2024), whose B are keys, C queries and dt strengths. Columns of a matrix
// never mix, so each line of 16 goes through all rows by itself, sums over keys in one order.
#pragma once

#include <cmath>

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
            const double step = double(rates[c.value_heads + head]) + dt_bias[head];
            const double soft = step > 20 ? step : std::log1p(std::exp(step));
            rates[head] = float(c.mamba ? soft : 1 / (1 + std::exp(-double(rates[head]))));
            rates[c.value_heads + head] = float(std::exp(decay[head] * soft));
        }
    }

    // Walks 16 columns of a head's state, from column `at` of it on. `part` is that of the states.
    // What comes out has `skip` times the head's values added.
    void walk(const Walk& walk, LayerWalk part, int head, int at, float skip,
              const LinearRows& rows) const {
        alignas(64) float memory[MAX_KEY_DIM * LANES];
        const int size = c.key_dim, lines = c.value_dim / LANES;
        const int key_head = c.tiled_heads ? head % c.key_heads : head / group();
        float* home = part.state + std::size_t(head * lines + at / LANES) * size * LANES;
        const std::size_t bytes = std::size_t(size) * LANES * sizeof(float);
        const int value = head * c.value_dim + at, key = key_head * size;
        float* kept = walk.kept ? part.kept + (home - part.state) : nullptr;
        std::memcpy(memory, home, bytes);
        for (int r = 0; r < walk.accepted; ++r) {
            const float* from = part.inputs + r * row;
            const F32x16 update = load(from + keys + value);
            const F32x16 decay = splat(from[keys + values + head]);
            for (int i = 0; i < size; ++i) {
                float* line = memory + i * LANES;
                store(line, fma(splat(from[key + i]), update, load(line) * decay));
            }
            if (r + 1 == walk.kept) std::memcpy(kept, memory, bytes);
        }
        for (int r = 0; r < walk.committed + walk.drafted; ++r) {
            const std::size_t number = std::size_t(walk.first + r);
            const float *mixed = rows.mixed + number * rows.stride, *q = mixed + key;
            const float *k = mixed + keys + key, *rates = rows.rates + number * 2 * c.value_heads;
            const F32x16 v = load(mixed + 2 * keys + value);
            const float decay = rates[c.value_heads + head];
            F32x16 update, out;
            if (c.mamba) {
                update = v * splat(rates[head]);
                out = added(memory, q, k, update, decay) + v * splat(skip);
            } else {
                update = (v - decayed(memory, k, decay)) * splat(rates[head]);
                out = added(memory, q, k, update, 1);
            }
            store(rows.out + number * values + value, out);
            if (walk.accepted + r + 1 == walk.kept) std::memcpy(kept, memory, bytes);
            if (r == walk.committed - 1) std::memcpy(home, memory, bytes);
            if (r < walk.committed) continue;
            float* to = part.next + (r - walk.committed) * row;
            store(to + keys + value, update);
            if (value == head * c.value_dim) to[keys + values + head] = decay;
            if (value == first_of(key_head) * c.value_dim)
                std::memcpy(to + key, k, size * sizeof(float));
        }
    }

    // Lets columns decay; returns what they know of a key then.
    F32x16 decayed(float* memory, const float* k, float decay) const {
        F32x16 sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
        for (int i = 0; i < c.key_dim; i += 4)
            for (int j = 0; j < 4; ++j) {
                float* line = memory + (i + j) * LANES;
                const F32x16 less = load(line) * splat(decay);
                store(line, less);
                sums[j] = fma(splat(k[i + j]), less, sums[j]);
            }
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }

    // Lets columns decay and adds an update at a key; returns what a query finds then.
    F32x16 added(float* memory, const float* q, const float* k, F32x16 update, float decay) const {
        F32x16 sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
        for (int i = 0; i < c.key_dim; i += 4)
            for (int j = 0; j < 4; ++j) {
                float* line = memory + (i + j) * LANES;
                const F32x16 more = fma(splat(k[i + j]), update, load(line) * splat(decay));
                store(line, more);
                sums[j] = fma(splat(q[i + j]), more, sums[j]);
            }
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }

    // The first value head of a key head.
    int first_of(int key_head) const { return c.tiled_heads ? key_head : key_head * group(); }

    // Writes a row's output, each of its groups normalised and gated, in that order or the other.
    template <class T>
    void gate(T* to, float* out, const float* gates, const float* norm) const {
        auto gated = [&](int at) { return load(out + at) * silu(load(gates + at)); };
        const int groups = c.norm_groups > 0 ? c.norm_groups : 1, size = values / groups;
        for (int first = 0; first < values; first += size) {
            F32x16 sum = splat(0.0f);
            for (int at = first; at < first + size; at += LANES) {
                if (c.gate_first) store(out + at, gated(at));
                sum = fma(load(out + at), load(out + at), sum);
            }
            const float by = c.norm_groups ? 1 / std::sqrt(total(sum) / size + c.norm_eps) : 1;
            for (int at = first; at < first + size; at += LANES) {
                const F32x16 gate = c.gate_first ? splat(1.0f) : silu(load(gates + at));
                store(to + at, load(out + at) * splat(by) * load(norm + at) * gate);
            }
        }
    }
};

}  // namespace outrider
