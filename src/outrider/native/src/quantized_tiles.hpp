// Products with matrices of few bits on AMX: the integers of quantized.hpp, eight rows at once.
//
// A tile's sixteen lines are eight rows' upper and lower halves of their digits. The sums over a
// block are whole numbers and the steps from block to block those of the kernel without tiles:
// both give the same bits, and rows are served by whichever is faster.
#pragma once

#include "quantized_halves.hpp"
#include "quantized_lanes.hpp"
#include "quantized_many.hpp"

namespace outrider {

#if defined(__AMX_INT8__)

constexpr int DIGIT_LINES = 8;     // rows of a tile
constexpr int DIGIT_INPUTS = 64;   // inputs of a tile
constexpr int TILES_AHEAD = 2048;  // bytes between what is read and what is asked for
// Rows from which tiles are the faster. Over 12 layers of 768 in groups of 32 with 4 bits, lanes
// take 0.7 of the tiles' time for one row, 0.9 for two, 1 for three and 1.5 for eight; in groups of
// 128 it is 1.8 for eight.
constexpr int FEWEST_TILED = 3;
// Rows from which 4-bit codes are made bytes once rather than for every eight rows: that takes as
// long as it saves at about 40.
constexpr int UNPACKED_ROWS = 4 * DIGIT_LINES;

// Tile 0 holds sums, 4 and 5 rows, 6 and 7 weights. A block of 32 fills half of the inputs.
struct alignas(64) DigitTiles {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t lines[16] = {};

    DigitTiles(int rows, int inputs) {
        for (int i = 0; i < 8; ++i) {
            bytes[i] = i == 4 || i == 5 ? inputs : 64;
            lines[i] = i < 6 ? 2 * rows : inputs / 4;
        }
    }
};

// The codes of `inputs` inputs as bytes.
template <int BITS>
inline void unpack(std::uint8_t* to, const std::uint8_t* from, const std::uint8_t* map, int inputs,
                   std::ptrdiff_t further) {
    constexpr int lines = lines_of(BITS);
    for (int k = 0; k < inputs; k += CELL, from += lines * 64, to += CELL * LANES)
        each_step<0, 8>([&](auto p) __attribute__((always_inline)) {
            if (p < lines) __builtin_prefetch(from + p * 64 + further);
            _mm512_store_si512(to + p * 64, ByteCodes::of<BITS, p>(from, map).v);
        });
}

// Up to 8 rows by C of 1, 2 or 4 units, whose codes stand at `w` and at distances of `size` behind
// it. Of every unit the next block's codes are made ready, and the last block's sums are taken up,
// while the tiles are busy: each of the three has to wait now and then.
template <int BITS, int C>
struct DigitRun {
    const Packed& m;
    const int unit, rows;
    const std::uint8_t* const w;
    const std::size_t size;
    const int blocks = m.blocks(), half = m.half();
    const bool halves = m.block > DIGIT_INPUTS;
    const std::size_t bytes = std::size_t(m.block) / CELL * lines_of(BITS) * 64;
    const Lookahead ahead{m, TILES_AHEAD, int(bytes), blocks, C};
    const std::int8_t* const digits;
    const BlockSummary* const parts;
    alignas(64) std::int32_t ints[C][16 * LANES];
    alignas(64) std::uint8_t codes[C][BITS == 8 ? 1 : LONGEST_BLOCK * LANES];
    alignas(64) F32x16 sums[C][DIGIT_LINES];
    alignas(16) std::uint8_t middle[LANES];

    DigitRun(const Packed& m, int unit, const std::uint8_t* w, std::size_t size, const Digits& x,
             int row, int rows)
        : m(m),
          unit(unit),
          rows(rows),
          w(w),
          size(size),
          digits(x.digits + std::size_t(row) * 2 * half),
          parts(x.parts + std::size_t(row) * blocks) {
        std::memset(middle, m.zero, LANES);
        for (auto& line : sums)
            for (auto& sum : line) sum = splat(0.0f);
    }

    void prepare(int b, int c) {
        const std::uint8_t* from = w + c * size + b * bytes;
        const std::ptrdiff_t further = ahead.codes(b, size);
        if constexpr (BITS != 8)
            unpack<BITS>(codes[c], from, m.map, m.block, further);
        else
            for (std::size_t k = 0; k < bytes; k += 64) __builtin_prefetch(from + k + further);
    }

