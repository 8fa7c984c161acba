// The states of sequences in layers that are no attention.
//
// In memory is what committed tokens made of a state, and the inputs of the rows that were drafted
// behind them. A step takes the inputs of the accepted ones in, then its own committed rows, and
// writes the state back; rows of a draft go on from it on a copy, and leave their inputs.
#pragma once

#include <algorithm>
#include <vector>

#include "memory.hpp"

namespace outrider {

constexpr int MAX_TAPS = 8, MAX_KEY_DIM = 256;

// What a layer keeps of each sequence, in floats: its state, and the inputs of a drafted row.
struct StateSize {
    std::size_t state = 0, row = 0;
};

struct Slot {
    int position = -1;     // tokens that made the states, -1 while a forward changes them
    int drafted = 0;       // rows whose inputs follow
    Memory<float> states;  // layer by layer
    Memory<float> inputs;  // layer by layer, and in a layer part by part, each row by row
    Memory<float> next;    // those of the present draft
    Memory<float> kept;    // states as they were behind `kept_at` tokens, the end of a page
    int kept_at = 0;       // 0: none
};

// The rows of one sequence in a forward. `accepted` of the `before` rows drafted before are taken
// in first, then `committed` rows from `first` on; the `drafted` ones behind them change nothing.
struct Walk {
    Slot* slot;
    int first, committed, drafted, start;
    int accepted, before;
    int kept;  // states are kept behind so many of the accepted and committed rows; 0: not
};

// Where one layer's part of a walk lies.
struct LayerWalk {
    float* state;
    const float* inputs;  // of rows drafted before
    float* next;          // of those that are drafted now
    float* kept;          // see Walk
};

// Lets a forward change the states of a walk, which are `all` together.
inline void begin(const Walk& walk, StateSize all) {
    Slot& slot = *walk.slot;
    slot.position = -1;
    slot.states.reserve(all.state);
    if (!walk.start) std::fill_n(slot.states.data(), all.state, 0.0f);
    slot.next.reserve(walk.drafted * all.row);
    if (walk.kept || !walk.start) slot.kept_at = 0;
    if (walk.kept) slot.kept.reserve(all.state);
}

// Keeps what a forward made of them.
inline void finish(const Walk& walk) {
    Slot& slot = *walk.slot;
    slot.position = walk.start + walk.committed;
    slot.drafted = walk.drafted;
    if (walk.kept) slot.kept_at = walk.start - walk.accepted + walk.kept;
    std::swap(slot.inputs, slot.next);
}

}  // namespace outrider
