// Products of bf16 on AMX: sixteen rows cost what one costs, and memory sets the speed.
//
// The packed units are what a tile wants: 16 lines of 16 outputs' pairs of inputs. A tile's sums
// are taken row by row, in an order of its own (hence an instruction set of its own), which is the
// same for every number of rows and units.
#pragma once

#include "fetch.hpp"
#include "product.hpp"

#if defined(__AMX_BF16__)

namespace outrider {

constexpr int TILE_ROWS = 16;
constexpr int TILE_INPUTS = 32;

// Tiles 0 to 3 hold sums, 4 and 5 rows or a unit's weights, 6 and 7 weights.
struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t lines[16] = {};

    explicit TileConfig(int rows) {
        for (int i = 0; i < 8; ++i) {
            bytes[i] = 64;
            lines[i] = i < 5 ? rows : TILE_ROWS;
        }
    }
};

// The weights of a tile further on: a line of it each.
inline void fetch_tile(const bf16* w) {
    for (int i = 0; i < 16; ++i) __builtin_prefetch(w + i * 32);
}

template <int C>
inline void finish_tiles(const Matrix<bf16>& m, const float (*sums)[TILE_ROWS * LANES], int unit,
                         int row, int rows, const Epilogue& epilogue) {
    for (int r = 0; r < rows; ++r) {
        F32x16 line[C];
        for (int c = 0; c < C; ++c) line[c] = load(sums[c] + r * LANES);
        finish<C>(epilogue, m.bias.data(), row + r, 1, unit, &line);
    }
}

