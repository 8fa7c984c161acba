// Products of a few rows with large matrices: every block of weights is read once for all rows.
//
// An output is the sum over its inputs in order, in one lane, whichever rows and outputs are
// computed beside it.
#pragma once

#include <cmath>
#include <cstddef>
#include <type_traits>

#include "fetch.hpp"
#include "isa.hpp"
#include "matrix.hpp"

namespace outrider {

// Units of a matrix from `first` on, as a product reads them.
template <class T>
struct Units {
    const T* data;
    const float* bias;  // of all units, or null
    int first, inputs;

    Units(const Matrix<T>& m)
        : data(m.data.data()), bias(m.bias.data()), first(0), inputs(m.inputs) {}
    Units(const T* data, const float* bias, int first, int inputs)
        : data(data), bias(bias), first(first), inputs(inputs) {}
    std::size_t unit_size() const { return std::size_t(inputs) * LANES; }
    const T* at(int unit) const { return data + (unit - first) * unit_size(); }
};

// What becomes of finished sums.
struct Epilogue {
    // Those that gate by sums in y, and those that gate unit by unit, go in the same order.
    enum Kind {
        put,
        add,
        swish,
        squared,
        gated_by,
        gelu_gated_by,
        clamped_by,
        gate,
        gelu_gate,
        clamped_gate
    } kind;
    // put: y = sum; add: y += scale * sum; swish: y += silu(sum); gated_by: the gates' sums
    float* y = nullptr;
    std::size_t stride = 0;  // of y
    int columns = 0;         // of y that may be written
    float scale = 1;         // put: sum * scale; gate: of what gates
    // gate: silu(even unit) * odd unit; gated_by: silu(y) * sum; bf16 or fp32; or gelu for silu, or
    // what is clamped.
    // squared: max(sum, 0) squared
    void* gated = nullptr;
    std::size_t gated_stride = 0;
    bool narrow = false;           // gate: to bf16
    Upcoming* upcoming = nullptr;  // asked for beside many rows, except by tiles; or null

