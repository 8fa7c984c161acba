// What rows enter the first layer with.
#pragma once

#include <cstring>
#include <vector>

#include "multiply.hpp"

namespace outrider {

// Writes a token's embedding [hidden], scaled and rounded as torch rounds it. `room` [hidden].
template <class T>
void embed_token(const Weights<T>& m, int token, T* room, float* to) {
    const T* from = look_up(m, token, room);
    T scale;
    narrow_to(&scale, m.c.embedding_scale);
    for (int i = 0; i < m.c.hidden; ++i) {
        T scaled = from[i];
        if (m.c.embedding_scale != 1) narrow_to(&scaled, widen(from[i]) * widen(scale));
        to[i] = widen(scaled);
    }
}

// Joins a token's embedding and a state [hidden], each after its own norm, to `both` [stride], and
// writes the residual stream to `to` [width].
template <class T>
void pair_with_state(const Weights<T>& m, int token, const float* given, T* room, int width,
                     float* to, T* both, int stride) {
    const Config& c = m.c;
    // Zeros behind the last number: the norm of a row that is not finite leaves NaNs there.
    std::vector<float> wide(width), state(width);
    embed_token(m, token, room, wide.data());
    std::memcpy(state.data(), given, c.hidden * sizeof(float));
    std::memcpy(to, state.data(), width * sizeof(float));
    const bool joined = c.input == INPUT_JOINED;
    const float* of_token = joined ? m.fuse_norm.data() : m.layers[0].input_norm.data();
    const float* of_state = joined ? of_token + c.hidden : m.state_norm.data();
    if (!bare(c)) {
        rms_norm(wide.data(), wide.data(), of_token, c.hidden, width, c.norm_eps);
        rms_norm(state.data(), state.data(), of_state, c.hidden, width, c.norm_eps);
    }
    if (c.state_normed) std::memcpy(to, state.data(), width * sizeof(float));
    for (int i = 0; i < c.hidden; ++i) {
        narrow_to(&both[i], wide[i]);
        narrow_to(&both[c.hidden + i], state[i]);
    }
    std::fill(both + 2 * c.hidden, both + stride, T());
}

}  // namespace outrider
