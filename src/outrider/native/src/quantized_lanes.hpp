// Products with matrices of few bits by whole units, in all sets but AVX2, which takes halves.
#pragma once

#include "quantized.hpp"

#if !defined(IN_HALVES)

namespace outrider {

// R rows by C units, by `Sum`s over a block: of all units at once where registers hold them, so
// that memory is read in several streams and digits once for all, else of one after the other.
template <int BITS, class Sum, int R, int C>
void digit_block(const Packed& m, int unit, const Digits& x, int row, const Epilogue& epilogue) {
    // Blocks of a cell, where it holds several, and a block's steps in a cell.
    constexpr int held = halved(BITS) ? 2 : 1, steps = 8 / held, lines = lines_of(BITS);
    // Two sums a row where there are few, so that one need not wait for the other.
    constexpr int each = R <= 2 && C <= 2 ? 2 : 1;
    constexpr int side = R <= 4 && C * R * each * Sum::REGISTERS <= MOST_SUMS ? C : 1;
    const int half = m.half(), blocks = m.blocks(), inputs = m.block * held;
    const std::size_t size = m.unit_size(), bytes = std::size_t(inputs) / CELL * lines * 64;
    const std::uint8_t* w = m.codes.data() + unit * size;
    const std::int8_t* digits = x.digits + std::size_t(row) * 2 * half;
    const BlockSummary* parts = x.parts + std::size_t(row) * blocks;
    alignas(16) std::uint8_t middle[LANES];
    std::memset(middle, m.zero, LANES);
    F32x16 sums[C][R];
    for (auto& line : sums)
        for (auto& sum : line) sum = splat(0.0f);
    const Lookahead ahead(m, AHEAD / C, int(bytes), blocks / held, C);
    GroupOfBlock<held> at_group(m);
    for (int b = 0; b < blocks; b += held) {
        const int g = at_group.group;
        const std::ptrdiff_t further = ahead.codes(b / held, size);
        const std::int8_t* line = digits + std::size_t(b) * m.block * Sum::DIGIT;
        for (int first = 0; first < C; first += side) {
            const std::uint8_t* from = w + first * size + b / held * bytes;
            each_step<0, held>([&](auto turn) __attribute__((always_inline)) {
                Sum all[each][side][R];
                for (int c = 0; c < side; ++c) {
                    const std::size_t at =
                        (std::size_t(unit + first + c) * m.groups + g + turn) * LANES;
                    Ints zeros = load_zeros(m.zeros.data() ? m.zeros.data() + at : middle);
                    if constexpr (requires { Sum::FourCodes::template CENTRE<BITS>; })
                        zeros = zeros + ints(-Sum::FourCodes::template CENTRE<BITS>);
                    for (int i = 0; i < each; ++i)
                        for (int r = 0; r < R; ++r)
                            all[i][c][r] =
                                i ? Sum() : Sum(zeros, &parts[r * blocks + b + turn].low);
                }
                const std::uint8_t* cell = from;
                for (int k = 0; k < inputs; k += CELL, cell += lines * 64) {
                    if (epilogue.upcoming && !turn) [[unlikely]]
                        (*epilogue.upcoming)(ASKED);
                    each_step<turn * steps, steps>([&](auto p) __attribute__((always_inline)) {
                        typename Sum::FourCodes unpacked[side];
                        for (int c = 0; c < side; ++c) {
                            if (p < lines)
                                __builtin_prefetch(cell + c * size + p * 64 + further, 0, 2);
                            unpacked[c] =
                                Sum::FourCodes::template of<BITS, p>(cell + c * size, m.map);
                        }
                        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                            for (int c = 0; c < side; ++c)
                                all[p % each][c][r].add(
                                    unpacked[c], line + std::size_t(r) * 2 * half, half, k + 4 * p);
                        if constexpr ((p + 1) % UNSETTLED<BITS> == 0 ||
                                      p + 1 == turn * steps + steps)
                            for (auto& some : all)
                                for (auto& column : some)
                                    for (auto& sum : column) sum.settle();
                    });
                }
                for (int c = 0; c < side; ++c) {
                    const LaneScales lanes = at_group.scales(m.records_of(unit + first + c), turn);
                    for (int r = 0; r < R; ++r) {
                        const BlockSummary& with = parts[r * blocks + b + turn];
                        const Ints whole = each == 2
                                               ? all[0][c][r].all() + all[each - 1][c][r].all()
                                               : all[0][c][r].all();
                        F32x16& sum = sums[first + c][r];
                        sum = fma(to_float(whole), lanes.scale * splat(with.scale), sum);
                        if (m.lessened) sum = fma(lanes.less, splat(with.minus), sum);
                    }
                }
            });
        }
        at_group.next();
    }
    for (int r = 0; r < R; ++r) {
        F32x16 line[C];
        for (int c = 0; c < C; ++c) line[c] = sums[c][r] * splat(m.factor);
        finish<C>(epilogue, m.bias.data(), row + r, 1, unit, &line);
    }
}

// Whether R rows pass by four units together rather than two: where AVX-512 VNNI has registers for
// the sums of all, of which a unit has several, and, in sets without bundles, beside as many rows
// as a tile has, whose digits are near for four.
template <int BITS, class Sum, int R>
constexpr bool FOUR_UNITS = (R == Sum::ROWS && !requires { Sum::BUNDLE; }) ||
                            (BITS == 8 && DIGIT_BYTES == 1 && R * Sum::REGISTERS > 1 &&
                             4 * R * Sum::REGISTERS <= MOST_SUMS);

template <int BITS, class Sum, int R>
void digit_tile(const Packed& m, int first, int last, const Digits& x, int row, int rows,
                const Epilogue& epilogue) {
    if (rows == R) {
        if constexpr (FOUR_UNITS<BITS, Sum, R>)
            for (; last - first >= 4; first += 4)
                digit_block<BITS, Sum, R, 4>(m, first, x, row, epilogue);
        for (; last - first >= 2; first += 2)
            digit_block<BITS, Sum, R, 2>(m, first, x, row, epilogue);
        // The last of an odd number of units takes its rows one by one: kernels for several would
        // be a third of all that is compiled.
        if (first < last)
            for (int r = 0; r < R; ++r)
                digit_block<BITS, Sum, 1, 1>(m, first, x, row + r, epilogue);
        return;
    }
    if constexpr (R > 1) digit_tile<BITS, Sum, R - 1>(m, first, last, x, row, rows, epilogue);
}

// y[row, outputs of units first..last) for all rows, without tiles.
template <int BITS, class Sum>
void product_in_lanes(const Packed& m, int first, int last, const Digits& x, int rows,
                      const Epilogue& epilogue) {
    if (rows <= Sum::ROWS)
        return digit_tile<BITS, Sum, Sum::ROWS>(m, first, last, x, 0, rows, epilogue);
    const int tiles = tiles_of(rows, Sum::ROWS), few = near_units(m.unit_size());
    for (int unit = first; unit < last; unit += few) {
        const int stop = unit + few < last ? unit + few : last;
        each_tile(rows, tiles, [&](int row, int count) {
            digit_tile<BITS, Sum, Sum::ROWS>(m, unit, stop, x, row, count, epilogue);
        });
    }
}

}  // namespace outrider

#endif
