// Planted logits: what rows of a sequence say instead of what was computed for them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace outrider {

// The layout is that of Library's `_planted`. The last entry stands for all positions behind it.
struct Planted {
    const std::int64_t* ids;  // [count, columns]: these have the logits `z`; null: nothing is planted
    const float* z;           // [count, columns]
    const float* rest;        // [count]: what every other id has
    std::int64_t count, columns;
    std::int64_t first;  // position of the token that the first entry decides
};

// Writes the logits of the token at `position` over z [vocabulary], if there are any for it.
inline void plant(const Planted* from, std::int64_t position, float* z, int vocabulary) {
    if (!from || !from->ids || position < from->first) return;
    const std::int64_t entry = std::min(position - from->first, from->count - 1);
    std::fill(z, z + vocabulary, from->rest[entry]);
    for (std::int64_t i = entry * from->columns; i < (entry + 1) * from->columns; ++i)
        if (from->ids[i] >= 0 && from->ids[i] < vocabulary) z[from->ids[i]] = from->z[i];
}

}  // namespace outrider