    template <int c>
    void multiply(int b) {
        const std::uint8_t* from = BITS != 8 ? codes[c] : w + c * size + b * bytes;
        asm volatile("" ::: "memory");  // the compiler does not know what tile instructions read
        _tile_zero(0);
        _tile_loadd(6, from, 64);
        _tile_dpbsud(0, 4, 6);
        if (halves) {
            _tile_loadd(7, from + DIGIT_INPUTS * LANES, 64);
            _tile_dpbsud(0, 5, 7);
        }
        asm volatile("" ::: "memory");
    }

    void take_up(int b, int c) {
        const std::size_t at = (std::size_t(unit + c) * m.groups + b / m.split) * LANES;
        const Ints zeros = load_zeros(m.zeros.data() ? m.zeros.data() + at : middle);
        const LaneScales lanes = scales_of(m, unit + c, b / m.split);
        const std::int32_t* line = ints[c];
        const BlockSummary* part = parts + b;
        for (int r = 0; r < rows; ++r, line += 2 * LANES, part += blocks) {
            const __m512i high = _mm512_slli_epi32(_mm512_load_si512(line), 8);
            const __m512i low = _mm512_load_si512(line + LANES);
            const Ints all = {
                _mm512_dpwssd_epi32(_mm512_add_epi32(high, low), zeros.v, repeated(&part->low))};
            sums[c][r] = fma(to_float(all), lanes.scale * splat(part->scale), sums[c][r]);
            if (m.lessened) sums[c][r] = fma(lanes.less, splat(part->minus), sums[c][r]);
        }
    }

    template <int c>
    void turn(int b) {
        if constexpr (c < C) {
            multiply<c>(b);
            if (b) take_up(b - 1, c);
            if (b + 1 < blocks) prepare(b + 1, c);
            _tile_stored(0, ints[c], 64);
            asm volatile("" ::: "memory");
        }
    }

