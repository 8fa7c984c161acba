// Short convolutions over the tokens of a sequence.
#pragma once

#include <type_traits>

#include "isa.hpp"
#include "model.hpp"

namespace outrider {

struct Conv {
    // Lines of 16 channels that go through the rows together, so that a row's are read at once.
    static constexpr int TOGETHER = 16;

    const float* taps;  // [taps, width], the oldest token's first
    const float* bias;  // [width], or null
    int count, width;

    // Groups of lines that go together.
    int groups() const { return (width / LANES + TOGETHER - 1) / TOGETHER; }

    // Walks the channels of a group: take(row, channel) are 16 of its inputs in a row, put(row,
    // channel, sum) gets what comes out. Every row is summed in one order. Inputs of drafted rows
    // lie `width` apart.
    template <class Take, class Put>
    void walk(const Walk& walk, LayerWalk part, int group, Take take, Put put) const {
        if (count == 4)
            walk_by(std::integral_constant<int, 4>(), walk, part, group, take, put);
        else if (count == 3)
            walk_by(std::integral_constant<int, 3>(), walk, part, group, take, put);
        else
            walk_by(count, walk, part, group, take, put);
    }

private:
    template <class Count, class Take, class Put>
    void walk_by(Count count, const Walk& walk, LayerWalk part, int group, Take take,
                 Put put) const {
        const int past = count - 1, first = group * TOGETHER * LANES;
        const int lines = std::min(TOGETHER, (width - first) / LANES);
        F32x16 inputs[TOGETHER][MAX_TAPS];  // that the next sums begin with, the oldest first
        // The last inputs behind so many accepted rows, to `to`.
        auto behind = [&](int rows, int at, auto to) {
            for (int k = 0; k < past; ++k) {
                const int place = rows + k;  // among the state's and the accepted rows
                to(k, load(place < past ? part.state + std::size_t(place) * width + at
                                        : part.inputs + std::size_t(place - past) * width + at));
            }
        };
        auto keep = [&](float* to, const F32x16* line, int at) {
            for (int k = 0; k < past; ++k) store(to + std::size_t(k) * width + at, line[k]);
        };
        for (int l = 0; l < lines; ++l) {
            const int at = first + l * LANES;
            behind(walk.accepted, at, [&](int k, F32x16 x) { inputs[l][k] = x; });
            if (walk.kept && walk.kept <= walk.accepted)
                behind(walk.kept, at,
                       [&](int k, F32x16 x) { store(part.kept + std::size_t(k) * width + at, x); });
        }
        for (int r = 0; r < walk.committed + walk.drafted; ++r)
            for (int l = 0; l < lines; ++l) {
                const int at = first + l * LANES;
                F32x16* line = inputs[l];
                line[past] = take(walk.first + r, at);
                F32x16 sum = line[0] * load(taps + at);
                for (int k = 1; k < count; ++k)
                    sum = fma(line[k], load(taps + std::size_t(k) * width + at), sum);
                put(walk.first + r, at, bias ? sum + load(bias + at) : sum);
                if (r >= walk.committed)
                    store(part.next + std::size_t(r - walk.committed) * width + at, line[past]);
                for (int k = 0; k < past; ++k) line[k] = line[k + 1];
                if (walk.accepted + r + 1 == walk.kept) keep(part.kept, line, at);
                if (r == walk.committed - 1) keep(part.state, line, at);
            }
    }
};

}  // namespace outrider