// Up to 16 rows by `count` of 1, 2 or 4 units.
inline void row_of_tiles(const Matrix<bf16>& m, int unit, int count, const bf16* x,
                         std::size_t stride, int rows, const Epilogue& epilogue) {
    alignas(64) float sums[4][TILE_ROWS * LANES];
    constexpr int ahead = 2 * TILE_INPUTS;
    const std::size_t size = m.unit_size();
    const bf16* w = m.data.data() + unit * size;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < m.inputs; k += TILE_INPUTS, w += TILE_INPUTS * LANES) {
        _tile_loadd(4, x + k, stride * sizeof(bf16));
        // Behind a unit's last inputs stand the first of the next `count` units.
        const std::size_t next = k + ahead < m.inputs ? 0 : (count - 1) * size;
        for (int c = 0; c < count; ++c) fetch_tile(w + c * size + ahead * LANES + next);
        _tile_loadd(5, w, 64);
        _tile_dpbf16ps(0, 4, 5);
        if (count == 1) continue;
        _tile_loadd(6, w + size, 64);
        _tile_dpbf16ps(1, 4, 6);
        if (count == 2) continue;
        _tile_loadd(7, w + 2 * size, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, w + 3 * size, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    if (count == 4)
        finish_tiles<4>(m, sums, unit, 0, rows, epilogue);
    else if (count == 2)
        finish_tiles<2>(m, sums, unit, 0, rows, epilogue);
    else
        finish_tiles<1>(m, sums, unit, 0, rows, epilogue);
}

// Inputs of a step: of two units' weights and 32 rows as many as the first-level cache holds.
constexpr int STEP_INPUTS = 256;
constexpr int STEP_ROWS = 256;  // whose sums wait for the next step

// What a step's sums are added to: tiles of 16 rows, of each its two units'.
struct Sums16 {
    alignas(64) float tiles[STEP_ROWS / TILE_ROWS][2][TILE_ROWS * LANES];
};

// R tiles of rows by C units over `inputs`, added to `sums` unless these are the first inputs.
template <int R, int C>
inline void step_of_tiles(float (*sums)[2][TILE_ROWS * LANES], bool first, const bf16* w,
                          std::size_t size, const bf16* x, std::size_t stride, int inputs,
                          Fetch<2>& fetch, int share) {
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums[0][0], 64);
        if constexpr (C > 1) _tile_loadd(1, sums[0][1], 64);
        if constexpr (R > 1) _tile_loadd(2, sums[1][0], 64);
        if constexpr (R > 1 && C > 1) _tile_loadd(3, sums[1][1], 64);
    }
    for (int k = 0; k < inputs; k += TILE_INPUTS, w += TILE_INPUTS * LANES) {
        fetch(share);
        _tile_loadd(4, x + k, stride * sizeof(bf16));
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (C > 1) {
            _tile_loadd(7, w + size, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (R > 1) {
            _tile_loadd(5, x + TILE_ROWS * stride + k, stride * sizeof(bf16));
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (C > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    if constexpr (C > 1) _tile_stored(1, sums[0][1], 64);
    if constexpr (R > 1) _tile_stored(2, sums[1][0], 64);
    if constexpr (R > 1 && C > 1) _tile_stored(3, sums[1][1], 64);
}

// Up to STEP_ROWS rows by one or two units. Every tile that is loaded serves twice, and a step's
// weights stay near while all rows pass by. Sums that wait in memory are none the less exact.
template <int C>
inline void rows_of_tiles(const Matrix<bf16>& m, int unit, const bf16* x, std::size_t stride,
                          int row, int rows, const Epilogue& epilogue, Sums16& room) {
    const std::size_t size = m.unit_size();
    const bf16* w = m.data.data() + unit * size;
    // Rows that pass by once keep nothing near: one step, whose own weights are asked for.
    const bool once = rows <= 2 * TILE_ROWS;
    const int longest = once ? m.inputs : STEP_INPUTS;
    for (int k = 0; k < m.inputs; k += longest) {
        const int left = m.inputs - k, inputs = left < longest ? left : longest;
        const bf16* from = w + std::size_t(k) * LANES;
        // Behind a unit's last inputs stand the first of the next units.
        const bf16* next = once            ? from + 4 * TILE_INPUTS * LANES
                           : inputs < left ? from + STEP_INPUTS * LANES
                                           : w + C * size;
        Fetch<2> fetch(inputs * LANES * int(sizeof(bf16)) / 64);
        for (int c = 0; c < C; ++c) fetch.add(next + c * size);
        const int turns = (rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS) * (inputs / TILE_INPUTS);
        const int share = (fetch.lines() + turns - 1) / turns;
        for (int r = 0; r < rows; r += 2 * TILE_ROWS) {
            const bf16* lines = x + (row + r) * stride + k;
            auto* sums = room.tiles + r / TILE_ROWS;
            if (rows - r > TILE_ROWS)
                step_of_tiles<2, C>(sums, k == 0, from, size, lines, stride, inputs, fetch, share);
            else
                step_of_tiles<1, C>(sums, k == 0, from, size, lines, stride, inputs, fetch, share);
        }
    }
    for (int r = 0; r < rows; r += TILE_ROWS)
        finish_tiles<C>(m, room.tiles[r / TILE_ROWS], unit, row + r,
                        rows - r < TILE_ROWS ? rows - r : TILE_ROWS, epilogue);
}

// As `product`; x has room for a multiple of 16 rows, of which those behind `rows` do not matter.
inline void product(const Matrix<bf16>& m, int first, int last, const bf16* x, std::size_t stride,
                    int rows, const Epilogue& epilogue) {
    const TileConfig config(rows < TILE_ROWS ? rows : TILE_ROWS);
    // The compiler does not know what the tile instructions read.
    asm volatile("" ::"r"(&config), "r"(x) : "memory");
    _tile_loadconfig(&config);
    if (rows <= TILE_ROWS) {
        while (first < last) {
            const int count = last - first >= 4 ? 4 : last - first >= 2 ? 2 : 1;
            row_of_tiles(m, first, count, x, stride, rows, epilogue);
            first += count;
        }
        return _tile_release();
    }
    Sums16 room;
    for (int row = 0; row < rows; row += STEP_ROWS) {
        const int count = rows - row < STEP_ROWS ? rows - row : STEP_ROWS;
        int unit = first;
        for (; last - unit >= 2; unit += 2)
            rows_of_tiles<2>(m, unit, x, stride, row, count, epilogue, room);
        if (unit < last) rows_of_tiles<1>(m, unit, x, stride, row, count, epilogue, room);
    }
    _tile_release();
}

}  // namespace outrider

#endif
