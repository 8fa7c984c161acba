// Attention of one row over its own list of keys, in position order: whoever else is run, however
// the list is spread over pages, and whether its end is a chain or a branch of a tree, a row meets
// the same keys in the same order.
#pragma once

#include <cmath>

#include "model.hpp"

namespace outrider {

constexpr int MAX_HEAD_DIM = 256;
constexpr int KEYS = 256;   // scored at a time
constexpr int GROUP = 8;    // query heads of a key head that are scored at a time

// Where a row's keys of one layer and one key head lie, `KEYS` of them at a time.
template <class T>
struct Keys {
    const T* base;           // of layer and head
    std::size_t page_elements;
    int page_size, width;
    const std::int32_t* pages;
    const std::int32_t* above;
    int prefix;

    void find(int first, int count, const T** keys) const {
        int page = first / page_size, offset = first % page_size;
        int i = 0;
        for (; i < count && first + i < prefix; ++i) {
            keys[i] = base + pages[page] * page_elements + std::size_t(offset) * width;
            if (++offset == page_size) offset = 0, ++page;
        }
        for (; i < count; ++i) {
            int slot = above[first + i - prefix];
            keys[i] = base + slot / page_size * page_elements +
                      std::size_t(slot % page_size) * width;
        }
    }
};

// sums[0..D) += law[j] * value j, over the keys in order.
template <class T, int D>
inline void weigh(float* sums, const float* law, const T* const* keys, std::size_t values,
                  int count) {
    F16 s[D];
    for (int d = 0; d < D; ++d) s[d] = load(sums + d * LANES);
    for (int j = 0; j < count; ++j) {
        F16 p = splat(law[j]);
        const T* v = keys[j] + values;
        for (int d = 0; d < D; ++d) s[d] = fma(p, load(v + d * LANES), s[d]);
    }
    for (int d = 0; d < D; ++d) store(sums + d * LANES, s[d]);
}

// `heads` <= GROUP query heads of one key head.
// q [heads, width] and out [heads, head_dim]; `values` is the way from a key to its value.
template <class T>
void attend(const Keys<T>& list, int first, int length, const T* q, T* out, int heads,
            int head_dim, std::size_t values, float scale) {
    const int width = list.width;
    alignas(64) float scores[GROUP][KEYS];
    alignas(64) float sums[GROUP][MAX_HEAD_DIM];
    float most[GROUP], mass[GROUP];
    const T* keys[KEYS];
    for (int g = 0; g < heads; ++g) {
        most[g] = -INFINITY;
        mass[g] = 0;
        std::memset(sums[g], 0, width * sizeof(float));
    }
    for (int start = first; start < length; start += KEYS) {
        int count = length - start < KEYS ? length - start : KEYS;
        int lanes = padded(count, LANES);
        list.find(start, count, keys);
        for (int j = 0; j < count; ++j) {
            for (int g = 0; g < heads; ++g) {
                F16 sum = splat(0.0f);
                for (int d = 0; d < width; d += LANES * PER_LANE<T>)
                    sum = dot(sum, load_pairs(keys[j] + d), load_pairs(q + g * width + d));
                scores[g][j] = total(sum) * scale;
            }
        }
        for (int g = 0; g < heads; ++g) {
            float* law = scores[g];
            for (int j = count; j < lanes; ++j) law[j] = -INFINITY;
            F16 best = splat(most[g]);
            for (int j = 0; j < lanes; j += LANES) best = max(best, load(law + j));
            float now = highest(best);
            F16 shift = splat(now), all = splat(0.0f);
            // Rescaled at every block, whether the maximum moved or not: the branch saves nothing.
            float old[LANES];
            store(old, exp(splat(most[g]) - shift));
            for (int j = 0; j < lanes; j += LANES) {
                F16 p = exp(load(law + j) - shift);
                store(law + j, p);
                all = all + p;
            }
            mass[g] = mass[g] * old[0] + total(all);
            most[g] = now;
            for (int d = 0; d < width; d += LANES)
                store(sums[g] + d, load(sums[g] + d) * splat(old[0]));
            int d = 0;
            for (; d + 4 * LANES <= width; d += 4 * LANES)
                weigh<T, 4>(sums[g] + d, law, keys, values + d, count);
            for (; d < width; d += 2 * LANES)
                weigh<T, 2>(sums[g] + d, law, keys, values + d, count);
        }
    }
    for (int g = 0; g < heads; ++g) {
        T* to = out + std::size_t(g) * head_dim;
        int d = 0;
        for (; d + LANES <= head_dim; d += LANES)
            store(to + d, load(sums[g] + d) / splat(mass[g]));
        for (; d < head_dim; ++d) narrow_to(to + d, sums[g][d] / mass[g]);
    }
}

}  // namespace outrider
