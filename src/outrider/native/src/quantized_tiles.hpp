// Products with matrices of 4 or 8 bits on AMX: the integers of quantized.hpp, eight rows at once.
//
// A tile's sixteen lines are eight rows' upper and lower halves of their digits. The sums over a
// block are whole numbers and the steps from block to block those of the kernel without tiles:
// both give the same bits, and rows are served by whichever is faster.
#pragma once

#include "quantized.hpp"

namespace outrider {

#if defined(__AMX_INT8__)

constexpr int DIGIT_LINES = 8;     // rows of a tile
constexpr int DIGIT_INPUTS = 64;   // inputs of a tile
constexpr int FEWEST_TILED = 3;

// Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights. A block of 32 fills half of the inputs.
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

// A block's 4-bit codes as bytes.
inline void unpack(std::uint8_t* to, const std::uint8_t* from, int block) {
    for (int k = 0; k < block; k += 8, from += 64, to += 128) {
        __builtin_prefetch(from + AHEAD);
        const Codes<4> codes(from);
        _mm512_store_si512(to, codes.first);
        _mm512_store_si512(to + 64, codes.second);
    }
}

// Up to 8 rows by C of 1, 2 or 4 units. The codes of one block are made ready and the sums of
// another are taken up while the tiles of the one between are busy.
template <int BITS, int C>
struct DigitRun {
    const Packed& m;
    const int unit, rows;
    const int blocks = m.blocks(), width = m.width();
    const int inputs = m.block < DIGIT_INPUTS ? m.block : DIGIT_INPUTS;
    const std::size_t size = m.unit_size();
    const std::size_t block_bytes = std::size_t(m.block) * LANES * BITS / 8;
    const std::uint8_t* const w = m.codes.data() + unit * size;
    const std::int8_t* const digits;
    const Part* const parts;
    alignas(64) std::int32_t ints[2][C][16 * LANES];
    alignas(64) std::uint8_t bytes[2][C][BITS == 4 ? LONGEST_BLOCK * LANES : 1];
    alignas(64) F16 sums[C][DIGIT_LINES];
    alignas(16) std::uint8_t middle[LANES];

    DigitRun(const Packed& m, int unit, const Digits& x, int row, int rows)
        : m(m), unit(unit), rows(rows), digits(x.digits + std::size_t(row) * 2 * width),
          parts(x.parts + std::size_t(row) * blocks) {
        std::memset(middle, 1 << (BITS - 1), LANES);
        for (auto& line : sums)
            for (auto& sum : line) sum = splat(0.0f);
    }

    void prepare(int b) {
        for (int c = 0; c < C; ++c) {
            const std::uint8_t* from = w + c * size + b * block_bytes;
            if constexpr (BITS == 4)
                unpack(bytes[b % 2][c], from, m.block);
            else
                for (std::size_t k = 0; k < block_bytes; k += 64)
                    __builtin_prefetch(from + k + AHEAD);
        }
    }

    const std::uint8_t* codes(int b, int c) const {
        return BITS == 4 ? bytes[b % 2][c] : w + c * size + b * block_bytes;
    }

    void multiply(int b) {
        asm volatile("" ::: "memory");  // the compiler does not know what tile instructions read
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < m.block; k += inputs) {
            _tile_loadd(4, digits + b * m.block + k, width);
            _tile_loadd(6, codes(b, 0) + k * LANES, 64);
            _tile_dpbsud(0, 4, 6);
            if constexpr (C > 1) {
                _tile_loadd(7, codes(b, 1) + k * LANES, 64);
                _tile_dpbsud(1, 4, 7);
            }
            if constexpr (C > 2) {
                _tile_loadd(6, codes(b, 2) + k * LANES, 64);
                _tile_dpbsud(2, 4, 6);
                _tile_loadd(7, codes(b, 3) + k * LANES, 64);
                _tile_dpbsud(3, 4, 7);
            }
        }
        _tile_stored(0, ints[b % 2][0], 64);
        if constexpr (C > 1) _tile_stored(1, ints[b % 2][1], 64);
        if constexpr (C > 2) {
            _tile_stored(2, ints[b % 2][2], 64);
            _tile_stored(3, ints[b % 2][3], 64);
        }
        asm volatile("" ::: "memory");
    }

    void take_up(int b) {
        const int g = b / m.split;
        for (int c = 0; c < C; ++c) {
            const std::size_t at = (std::size_t(unit + c) * m.groups + g) * LANES;
            const Ints zeros = load_zeros(m.zeros.data() ? m.zeros.data() + at : middle);
            const F16 scale = load_half(m.scales.data() + at);
            const std::int32_t* line = ints[b % 2][c];
            for (int r = 0; r < rows; ++r, line += 2 * LANES) {
                const Part& part = parts[std::size_t(r) * blocks + b];
                const __m512i high = _mm512_slli_epi32(_mm512_load_si512(line), 8);
                const __m512i low = _mm512_load_si512(line + LANES);
                const Ints all = {_mm512_dpwssd_epi32(_mm512_add_epi32(high, low), zeros.v,
                                                      repeated(&part.low))};
                sums[c][r] = fma(to_float(all), scale * splat(part.scale), sums[c][r]);
            }
        }
    }

    void run() {
        prepare(0);
        for (int b = 0; b < blocks; ++b) {
            if (b + 1 < blocks) prepare(b + 1);
            multiply(b);
            if (b) take_up(b - 1);
        }
        take_up(blocks - 1);
    }
};

template <int BITS, int C>
void digit_tiles(const Packed& m, int unit, const Digits& x, int row, int rows, const End& end) {
    DigitRun<BITS, C> work(m, unit, x, row, rows);
    work.run();
    for (int r = 0; r < rows; ++r) {
        F16 line[C];
        for (int c = 0; c < C; ++c) line[c] = work.sums[c][r] * splat(m.factor);
        finish<C>(end, m.bias.data(), row + r, unit, line);
    }
}

template <int BITS>
void product_in_tiles(const Packed& m, int first, int last, const Digits& x, int rows,
                      const End& end) {
    auto load = [&](int lines) {
        const DigitTiles config(lines, m.block < DIGIT_INPUTS ? m.block : DIGIT_INPUTS);
        asm volatile("" ::"r"(&config) : "memory");
        _tile_loadconfig(&config);
    };
    int loaded = 0;
    while (first < last) {
        const int count = last - first >= 4 ? 4 : last - first >= 2 ? 2 : 1;
        for (int row = 0; row < rows; row += DIGIT_LINES) {
            const int lines = rows - row < DIGIT_LINES ? rows - row : DIGIT_LINES;
            if (lines != loaded) load(loaded = lines);
            if (count == 4)
                digit_tiles<BITS, 4>(m, first, x, row, lines, end);
            else if (count == 2)
                digit_tiles<BITS, 2>(m, first, x, row, lines, end);
            else
                digit_tiles<BITS, 1>(m, first, x, row, lines, end);
        }
        first += count;
    }
    _tile_release();
}

#endif

inline void product(const Packed& m, int first, int last, const Digits& x, int rows,
                    const End& end) {
#if defined(__AMX_INT8__)
    if (rows >= FEWEST_TILED) {
        if (m.bits == 4)
            product_in_tiles<4>(m, first, last, x, rows, end);
        else
            product_in_tiles<8>(m, first, last, x, rows, end);
        return;
    }
#endif
    if (m.bits == 4)
        product_in_lanes<4>(m, first, last, x, rows, end);
    else
        product_in_lanes<8>(m, first, last, x, rows, end);
}

}  // namespace outrider