    // The same for units that stand behind others.
    Epilogue behind(int units) const {
        Epilogue to = *this;
        if (to.y) to.y += std::size_t(units) * LANES;
        to.columns -= units * LANES;
        return to;
    }
    // The same for rows that stand behind others.
    Epilogue at_row(std::size_t row) const {
        Epilogue to = *this;
        if (to.y) to.y += row * stride;
        to.gated = moved(std::ptrdiff_t(row * gated_stride));
        return to;
    }
    // The same for units behind others whose columns are not there.
    Epilogue without(std::ptrdiff_t before) const {
        Epilogue to = *this;
        if (to.y) to.y -= before;
        to.gated = moved(-before);
        to.columns += int(before);
        return to;
    }
    void* moved(std::ptrdiff_t by) const {
        if (!gated) return nullptr;
        return static_cast<char*>(gated) +
               by * std::ptrdiff_t(narrow ? sizeof(bf16) : sizeof(float));
    }
    void put_gated(std::size_t at, F32x16 x) const {
        if (narrow)
            store(static_cast<bf16*>(gated) + at, x);
        else
            store(static_cast<float*>(gated) + at, x);
    }
};

inline F32x16 sigmoid(F32x16 x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }
inline F32x16 silu(F32x16 x) { return x / (splat(1.0f) + exp(splat(0.0f) - x)); }

inline F32x16 tanh(F32x16 x) {
    const F32x16 one = splat(1.0f), e = exp(x + x);
    return one - splat(2.0f) / (e + one);
}

[[gnu::noinline]] inline F32x16 capped(F32x16 x, float cap) {
    return splat(cap) * tanh(x / splat(cap));
}

// gelu(x), by its usual approximation; no part of the loops that many models share.
[[gnu::noinline]] inline F32x16 gelu(F32x16 x) {
    const F32x16 inner = fma(splat(0.044715f) * x * x, x, x) * splat(0.7978845608028654f);
    return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
}

// What an even unit and an odd one make together in gpt-oss: both are clamped.
[[gnu::noinline]] inline F32x16 clamped(F32x16 gate, F32x16 other) {
    const F32x16 limit = splat(7.0f), one = splat(1.0f);
    gate = min(limit, gate);  // in this order, what is no number stays none
    other = max(splat(-7.0f), min(limit, other));
    return (other + one) * gate * sigmoid(splat(1.702f) * gate);
}

// What `gate` and what it gates make together; `kind` is counted from that of silu.
inline F32x16 joined(int kind, F32x16 gate, F32x16 other) {
    if (kind == 2) [[unlikely]]
        return clamped(gate, other);
    return (kind ? gelu(gate) : silu(gate)) * other;
}

inline void finish_one(const Epilogue& epilogue, int row, int unit, F32x16 sum) {
    float* y = epilogue.y + row * epilogue.stride + std::size_t(unit) * LANES;
    int left = epilogue.columns - unit * LANES;
    if (epilogue.kind == Epilogue::put) {
        sum = sum * splat(epilogue.scale);
        if (left >= LANES) {
            store(y, sum);
        } else {
            float last[LANES];
            store(last, sum);
            for (int i = 0; i < left; ++i) y[i] = last[i];
        }
    } else if (epilogue.kind >= Epilogue::gated_by) {
        const std::size_t at = row * epilogue.gated_stride + std::size_t(unit) * LANES;
        epilogue.put_gated(at, joined(epilogue.kind - Epilogue::gated_by, load(y), sum));
    } else if (epilogue.kind == Epilogue::swish) {
        store(y, load(y) + silu(sum));
    } else if (epilogue.kind == Epilogue::squared) {
        const F32x16 positive = max(sum, splat(0.0f));
        epilogue.put_gated(row * epilogue.gated_stride + std::size_t(unit) * LANES,
                           positive * positive);
    } else {
        store(y, fma(sum, splat(epilogue.scale), load(y)));
    }
}

// Sums of `rows` rows by C units.
template <int C>
inline void finish(const Epilogue& epilogue, const float* bias, int row, int rows, int unit,
                   F32x16 (*sums)[C]) {
    if (bias)
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < C; ++c) sums[r][c] = sums[r][c] + load(bias + (unit + c) * LANES);
    if (epilogue.kind < Epilogue::gate) {
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < C; ++c) finish_one(epilogue, row + r, unit + c, sums[r][c]);
        return;
    }
    std::size_t at = row * epilogue.gated_stride + std::size_t(unit / 2) * LANES;
    for (int r = 0; r < rows; ++r, at += epilogue.gated_stride)
        for (int c = 0; c + 1 < C; c += 2) {
            const F32x16 gate = sums[r][c] * splat(epilogue.scale);
            epilogue.put_gated(at + c / 2 * LANES,
                               joined(epilogue.kind - Epilogue::gate, gate, sums[r][c + 1]));
        }
}

// Sums of `rows` rows by two units or, where the second is not one, by the first.
inline void finish_pair(const Epilogue& epilogue, const float* bias, int row, int rows, int unit,
                        bool both, F32x16 (*sums)[2]) {
    if (both) return finish<2>(epilogue, bias, row, rows, unit, sums);
    for (int r = 0; r < rows; ++r) {
        F32x16 one[] = {sums[r][0]};
        finish<1>(epilogue, bias, row + r, 1, unit, &one);
    }
}

// Bytes between what is read and what is asked for, to be in the second-level cache by then. The
// hardware stops at the end of a page, and the first-level cache waits for few lines at a time.
constexpr int AHEAD = 1 << 16;

// How the inputs of `side` units pass by: add(from, to, further) takes those of a stretch and asks
// for what stands `further` elements behind each line of weights, for nothing if that is 0.
//
// Beside few rows weights are read as fast as memory gives them: every line asks for another.
template <class T>
struct Streamed {
    template <class Add>
    void operator()(const Units<T>& m, int side, Add add) const {
        const int wanted = AHEAD / side / 64 * PER_LANE<T>;
        const int ahead = wanted < m.inputs ? wanted : m.inputs;
        const std::size_t further = std::size_t(ahead) * LANES;
        add(0, m.inputs - ahead, further);
        // Behind a unit's last inputs stand the first of the next units.
        add(m.inputs - ahead, m.inputs, further + (side - 1) * m.unit_size());
    }
};

