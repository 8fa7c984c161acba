// Short convolutions over the tokens of a sequence.
#pragma once

#include "isa.hpp"
#include "model.hpp"

namespace outrider {

struct Conv {
    const float* taps;  // [taps, width], the oldest token's first
    const float* bias;  // [width], or null
    int count, width;

    // Walks 16 channels of a sequence from `at` on: take(row) are their inputs in a row, put(row,
    // sum) gets what comes out. Every row is summed in one order. Inputs of drafted rows lie
    // `width` apart.
    template <class Take, class Put>
    void walk(const Walk& walk, LayerWalk part, int at, Take take, Put put) const {
        F32x16 line[MAX_TAPS];  // the inputs that the next sum begins with, the oldest first
        const int past = count - 1;
        // The k-th of the last inputs behind so many accepted rows.
        auto input = [&](int rows, int k) {
            const int place = rows + k;  // among the state's and the accepted rows
            return load(place < past ? part.state + std::size_t(place) * width + at
                                     : part.inputs + std::size_t(place - past) * width + at);
        };
        auto keep = [&](float* to, int k, F32x16 x) { store(to + std::size_t(k) * width + at, x); };
        for (int k = 0; k < past; ++k) line[k] = input(walk.accepted, k);
        if (walk.kept && walk.kept <= walk.accepted)
            for (int k = 0; k < past; ++k) keep(part.kept, k, input(walk.kept, k));
        for (int r = 0; r < walk.committed + walk.drafted; ++r) {
            line[past] = take(walk.first + r);
            F32x16 sum = line[0] * load(taps + at);
            for (int k = 1; k < count; ++k)
                sum = fma(line[k], load(taps + std::size_t(k) * width + at), sum);
            put(walk.first + r, bias ? sum + load(bias + at) : sum);
            if (r >= walk.committed)
                store(part.next + std::size_t(r - walk.committed) * width + at, line[past]);
            for (int k = 0; k < past; ++k) line[k] = line[k + 1];
            if (walk.accepted + r + 1 == walk.kept)
                for (int k = 0; k < past; ++k) keep(part.kept, k, line[k]);
            if (r == walk.committed - 1)
                for (int k = 0; k < past; ++k) keep(part.state, k, line[k]);
        }
    }
};

}  // namespace outrider
