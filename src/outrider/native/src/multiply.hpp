// Products of rows with a model's matrices, plain or quantised, shared by a team of workers.
#pragma once

#include <algorithm>
#include <functional>

#include "model.hpp"
#include "pool.hpp"
#include "quantized.hpp"

namespace outrider {

// Rows that every worker normalises for itself rather than wait for the others.
constexpr int ALONE = 16;
// Their room as digits, where the last of a bundle may be missing, or as fp32.
constexpr int ALONE_ROOM = 18;
// Rows that every worker makes digits of for itself: half a microsecond each, which is about what
// it takes to meet.
constexpr int DIGITS_ALONE = 4;

template <class T>
void rms_norm(T* to, const float* x, const float* weight, int width, int stride, float eps) {
    F32x16 sum = splat(0.0f);
    for (int i = 0; i < stride; i += LANES) sum = fma(load(x + i), load(x + i), sum);
    F32x16 factor = splat(1.0f / std::sqrt(total(sum) / float(width) + eps));
    for (int i = 0; i < stride; i += LANES) store(to + i, load(x + i) * factor * load(weight + i));
}

// Adds `scale` times the RMSNorm of y to x. What stands behind the last number of y is zero, and
// stays so.
inline void add_normed(float* x, const float* y, const float* weight, int width, int stride,
                       float eps, float scale) {
    F32x16 sum = splat(0.0f);
    for (int i = 0; i < stride; i += LANES) sum = fma(load(y + i), load(y + i), sum);
    const F32x16 factor = splat(1.0f / std::sqrt(total(sum) / float(width) + eps));
    for (int i = 0; i < stride; i += LANES)
        store(x + i, fma(load(y + i) * factor * load(weight + i), splat(scale), load(x + i)));
}

// The RMSNorm of `count` numbers, in place; others may stand behind them.
inline void normalise(float* x, const float* weight, int count, float eps) {
    const int whole = count / LANES * LANES;
    F32x16 lanes = splat(0.0f);
    for (int i = 0; i < whole; i += LANES) lanes = fma(load(x + i), load(x + i), lanes);
    float sum = total(lanes);
    for (int i = whole; i < count; ++i) sum += x[i] * x[i];
    const float factor = 1.0f / std::sqrt(sum / float(count) + eps);
    for (int i = 0; i < count; ++i) x[i] *= factor * weight[i];
}

template <class T>
struct Multiplier {
    const Weights<T>& m;
    Digits digits;          // of all rows, or of ALONE rows of every worker
    float* wide = nullptr;  // the same rows as fp32, where they are WIDENS

    // Makes room for `count` rows as digits, or as fp32.
    Multiplier(const Weights<T>& weights, std::size_t count) : m(weights) {
        const std::size_t alone = std::size_t(ALONE_ROOM) * pool_size();
        if (count < alone) count = alone;
        digits = {m.scratch.digits.reserve((count + LANES) * digit_bytes()),
                  m.scratch.parts.reserve(count * m.blocks), m.c.coarse != 0};
        if (m.apart) m.scratch.gates.reserve(count * padded(widest_mlp(m.c), LANES));
        if (WIDENS<T>)
            wide = m.scratch.wide.reserve(count * spread_stride(padded(widest(m.c), IN_PAD)));
    }

    // The most inputs of a matrix.
    static int widest(const Config& c) {
        const int hidden = begins_with_state(c) ? 2 * c.hidden : c.hidden;
        const int values = linears(c) ? linear_values(c) : 0;
        return std::max({hidden, widest_mlp(c), c.heads * c.head_dim, c.fused, values});
    }

    // Units of a chunk, whole groups of 4: about an eighth of a worker's part. Beside more than
    // ALONE rows one group, since a worker that ends first waits for another's chunk; tiles take a
    // quarter beside MANY, so that the rows are not read for too few units.
    static int grain(int units, int workers, int rows) {
#if !defined(__AMX_BF16__)
        if (rows > ALONE) return 4;
#endif
        const int wanted = units / ((rows > MANY ? 4 : 8) * workers) / 4 * 4;
        return wanted < 4 ? 4 : wanted > 64 ? 64 : wanted;
    }

