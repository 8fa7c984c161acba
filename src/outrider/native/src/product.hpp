// Products of a few rows with large matrices: every block of weights is read once for all rows.
//
// A matrix [out, in] is packed in units of 16 outputs: [in / pair][16 outputs][pair], zeros behind
// the last output and behind the last input (padded to 32). An output is the sum over its inputs in
// order, in one lane, whichever rows and outputs are computed beside it.
#pragma once

#include <cmath>
#include <cstddef>

#include "isa.hpp"
#include "memory.hpp"

namespace outrider {

constexpr int IN_PAD = 32;  // inputs, and with them the strides of activations

// A stride of at least `width`, itself a multiple of IN_PAD: rows a power of two apart would share
// few of the cache's sets.
constexpr int apart(int width) { return width / IN_PAD % 2 ? width : width + IN_PAD; }

template <class T>
struct Matrix {
    Memory<T> data;
    Memory<float> bias;  // [units * 16] or empty
    int units = 0;
    int inputs = 0;  // padded

    std::size_t unit_size() const { return std::size_t(inputs) * LANES; }
    bool empty() const { return units == 0; }
    std::size_t bytes() const { return data.bytes() + bias.bytes(); }
};

// One unit of outputs from `count` <= 16 rows of [., in], `stride` apart.
template <class T>
void pack_unit(T* to, const T* from, std::size_t stride, int count, int in) {
    constexpr int pair = PER_LANE<T>;
    for (int lane = 0; lane < count; ++lane)
        for (int k = 0; k < in; ++k)
            to[std::size_t(k / pair) * LANES * pair + lane * pair + k % pair] = from[lane * stride + k];
}

// A row of a matrix of one part: `in` numbers.
template <class T>
void unpack_row(const Matrix<T>& m, int row, T* to, int in) {
    constexpr int pair = PER_LANE<T>;
    const T* from = m.data.data() + row / LANES * m.unit_size() + row % LANES * pair;
    for (int k = 0; k < in; ++k) to[k] = from[std::size_t(k / pair) * LANES * pair + k % pair];
}

// What becomes of finished sums.
struct End {
    enum Kind { put, add, gate, swish } kind;
    float* y = nullptr;        // put: y = sum; add: y += scale * sum; swish: y += silu(sum)
    std::size_t stride = 0;    // of y
    int columns = 0;           // of y that may be written
    float scale = 1;           // put: sum * scale
    void* gated = nullptr;     // gate: silu(even unit) * odd unit, bf16 or fp32
    std::size_t gated_stride = 0;
    bool narrow = false;       // gate: to bf16
};

inline F32x16 silu(F32x16 x) { return x / (splat(1.0f) + exp(splat(0.0f) - x)); }

inline void finish_one(const End& end, int row, int unit, F32x16 sum) {
    float* y = end.y + row * end.stride + std::size_t(unit) * LANES;
    int left = end.columns - unit * LANES;
    if (end.kind == End::put) {
        sum = sum * splat(end.scale);
        if (left >= LANES) {
            store(y, sum);
        } else {
            float last[LANES];
            store(last, sum);
            for (int i = 0; i < left; ++i) y[i] = last[i];
        }
    } else if (end.kind == End::swish) {
        store(y, load(y) + silu(sum));
    } else {
        store(y, fma(sum, splat(end.scale), load(y)));
    }
}

template <int C>
inline void finish(const End& end, const float* bias, int row, int unit, F32x16* sums) {
    for (int c = 0; bias && c < C; ++c) sums[c] = sums[c] + load(bias + (unit + c) * LANES);
    if (end.kind == End::gate) {
        const std::size_t at = row * end.gated_stride + std::size_t(unit / 2) * LANES;
        for (int c = 0; c + 1 < C; c += 2) {
            const F32x16 gated = silu(sums[c]) * sums[c + 1];
            if (end.narrow)
                store(static_cast<bf16*>(end.gated) + at + c / 2 * LANES, gated);
            else
                store(static_cast<float*>(end.gated) + at + c / 2 * LANES, gated);
        }
        return;
    }
    for (int c = 0; c < C; ++c) finish_one(end, row, unit + c, sums[c]);
}

// Bytes between what is read and what is asked for, to be in the second-level cache by then. The
// hardware stops at the end of a page, and the first-level cache waits for few lines at a time.
constexpr int AHEAD = 1 << 16;

// R rows by C units, as many of them side by side as registers hold sums. The order of a sum is
// that of its inputs, for every R and C.
template <class T, int R, int C>
inline void block(const Matrix<T>& m, int unit, const T* x, std::size_t stride, int row,
                  const End& end) {
    constexpr int side = R * C > MAX_SUMS ? 1 : C;
    constexpr int pair = PER_LANE<T>, wanted = AHEAD / side / 64 * pair;
    const T* x0 = x + row * stride;
    const std::size_t size = m.unit_size();
    const int ahead = wanted < m.inputs ? wanted : m.inputs;
    F32x16 all[R][C];
    for (int first = 0; first < C; first += side) {
        const T* w = m.data.data() + (unit + first) * size;
        F32x16 sums[R][side];
        for (auto& line : sums)
            for (auto& sum : line) sum = splat(0.0f);
        auto add = [&](int from, int to, std::size_t further) {
            for (int k = from; k < to; k += pair) {
                decltype(load_pairs(w)) weights[side];
                for (int c = 0; c < side; ++c) {
                    const T* at = w + c * size + std::size_t(k) * LANES;
                    weights[c] = load_pairs(at);
                    __builtin_prefetch(at + further, 0, 2);
                }
                for (int r = 0; r < R; ++r) {
                    auto value = splat_pair(x0 + r * stride + k);
                    for (int c = 0; c < side; ++c) sums[r][c] = dot(sums[r][c], weights[c], value);
                }
            }
        };
        // Behind a unit's last inputs stand the first of the next units.
        add(0, m.inputs - ahead, std::size_t(ahead) * LANES);
        add(m.inputs - ahead, m.inputs, std::size_t(ahead) * LANES + (side - 1) * size);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < side; ++c) all[r][first + c] = sums[r][c];
    }
    for (int r = 0; r < R; ++r) finish<C>(end, m.bias.data(), row + r, unit, all[r]);
}

