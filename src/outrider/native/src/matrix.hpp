// Matrices packed for products.
//
// A matrix [out, in] is packed in units of 16 outputs: [in / pair][16 outputs][pair], zeros behind
// the last output and behind the last input (padded to 32).
#pragma once

#include <cstddef>

#include "memory.hpp"
#include "numbers.hpp"

namespace outrider {

constexpr int IN_PAD = 32;  // inputs, and with them the strides of activations

// A stride of at least `width`, itself a multiple of IN_PAD: rows a power of two apart would share
// few of the cache's sets.
constexpr int spread_stride(int width) { return width / IN_PAD % 2 ? width : width + IN_PAD; }

template <class T>
struct Matrix {
    Memory<T> data;
    Memory<float> bias;  // [units * 16] or empty
    int units = 0;
    int inputs = 0;  // padded

    std::size_t unit_size() const { return std::size_t(inputs) * LANES; }
    const T* at(int unit) const { return data.data() + unit * unit_size(); }
    bool empty() const { return units == 0; }
    std::size_t bytes() const { return data.bytes() + bias.bytes(); }
};

// One unit of outputs from `count` <= 16 rows of [., in], `stride` apart.
template <class T>
void pack_unit(T* to, const T* from, std::size_t stride, int count, int in) {
    constexpr int pair = PER_LANE<T>;
    for (int lane = 0; lane < count; ++lane)
        for (int k = 0; k < in; ++k)
            to[std::size_t(k / pair) * LANES * pair + lane * pair + k % pair] =
                from[lane * stride + k];
}

// Copies a row of a matrix of one part to another as wide.
template <class T>
void copy_row(Matrix<T>& to, int place, const Matrix<T>& from, int row) {
    constexpr int pair = PER_LANE<T>;
    T* out = to.data.data() + place / LANES * to.unit_size() + place % LANES * pair;
    const T* in = from.at(row / LANES) + row % LANES * pair;
    for (std::size_t i = 0; i < from.unit_size(); i += LANES * pair)
        for (int k = 0; k < pair; ++k) out[i + k] = in[i + k];
    if (from.bias.size()) to.bias.data()[place] = from.bias.data()[row];
}

// A row of a matrix of one part: `in` numbers.
template <class T>
void unpack_row(const Matrix<T>& m, int row, T* to, int in) {
    constexpr int pair = PER_LANE<T>;
    const T* from = m.data.data() + row / LANES * m.unit_size() + row % LANES * pair;
    for (int k = 0; k < in; ++k) to[k] = from[std::size_t(k / pair) * LANES * pair + k % pair];
}

}  // namespace outrider