    // Digits of rows [first, last) of x [count, stride] for their product with a matrix in codes.
    static void make_digits(const Packed& part, const T* x, int stride, int first, int last,
                            int count, const Digits& to);

    // What is multiplied instead of rows: their digits or, unless that is null, their numbers as
    // fp32, with a stride of their own.
    struct Ready {
        Digits digits;
        float* wide = nullptr;
    };
    // Makes it for few rows [count, stride].
    static void make_ready(const Weight<T>& weight, const Packed* part, const T* x, int stride,
                           int count, const Ready& to);

    // Whether a product with plain weights takes rows as fp32.
    static bool widens(const Weight<T>& weight, int count) {
        return WIDENS<T> && count > 1 && !weight.plain.empty();
    }
    static int wide_stride(const Weight<T>& weight) { return spread_stride(weight.plain.inputs); }

    // A product of rows of x, or of what stands for them.
    static void multiply(const Weight<T>& weight, const Packed* part, int first, int last,
                         const T* x, int stride, const Ready& ready, int count,
                         const Epilogue& epilogue);

    // body(part, units, epilogue) for each part of a weight: null, or codes. What one gates for the
    // next has `width` columns, or as many as there are outputs.
    template <class Body>
    void each_part(const Weight<T>& weight, const Epilogue& epilogue, Body body,
                   int width = 0) const {
        if (weight.packed.empty()) return body(nullptr, weight.plain.units, epilogue);
        if (weight.apart) {
            const Packed &gate = weight.packed[0], &up = weight.packed[1];
            const std::size_t stride = width ? width : std::size_t(gate.units) * LANES;
            float* gates = m.scratch.gates.data();
            body(&gate, gate.units,
                 {.kind = Epilogue::put,
                  .y = gates,
                  .stride = stride,
                  .columns = int(stride),
                  .scale = epilogue.scale});
            Epilogue last = epilogue;
            last.kind = Epilogue::Kind(epilogue.kind - Epilogue::gate + Epilogue::gated_by);
            last.y = gates;
            last.stride = stride;
            return body(&up, up.units, last);
        }
        int first = 0;
        for (const Packed& part : weight.packed) {
            body(&part, part.units, epilogue.behind(first));
            first += part.units;
        }
    }

    // The room of what is multiplied instead of `count` rows, the first of which is `row` there.
    Ready room_at(std::size_t row, const Weight<T>& weight, int count) const {
        return {{digits.digits + row * digit_bytes(), digits.parts + row * m.blocks, digits.coarse},
                widens(weight, count) ? wide + row * wide_stride(weight) : nullptr};
    }
    // That of a worker that makes it for itself.
    Ready own_room(const Team& team, const Weight<T>& weight, int count) const {
        return room_at(std::size_t(team.index) * ALONE_ROOM, weight, count);
    }

    // Bytes of a row's digits; bundles of rows have summaries among them.
    std::size_t digit_bytes() const { return 2 * m.half + 12 * m.blocks; }

    using Prepare = std::function<void(int first, int last)>;

    // The product of rows of x [count, stride], which `prepare` makes, if it is given. Digits of
    // few rows every worker makes for itself; many rows are widened together, where that pays.
    void multiply(Team& team, const Weight<T>& weight, const T* x, int stride, int count,
                  const Epilogue& epilogue, Prepare prepare = nullptr);
};

// A row of the embedding as T: in place, or in `room` [hidden].
template <class T>
const T* look_up(const Weights<T>& m, int token, T* room) {
    const int hidden = m.c.hidden;
    if (m.embedding) return m.embedding + std::size_t(token) * hidden;
    const Weight<T>& from = m.rows();
    if (from.packed.empty()) {
        unpack_row(from.plain, token, room, hidden);
    } else {
        std::vector<float> wide(hidden);
        unpack_row(from.packed[0], token, wide.data());
        for (int i = 0; i < hidden; ++i) narrow_to(&room[i], wide[i]);
    }
    return room;
}

}  // namespace outrider
