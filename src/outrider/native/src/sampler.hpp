// Work on rows of logits, shared out over the pool row by row.
#pragma once

#include <functional>
#include <memory>

#include "pipeline.hpp"
#include "pool.hpp"

namespace outrider {

// Rows of this many elements in all are worth waking a helper.
constexpr long WORTH_A_HELPER = 1 << 16;

struct EachRow : Work {
    EachRow(int rows, std::function<void(int)> body) : rows(rows), body(std::move(body)) {}
    const int rows;
    const std::function<void(int)> body;
    void run(Team& team) override {
        team.share(rows, 1, [&](int first, int last) {
            for (int r = first; r < last; ++r) body(r);
        });
    }
};

// body(row) for every row of `width` elements.
inline void each_row(int rows, int width, std::function<void(int)> body) {
    const Timed timed(sampled);
    if (rows < 2 || long(rows) * width < WORTH_A_HELPER) {
        for (int r = 0; r < rows; ++r) body(r);
        return;
    }
    Turn().run(std::make_shared<EachRow>(rows, std::move(body)), 1, pool_size());
}

}  // namespace outrider
