// What heads on a target's hidden states compute beside layers: fused states, and Medusa's logits.
#include "multiply.hpp"

namespace outrider {
namespace {

// Workers are called in where there is work for them: below this many products of two numbers the
// time to meet is longer.
constexpr long WORTH_SHARING = 1 << 22;

template <class T>
struct Fuse : Work, Multiplier<T> {
    using Multiplier<T>::m, Multiplier<T>::multiply;
    const float* const* hidden;
    const int parts;
    const std::int32_t *which, *to;
    const int count;
    float* const states;
    const Config& c = m.c;
    const int stride = spread_stride(padded(c.fused, IN_PAD)), width = padded(c.hidden, IN_PAD);
    T* rows;
    float* made;

    Fuse(const Weights<T>& weights, const float* const* hidden, int parts,
         const std::int32_t* which, int count, float* states, const std::int32_t* to)
        : Multiplier<T>(weights, padded(count, LANES)),
          hidden(hidden),
          parts(parts),
          which(which),
          to(to),
          count(count),
          states(states) {
        rows = m.scratch.paired.reserve(std::size_t(padded(count, LANES)) * stride);
        made = m.scratch.x.reserve(std::size_t(padded(count, LANES)) * width);
    }

    // Puts the parts of a row side by side, each normalised or all together.
    void join(int first, int last) {
        const int part = c.fused / parts, norms = c.fused_norms;
        std::vector<float> row(c.fused);
        for (int r = first; r < last; ++r) {
            for (int p = 0; p < parts; ++p)
                std::memcpy(&row[p * part], hidden[p] + std::size_t(which[r]) * part,
                            part * sizeof(float));
            for (int p = 0; p < norms; ++p) {
                const int size = c.fused / norms;
                float *x = &row[p * size], sum = 0;
                for (int i = 0; i < size; ++i) sum += x[i] * x[i];
                const float factor = 1.0f / std::sqrt(sum / float(size) + c.norm_eps);
                for (int i = 0; i < size; ++i) x[i] *= factor * m.fuse_norm.data()[p * size + i];
            }
            T* out = rows + std::size_t(r) * stride;
            for (int i = 0; i < c.fused; ++i) narrow_to(&out[i], row[i]);
            std::fill(out + c.fused, out + stride, T());
        }
    }

    void run(Team& team) override {
        team.share(count, 4, [&](int first, int last) { join(first, last); });
        multiply(
            team, m.fuse, rows, stride, count,
            {.kind = Epilogue::put, .y = made, .stride = std::size_t(width), .columns = c.hidden});
        team.share(count, 16, [&](int first, int last) {
            for (int r = first; r < last; ++r) {
                float* state = states + std::size_t(to[r]) * c.hidden;
                std::memcpy(state, made + std::size_t(r) * width, c.hidden * sizeof(float));
                if (c.input == INPUT_BLOCK)
                    normalise(state, m.state_norm.data(), c.hidden, c.norm_eps);
            }
        });
    }
};

// Makes states of the residual streams behind a target's last layer, by the norm of that.
template <class T>
void norm_states(const Weights<T>& m, const float* hidden, const std::int32_t* which, int count,
                 float* states, const std::int32_t* to) {
    const std::size_t width = m.c.hidden;
    for (int r = 0; r < count; ++r) {
        float* state = states + to[r] * width;
        std::memcpy(state, hidden + which[r] * width, width * sizeof(float));
        normalise(state, m.state_norm.data(), m.c.hidden, m.c.norm_eps);
    }
}

template <class T>
struct Heads : Work, Multiplier<T> {
    using Multiplier<T>::m, Multiplier<T>::multiply;
    const float* const states;
    const int count;
    float* const logits;
    const Config& c = m.c;
    const int width = padded(c.hidden, IN_PAD), stride = spread_stride(width);
    float *first, *x;
    T *rows, *said;  // what one head multiplies, and what the target's output matrix does for all