// Units [first, last) for R rows, as many side by side as registers hold; those of a gate go in
// pairs.
template <class T, int R, int C>
inline void units(const Matrix<T>& m, int first, int last, const T* x, std::size_t stride, int row,
                  const End& end) {
    for (; last - first >= C; first += C) block<T, R, C>(m, first, x, stride, row, end);
    if constexpr (C > 1) units<T, R, C / 2>(m, first, last, x, stride, row, end);
}

constexpr int width(int rows) {
    int c = 8;
    while (c > 2 && rows * c > MAX_SUMS) c /= 2;
    return c;
}

template <class T, int R>
inline void tile(const Matrix<T>& m, int first, int last, const T* x, std::size_t stride, int row,
                 int rows, const End& end) {
    if (rows == R) {
        units<T, R, width(R)>(m, first, last, x, stride, row, end);
        return;
    }
    if constexpr (R > 1) tile<T, R - 1>(m, first, last, x, stride, row, rows, end);
}

// Bytes of units that stay in the second-level cache while all rows pass by.
constexpr std::size_t NEAR = 1 << 18;

// Calls work(first unit, last, first row, count) for all units and all of many rows, `most` rows at
// a time: as many units as stay near, and while some rows are worked on, the next `most` of `size`
// bytes each at `x` are asked for.
template <class Tile>
void pass_by(int first, int last, std::size_t unit_bytes, const void* x, std::size_t size, int rows,
             int most, Tile work) {
    int few = int(NEAR / unit_bytes) & ~1;  // a gate's units go in pairs
    few = few < 2 ? 2 : few;
    for (int unit = first; unit < last; unit += few) {
        const int stop = unit + few < last ? unit + few : last;
        for (int row = 0; row < rows; row += most) {
            const int next = row + most < rows ? row + most : 0;
            const int count = rows - row < most ? rows - row : most;
            const int ahead = rows - next < most ? rows - next : most;
            const char* from = static_cast<const char*>(x) + next * size;
            for (std::size_t i = 0; i < ahead * size; i += 64) __builtin_prefetch(from + i, 0, 2);
            work(unit, stop, row, count);
        }
    }
}

// y[row, outputs of units first..last) for all rows; x [rows, stride], zero behind its inputs.
template <class T>
void product(const Matrix<T>& m, int first, int last, const T* x, std::size_t stride, int rows,
             const End& end) {
    constexpr int most = MOST_ROWS<T>;
    if (rows <= most) {
        tile<T, most>(m, first, last, x, stride, 0, rows, end);
        return;
    }
    pass_by(first, last, m.unit_size() * sizeof(T), x, stride * sizeof(T), rows, most,
            [&](int unit, int stop, int row, int count) {
                tile<T, most>(m, unit, stop, x, stride, row, count, end);
            });
}

}  // namespace outrider
