// Gated delta nets: a matrix of each value head that every token decays and corrects.
//
// Yang et al., "Gated delta networks: improving Mamba2 with delta rule", 2025. Columns of a state
// never mix, so each line of 16 goes through all rows by itself, sums over keys in one order.
#pragma once

#include <cmath>

#include "isa.hpp"
#include "model.hpp"
#include "product.hpp"

namespace outrider {

// What rows bring to the states of a layer, and what comes out of them.
struct DeltaRows {
    float* mixed;  // [rows, stride]: queries and keys, which are of length 1, and values
    std::size_t stride;
    float* rates;  // [rows, 2 * value heads]: strengths of updates, and decays
    float* out;    // [rows, values]
};

struct DeltaNet {
    const Config& c;
    int keys = c.key_heads * c.key_dim, values = delta_values(c);
    std::size_t row = heads_size(c).row;

    // The heads' part of a layer's walk, behind that of its convolution.
    LayerWalk behind(LayerWalk all, const Walk& walk) const {
        const StateSize conv = conv_size(c, MIXER_DELTA);
        return {all.state + conv.state, all.inputs + std::size_t(walk.before) * conv.row,
                all.next + std::size_t(walk.drafted) * conv.row,
                walk.kept ? all.kept + conv.state : nullptr};
    }
    // Value heads that share a key head, where they are grouped.
    int group() const { return c.value_heads / c.key_heads; }

    // Makes queries and keys of a row vectors of length 1, queries then shorter, and its rates what
    // they stand for.
    void prepare(float* mixed, float* rates, const float* decay, const float* dt_bias) const {
        for (int head = 0; head < 2 * c.key_heads; ++head) {
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
            rates[head] = float(1 / (1 + std::exp(-double(rates[head]))));
            rates[c.value_heads + head] = float(std::exp(decay[head] * soft));
        }
    }

    // Walks 16 columns of a head's state, from column `at` of it on. `part` is that of the states.
    void walk(const Walk& walk, LayerWalk part, int head, int at, const DeltaRows& rows) const {
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
            const F32x16 decay = splat(rates[c.value_heads + head]);
            F32x16 sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
            for (int i = 0; i < size; i += 4)
                for (int j = 0; j < 4; ++j) {
                    float* line = memory + (i + j) * LANES;
                    const F32x16 less = load(line) * decay;
                    store(line, less);
                    sums[j] = fma(splat(k[i + j]), less, sums[j]);
                }
            const F32x16 known = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            const F32x16 update = (load(mixed + 2 * keys + value) - known) * splat(rates[head]);
            for (F32x16& sum : sums) sum = splat(0.0f);
            for (int i = 0; i < size; i += 4)
                for (int j = 0; j < 4; ++j) {
                    float* line = memory + (i + j) * LANES;
                    const F32x16 more = fma(splat(k[i + j]), update, load(line));
                    store(line, more);
                    sums[j] = fma(splat(q[i + j]), more, sums[j]);
                }
            store(rows.out + number * values + value, (sums[0] + sums[1]) + (sums[2] + sums[3]));
            if (walk.accepted + r + 1 == walk.kept) std::memcpy(kept, memory, bytes);
            if (r == walk.committed - 1) std::memcpy(home, memory, bytes);
            if (r < walk.committed) continue;
            float* to = part.next + (r - walk.committed) * row;
            store(to + keys + value, update);
            if (value == head * c.value_dim) to[keys + values + head] = rates[c.value_heads + head];
            if (value == first_of(key_head) * c.value_dim)
                std::memcpy(to + key, k, size * sizeof(float));
        }
    }

    // The first value head of a key head.
    int first_of(int key_head) const { return c.tiled_heads ? key_head : key_head * group(); }

    // Writes a row's output, each head normalised and gated.
    template <class T>
    void gate(T* to, const float* out, const float* gates, const float* norm) const {
        for (int head = 0; head < c.value_heads; ++head) {
            const float* from = out + head * c.value_dim;
            F32x16 sum = splat(0.0f);
            for (int i = 0; i < c.value_dim; i += LANES)
                sum = fma(load(from + i), load(from + i), sum);
            const float by = 1 / std::sqrt(total(sum) / c.value_dim + c.norm_eps);
            for (int i = 0; i < c.value_dim; i += LANES) {
                const int at = head * c.value_dim + i;
                store(to + at,
                      load(from + i) * splat(by) * load(norm + i) * silu(load(gates + at)));
            }
        }
    }
};

}  // namespace outrider