    Heads(const Weights<T>& weights, const float* states, int count, float* logits)
        : Multiplier<T>(weights, padded(count * weights.c.layers, LANES)),
          states(states),
          count(count),
          logits(logits) {
        const std::size_t room = padded(count, LANES);
        first = m.scratch.qkv.reserve(room * width);
        x = m.scratch.x.reserve(room * width);
        rows = m.scratch.normed.reserve(room * stride);
        said = m.scratch.paired.reserve(std::size_t(padded(count * c.layers, LANES)) * stride);
    }

    // Narrows x, each row `step` rows behind the one before.
    void narrow(Team& team, T* to, int step) {
        team.share(count, 4, [&](int begin, int end) {
            for (int r = begin; r < end; ++r)
                for (int i = 0; i < stride; ++i)
                    narrow_to(&to[std::size_t(r) * step * stride + i],
                              i < c.hidden ? x[std::size_t(r) * width + i] : 0.0f);
        });
    }

    void run(Team& team) override {
        team.share(count, 4, [&](int begin, int end) {
            std::vector<float> room(width);
            for (int r = begin; r < end; ++r) {
                std::memcpy(room.data(), states + std::size_t(r) * c.hidden,
                            c.hidden * sizeof(float));
                rms_norm(first + std::size_t(r) * width, room.data(), m.norm.data(), c.hidden,
                         width, c.norm_eps);
            }
        });
        for (int head = 0; head < c.layers; ++head) {
            team.share(count, 4, [&](int begin, int end) {
                std::copy(first + std::size_t(begin) * width, first + std::size_t(end) * width,
                          x + std::size_t(begin) * width);
            });
            for (int block = 0; block < c.blocks; ++block) {
                narrow(team, rows, 1);
                multiply(team, m.drafts[head * (c.blocks + 1) + block], rows, stride, count,
                         {.kind = Epilogue::swish,
                          .y = x,
                          .stride = std::size_t(width),
                          .columns = width});
            }
            if (m.borrows()) {
                narrow(team, said + std::size_t(head) * stride, c.layers);
                continue;
            }
            narrow(team, rows, 1);
            multiply(team, m.drafts[head * (c.blocks + 1) + c.blocks], rows, stride, count,
                     {.kind = Epilogue::put,
                      .y = logits + std::size_t(head) * c.vocabulary,
                      .stride = std::size_t(c.layers) * c.vocabulary,
                      .columns = c.vocabulary});
        }
        if (m.borrows())
            multiply(team, *m.head, said, stride, count * c.layers,
                     {.kind = Epilogue::put,
                      .y = logits,
                      .stride = std::size_t(c.vocabulary),
                      .columns = c.vocabulary});
    }
};

template <class T>
void heads_as(const Weights<T>& m, const float* states, int count, float* logits) {
    Turn turn;
    auto work = std::make_shared<Heads<T>>(m, states, count, logits);
    turn.run(work, 6 + m.c.layers * (4 + 4 * (m.c.blocks + 1)), pool_size());
}

template <class T>
void fuse_as(const Weights<T>& m, const float* const* hidden, int parts, const std::int32_t* which,
             int count, float* states, const std::int32_t* to) {
    if (m.c.input == INPUT_JOINED) return norm_states(m, hidden[0], which, count, states, to);
    Turn turn;
    auto work = std::make_shared<Fuse<T>>(m, hidden, parts, which, count, states, to);
    const long products = long(m.c.fused) * m.c.hidden * count;
    turn.run(work, 6, products < WORTH_SHARING ? 1 : pool_size());
}

}  // namespace

void run_heads(const Model& model, const float* states, int count, float* logits) {
    if (model.c.dtype == 0)
        heads_as(static_cast<const Weights<float>&>(model), states, count, logits);
    else
        heads_as(static_cast<const Weights<bf16>&>(model), states, count, logits);
}

void fuse(const Model& model, const float* const* hidden, int parts, const std::int32_t* which,
          int count, float* states, const std::int32_t* to) {
    if (model.c.dtype == 0)
        fuse_as(static_cast<const Weights<float>&>(model), hidden, parts, which, count, states, to);
    else
        fuse_as(static_cast<const Weights<bf16>&>(model), hidden, parts, which, count, states, to);
}

}  // namespace outrider