constexpr int MOST_NEAR = 16;  // units that rows pass by together

// Beside many rows the next units are asked for a little at a time, until all rows have passed.
template <class T>
class PassedBy {
public:
    // While `tiles` of rows pass by `count` units from `unit` on, as many units behind them are
    // asked for, and what is upcoming, unless that is null.
    PassedBy(const Matrix<T>& m, int unit, int count, int tiles, Upcoming* upcoming)
        : next_(m.inputs / PER_LANE<T>), share_((2 * LINES - 1) / tiles + 1), upcoming_(upcoming) {
        for (int c = 0; c < count; ++c) next_.add(m.at(unit + count + c));
    }
    template <class X, class Add>
    void operator()(const Units<X>& m, int, Add add) const {
        for (int k = 0; k < m.inputs; k += IN_PAD) {
            next_(share_);
            if (upcoming_) [[unlikely]]
                (*upcoming_)(ASKED * sizeof(T) / 2);
            add(k, k + IN_PAD, std::integral_constant<int, 0>());
        }
    }

private:
    static constexpr int LINES = IN_PAD / PER_LANE<T>;  // of a unit's IN_PAD inputs
    mutable Fetch<MOST_NEAR> next_;
    const int share_;
    Upcoming* const upcoming_;
};

// R rows by C units, as many of them side by side as registers hold sums. The order of a sum is
// that of its inputs, for every R and C.
template <class T, int R, int C, class X, class Inputs>
inline void block(const Units<T>& m, int unit, const X* x, std::size_t stride, int row,
                  const Epilogue& epilogue, const Inputs& inputs) {
    constexpr int side = R * C > MAX_SUMS ? 1 : C;
    const X* x0 = x + row * stride;
    const std::size_t size = m.unit_size();
    F32x16 all[R][C];
    for (int first = 0; first < C; first += side) {
        const T* w = m.at(unit + first);
        F32x16 sums[R][side];
        for (auto& line : sums)
            for (auto& sum : line) sum = splat(0.0f);
        inputs(m, side, [&](int from, int to, auto further) {
            for (int k = from; k < to; k += PER_LANE<T>) {
                decltype(load_pairs(w)) weights[side];
                for (int c = 0; c < side; ++c) {
                    const T* at = w + c * size + std::size_t(k) * LANES;
                    weights[c] = load_pairs(at);
                    if (further) __builtin_prefetch(at + further, 0, 2);
                }
                for (int r = 0; r < R; ++r) {
                    auto value = splat_inputs<T>(x0 + r * stride + k);
                    for (int c = 0; c < side; ++c) sums[r][c] = dot(sums[r][c], weights[c], value);
                }
            }
        });
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < side; ++c) all[r][first + c] = sums[r][c];
    }
    finish<C>(epilogue, m.bias, row, R, unit, all);
}

// Units [first, last) for R rows, as many side by side as registers hold; those of a gate go in
// pairs.
template <class T, int R, int C, class X, class Inputs>
inline void units(const Units<T>& m, int first, int last, const X* x, std::size_t stride, int row,
                  const Epilogue& epilogue, const Inputs& inputs) {
    for (; last - first >= C; first += C)
        block<T, R, C>(m, first, x, stride, row, epilogue, inputs);
    if constexpr (C > 1) units<T, R, C / 2>(m, first, last, x, stride, row, epilogue, inputs);
}

constexpr int width(int rows, int most) {
    int c = most;
    while (c > 2 && rows * c > MAX_SUMS) c /= 2;
    return c;
}

// As `product` for `rows` <= R, up to MOST units side by side.
template <class T, int R, int MOST, class X, class Inputs>
inline void tile(const Units<T>& m, int first, int last, const X* x, std::size_t stride, int row,
                 int rows, const Epilogue& epilogue, const Inputs& inputs) {
    if (rows == R) {
        units<T, R, width(R, MOST)>(m, first, last, x, stride, row, epilogue, inputs);
        return;
    }
    if constexpr (R > 1)
        tile<T, R - 1, MOST>(m, first, last, x, stride, row, rows, epilogue, inputs);
}