    void run() {
        for (int c = 0; c < C; ++c) prepare(0, c);
        for (int b = 0; b < blocks; ++b) {
            _tile_loadd(4, digits + b * m.block, half);
            if (halves) _tile_loadd(5, digits + b * m.block + DIGIT_INPUTS, half);
            turn<0>(b);
            turn<1>(b);
            turn<2>(b);
            turn<3>(b);
        }
        for (int c = 0; c < C; ++c) take_up(blocks - 1, c);
    }
};

template <int BITS, int C>
void digit_tiles(const Packed& m, int unit, const std::uint8_t* w, std::size_t size,
                 const Digits& x, int row, int rows, const Epilogue& epilogue) {
    DigitRun<BITS, C> work(m, unit, w, size, x, row, rows);
    work.run();
    for (int r = 0; r < rows; ++r) {
        F32x16 line[C];
        for (int c = 0; c < C; ++c) line[c] = work.sums[c][r] * splat(m.factor);
        finish<C>(epilogue, m.bias.data(), row + r, 1, unit, &line);
    }
}

// All rows by C units, eight rows after eight.
template <int BITS, int C>
void digit_rows(const Packed& m, int unit, const Digits& x, int rows, const Epilogue& epilogue,
                int& loaded) {
    const std::uint8_t* w = m.codes.data() + unit * m.unit_size();
    const bool bytes = BITS == 8 || rows > UNPACKED_ROWS;
    std::size_t size = m.unit_size();
    if constexpr (BITS != 8)
        if (bytes) {  // made bytes once for all rows
            const std::size_t wide = std::size_t(m.width()) * LANES;
            thread_local Memory<std::uint8_t> room;
            std::uint8_t* to = room.reserve(C * wide);
            unpack<BITS>(to, w, m.map, C * m.width(), C * std::ptrdiff_t(size));
            w = to;
            size = wide;
        }
    for (int row = 0; row < rows; row += DIGIT_LINES) {
        const int lines = rows - row < DIGIT_LINES ? rows - row : DIGIT_LINES;
        if (lines != loaded) {
            const DigitTiles config(lines, m.block < DIGIT_INPUTS ? m.block : DIGIT_INPUTS);
            asm volatile("" ::"r"(&config) : "memory");
            _tile_loadconfig(&config);
            loaded = lines;
        }
        if (bytes)
            digit_tiles<8, C>(m, unit, w, size, x, row, lines, epilogue);
        else
            digit_tiles<BITS, C>(m, unit, w, size, x, row, lines, epilogue);
    }
}

// Tiles are given back, even where there is no memory for unpacked codes.
struct Tiles {
    ~Tiles() { _tile_release(); }
};

template <int BITS>
void product_in_tiles(const Packed& m, int first, int last, const Digits& x, int rows,
                      const Epilogue& epilogue) {
    const Tiles tiles;
    int loaded = 0;
    for (; last - first >= 4; first += 4) digit_rows<BITS, 4>(m, first, x, rows, epilogue, loaded);
    for (; last - first >= 2; first += 2) digit_rows<BITS, 2>(m, first, x, rows, epilogue, loaded);
    if (first < last) digit_rows<BITS, 1>(m, first, x, rows, epilogue, loaded);
}

#endif

// Whether rows pass by a matrix in bundles.
inline bool in_bundles([[maybe_unused]] const Packed& m, [[maybe_unused]] int rows) {
#if defined(__AMX_INT8__)
    return halved(m.bits) && rows >= FEWEST_BUNDLED;
#elif defined(__AVX512VNNI__)
    return rows >= FEWEST_BUNDLED;
#else
    return false;
#endif
}

// Rows whose digits are made together, of `rows`.
inline int digitised_together([[maybe_unused]] const Packed& m, [[maybe_unused]] int rows,
                              [[maybe_unused]] bool coarse) {
#if defined(__AVX512VNNI__)
    if (in_bundles(m, rows))
        return coarse ? rows_of_bundle<Short<8>>(rows) : rows_of_bundle<Sums>(rows);
#endif
    return 1;
}

// Rows [first, last) of `rows` for a product of all of them; whole groups of those that are made
// together, where they do not end with the last.
template <class T>
void digitise(const Packed& m, const T* x, std::size_t stride, int first, int last,
              [[maybe_unused]] int rows, Digits to) {
#if defined(__AVX512VNNI__)
    if (in_bundles(m, rows))
        return to.coarse ? fill_bundles<Short<8>>(m, x, stride, first, last, rows, to)
                         : fill_bundles<Sums>(m, x, stride, first, last, rows, to);
#endif
    digitise(m, x, stride, first, last, to);
}

// As `product`, of codes of BITS. Blocks of half a cell would use a quarter of a tile.
template <int BITS>
void product_of_codes(const Packed& m, int first, int last, const Digits& x, int rows,
                      const Epilogue& epilogue) {
#if defined(__AVX512VNNI__)
    if (in_bundles(m, rows))
        return x.coarse ? product_of_bundles<BITS, Short<BITS>>(m, first, last, x, rows, epilogue)
                        : product_of_bundles<BITS, Sums>(m, first, last, x, rows, epilogue);
#endif
#if defined(__AMX_INT8__)
    if constexpr (!halved(BITS))
        if (rows >= FEWEST_TILED) return product_in_tiles<BITS>(m, first, last, x, rows, epilogue);
#endif
    x.coarse ? product_in_lanes<BITS, Short<BITS>>(m, first, last, x, rows, epilogue)
             : product_in_lanes<BITS, Sums>(m, first, last, x, rows, epilogue);
}

// y[row, outputs of units first..last) for all rows.
inline void product(const Packed& m, int first, int last, const Digits& x, int rows,
                    const Epilogue& epilogue) {
    switch (m.bits) {
        case MAPPED:
            return product_of_codes<MAPPED>(m, first, last, x, rows, epilogue);
        case 2:
            return product_of_codes<2>(m, first, last, x, rows, epilogue);
        case 3:
            return product_of_codes<3>(m, first, last, x, rows, epilogue);
        case 4:
            return product_of_codes<4>(m, first, last, x, rows, epilogue);
        case 5:
            return product_of_codes<5>(m, first, last, x, rows, epilogue);
        case 6:
            return product_of_codes<6>(m, first, last, x, rows, epilogue);
        default:
            return product_of_codes<8>(m, first, last, x, rows, epilogue);
    }
}

}  // namespace outrider
