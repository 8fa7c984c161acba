// Mixes the rows of a block by kernels, before and behind a sublayer (DFlash2).
#pragma once

#include <algorithm>

#include "model.hpp"

namespace outrider {

// The kernels of a sublayer's rows: what all rows have, [2, taps, hidden], and what each adds to
// it, `own` [rows, stride], where channels of a group share a number. The first half is of what
// enters.
template <class T>
struct Blend {
    const Config& c;
    const Rows& rows;
    float* own;
    const int stride = padded(kernel_numbers(c), LANES);

    // Makes row r of what enters a sublayer, [.., width], of the rows of its block up to it.
    void enter(int r, T* to, const T* from, int width, const float* all) const {
        sum(r, from, width, all, own + std::size_t(r) * stride,
            [&](int i, float sum) { narrow_to(to + i, sum); });
        std::fill(to + c.hidden, to + width, T());
    }

    // Adds row r of what leaves a sublayer, [.., width], to the residual stream.
    void leave(int r, float* to, const float* from, int width, const float* all, float by) const {
        const float* mine = own + std::size_t(r) * stride + kernel_numbers(c) / 2;
        sum(r, from, width, all + std::size_t(c.kernel_taps) * c.hidden, mine,
            [&](int i, float sum) { to[i] += sum * by; });
    }

private:
    template <class N, class Put>
    void sum(int r, const N* from, int width, const float* all, const float* mine, Put put) const {
        const int groups = c.hidden / c.kernel_group;
        const int before = rows.rows[r].position - rows.rows[r].edge;  // rows of its block
        const int taps = std::min(c.kernel_taps, before + 1);
        for (int i = 0; i < c.hidden; ++i) {
            float sum = 0;
            for (int t = 0; t < taps; ++t) {
                const float by = all[t * c.hidden + i] + mine[t * groups + i / c.kernel_group];
                sum += widen(from[std::size_t(r - t) * width + i]) * by;
            }
            put(i, sum);
        }
    }
};

}  // namespace outrider
