// Planted logits: what rows of a sequence say instead of what was computed for them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "outrider.h"

namespace outrider {

// Writes the logits of the token at `position` over z [vocabulary], if there are any for it.
inline void plant(const Planted* from, std::int64_t position, float* z, int vocabulary) {
    if (!from || !from->ids || position < from->first) return;
    const std::int64_t entry = std::min(position - from->first, from->count - 1);
    std::fill(z, z + vocabulary, from->rest[entry]);
    for (std::int64_t i = entry * from->columns; i < (entry + 1) * from->columns; ++i)
        if (from->ids[i] >= 0 && from->ids[i] < vocabulary) z[from->ids[i]] = from->z[i];
}

}  // namespace outrider