// Bytes of units that stay in the second-level cache while all rows pass by.
constexpr std::size_t NEAR = 1 << 18;
// Rows from which they are not all near, so that reading them counts.
constexpr int MANY = 64;

inline int near_units(std::size_t bytes) {
    const int few = int(NEAR / bytes) & ~1;  // a gate's units go in pairs
    return few < 2 ? 2 : few > MOST_NEAR ? MOST_NEAR : few;
}

// The fewest tiles of at most `most` rows.
constexpr int tiles_of(int rows, int most) { return (rows + most - 1) / most; }

// body(row, count) for `rows` rows in `tiles` tiles of equal size.
template <class Body>
inline void each_tile(int rows, int tiles, Body body) {
    for (int i = 0; i < tiles; ++i) {
        const int row = int(long(rows) * i / tiles);
        body(row, int(long(rows) * (i + 1) / tiles) - row);
    }
}

// Units [first, last) of a matrix of bf16 as fp32, until the thread's next call: inputs and sums
// keep their order.
inline Units<float> widened(const Matrix<bf16>& m, int first, int last) {
    static thread_local Memory<float> room;
    const std::size_t count = (last - first) * m.unit_size();
    float* to = room.reserve(count);
    const bf16* from = m.at(first);
    for (std::size_t i = 0; i < count; i += 2 * LANES) {
        const Pairs both = load_pairs(from + i);
        store(to + i, low(both));
        store(to + i + LANES, high(both));
    }
    return {to, m.bias.data(), first, m.inputs};
}

// As `product`, of more rows than registers hold sums of; those that are widened are given as fp32.
template <class T, class X>
void product_of_many(const Matrix<T>& m, int first, int last, const X* x, std::size_t stride,
                     int rows, const Epilogue& epilogue) {
    constexpr int most = MOST_ROWS<X>;
    const int tiles = tiles_of(rows, most);
    const int few = rows > MANY ? near_units(m.unit_size() * sizeof(X)) : 2;
    for (int unit = first; unit < last; unit += few) {
        const int stop = unit + few < last ? unit + few : last;
        const PassedBy<T> inputs(m, unit, stop - unit, tiles, epilogue.upcoming);
        const Units<X> near = [&]() -> Units<X> {
            if constexpr (sizeof(X) == sizeof(T))
                return m;
            else
                return widened(m, unit, stop);
        }();
        each_tile(rows, tiles, [&](int row, int count) {
            tile<X, most, 2>(near, unit, stop, x, stride, row, count, epilogue, inputs);
        });
    }
}

// y[row, outputs of units first..last) for all rows; x [rows, stride], zero behind its inputs. Rows
// of bf16 may be given as fp32; where they should be, those that are not pass by one by one.
template <class T, class X>
void product(const Matrix<T>& m, int first, int last, const X* x, std::size_t stride, int rows,
             const Epilogue& epilogue) {
    if constexpr (WIDENS<X>) {
        for (int r = 0; r < rows; ++r)
            tile<T, 1, 8>(Units<T>(m), first, last, x, stride, r, 1, epilogue, Streamed<T>());
    } else {
        // Units are widened for three tiles of rows and more.
        constexpr int most = MOST_ROWS<T>, few = sizeof(X) > sizeof(T) ? 2 : 1;
        const int tiles = tiles_of(rows, most);
        if (tiles > few) return product_of_many(m, first, last, x, stride, rows, epilogue);
        const int near = tiles > 1 ? near_units(m.unit_size() * sizeof(T)) : last - first;
        for (int unit = first; unit < last; unit += near)
            each_tile(rows, tiles, [&](int row, int count) {
                tile<T, most, 8>(Units<T>(m), unit, std::min(unit + near, last), x, stride, row,
                                 count, epilogue, Streamed<T>());
            });
    }
}

}  // namespace outrider
