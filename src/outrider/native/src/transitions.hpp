// Draws of a block's tokens by their scores behind the token before them: DSpark's bias, DFlash2's
// selector.
#pragma once

#include <algorithm>
#include <cmath>

#include "model.hpp"
#include "sampler.hpp"

namespace outrider {

// Writes the scores of the likeliest ids of a row of `own` logits to `z` [wanted], which the target
// numbers, and -inf for all others. `before` is the token before them, `hidden` the row's state,
// and `ids` what the target calls each logit's id (empty: the same). Only ids of `mask` count.
template <class T>
void score_transitions(const Weights<T>& m, const float* logits, int own,
                       const std::vector<std::int32_t>& ids, int before, const float* hidden,
                       Mask mask, std::vector<float>& z, int wanted) {
    const Transitions<T>& t = m.transitions;
    auto id_of = [&](int i) { return ids.empty() ? i : ids[i]; };
    std::vector<std::pair<float, int>> best;  // a heap, the least likely first, of equals the last
    const auto least = std::greater<std::pair<float, int>>();
    for (int i = 0; i < own; ++i) {
        const bool full = int(best.size()) == t.top;
        if (full && !(logits[i] > best.front().first)) continue;
        const int id = id_of(i);
        if (!std::isfinite(logits[i]) || id < 0 || id >= wanted) continue;
        if (mask && !(mask[id / 8] >> id % 8 & 1)) continue;
        if (full) {
            std::pop_heap(best.begin(), best.end(), least);
            best.pop_back();
        }
        best.emplace_back(logits[i], -i);
        std::push_heap(best.begin(), best.end(), least);
    }
    std::vector<float> context(t.rank, 0.0f);  // nothing is known of an id beyond the table
    for (int r = 0; r < t.rank && before < t.tokens; ++r) {
        context[r] = widen(t.before[std::size_t(before) * t.rank + r]);
        if (!t.projection) continue;
        const float* row = t.projection + std::size_t(r) * m.c.hidden;
        float sum = 0;
        for (int i = 0; i < m.c.hidden; ++i) sum += row[i] * hidden[i];
        context[r] *= sum;
    }
    z.assign(wanted, -INFINITY);
    const bool likely = own != m.c.vocabulary;
    for (const auto& [logit, negative] : best) {
        const int i = -negative;
        const T* row = t.behind + std::size_t(likely ? m.likely_ids[i] : i) * t.rank;
        float score = 0;
        for (int r = 0; r < t.rank; ++r) score += context[r] * widen(row[r]);
        z[id_of(i)] = logit + score;
    }
}

inline bool has_transitions(const Model& model) {
    if (model.c.dtype == 0) return static_cast<const Weights<float>&>(model).transitions.rank > 0;
    return static_cast<const Weights<bf16>&>(model).transitions.rank > 0;
}

inline void score_transitions(const Model& model, const float* logits, int own,
                              const std::vector<std::int32_t>& ids, int before, const float* hidden,
                              Mask mask, std::vector<float>& z, int wanted) {
    if (model.c.dtype == 0)
        score_transitions(static_cast<const Weights<float>&>(model), logits, own, ids, before,
                          hidden, mask, z, wanted);
    else
        score_transitions(static_cast<const Weights<bf16>&>(model), logits, own, ids, before,
                          hidden, mask, z, wanted);
}

}  // namespace outrider
