// What deciding and drafting share: a forward through all layers, and the processing of its logits.
#pragma once

#include <algorithm>
#include <cmath>

#include "model.hpp"
#include "sampler.hpp"

namespace outrider {

// Runs sublayers; writes the logits [num_logits, vocabulary] of the rows that want them.
inline void run(const Model& model, Store& store, const Rows& rows,
                const std::vector<std::int32_t>& sublayers, float* logits, Hidden hidden = {},
                bool likely = false) {
    forward(model, store, rows,
            ForwardRequest{sublayers.data(), int(sublayers.size()), hidden.layers, hidden.count,
                           logits, hidden.out, hidden.rows, likely});
}

// Processes a row of `own` logits, in place or in `wide`; returns where the processed logits are.
// Before its position stand `before` tokens and then the path. `targets` (empty: its own) are the
// target's ids.
inline float* process(const Pipeline& pipeline, float* z, int own,
                      const std::vector<std::int32_t>& targets, int before, Path path, Mask mask,
                      bool shared, std::vector<float>& wide) {
    const int wanted = pipeline.o.vocabulary;
    // Padded or cut to the target's vocabulary, which its options speak of.
    if (own < wanted || !targets.empty() || shared) {
        wide.assign(wanted, -INFINITY);
        if (targets.empty()) {
            std::copy(z, z + std::min(own, wanted), wide.begin());
        } else {
            for (int i = 0; i < own; ++i)
                if (targets[i] >= 0 && targets[i] < wanted) wide[targets[i]] = z[i];
        }
        z = wide.data();
    }
    if (mask) keep(z, wanted, mask);
    pipeline.apply(z, before - pipeline.o.prompt_length, path, false);
    return z;
}

// The noise of a position, or null where the pipeline is greedy.
struct NoiseOf {
    NoiseOf(const Pipeline& pipeline, int position)
        : key(pipeline.key(position)), drawn(pipeline.o.temperature != 0) {}
    const NoiseKey* get() const { return drawn ? &key : nullptr; }
    const NoiseKey key;
    const bool drawn;
};

}  // namespace outrider
