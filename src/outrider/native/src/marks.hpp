// Rows whose numbers are not finite, and which others depend on them.
#pragma once

#include <cmath>

#include "model.hpp"

namespace outrider {

// How many positions a row's logits depend on, where every layer has a window.
template <class T>
int reach_of(const Weights<T>& m) {
    std::int64_t reach = 1;
    for (const auto& layer : m.layers) {
        if (!layer.window) return m.c.max_length;
        reach += layer.window - 1;
    }
    return int(std::min<std::int64_t>(reach, m.c.max_length));
}

// Rows that are not finite leave a mark, and whoever depends on a mark has NaN logits: most such
// rows are NaN by themselves, but not one that sees a row whose last layer alone went wrong.
inline void mark(Store& store, const Rows& rows, const std::vector<std::uint8_t>& nonfinite,
                 const ForwardRequest& request, int vocabulary, int reach) {
    for (std::size_t r = 0; r < nonfinite.size(); ++r) {
        std::uint8_t& old = store.nonfinite[rows.rows[r].slot];
        store.num_nonfinite += int(nonfinite[r]) - int(old);
        old = nonfinite[r];
    }
    if (!store.num_nonfinite) return;
    for (const Row& row : rows.rows) {
        if (row.logits < 0) continue;
        bool sees = false;
        const int first = std::max(row.first, row.edge - reach);
        for (int j = first; j < row.prefix && !sees; ++j) {
            int page = rows.pages[row.pages + j / store.page_size];
            sees = store.nonfinite[std::size_t(page) * store.page_size + j % store.page_size];
        }
        for (int j = 0; j < row.num_above && !sees; ++j)
            sees = store.nonfinite[rows.above[row.above + j]];
        float* line = request.logits + std::size_t(row.logits) * vocabulary;
        for (int i = 0; sees && i < vocabulary; ++i) line[i] = NAN;
    }
}

}  // namespace outrider
