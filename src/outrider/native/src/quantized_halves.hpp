// Products with matrices of few bits by AVX2: a unit's outputs pass by in two halves, since sixteen
// registers do not hold the sums of all.
#pragma once

#include "quantized.hpp"

#if defined(IN_HALVES)

namespace outrider {

constexpr int MOST_HALVED = 6;  // rows that pass by together
// Rows beside which scales are asked for, too: with fewer, memory has no time for it.
constexpr int ASKS_SCALES = 4;

// The sums of R rows by one unit, to y [R], each `stride` behind the last. Both halves pass by side
// by side, so that digits are read once for both. A sum takes the steps of `digit_block`, so that
// both give the same bits.
template <int BITS, class Sum, int R>
void half_block(const Packed& m, int unit, const Digits& x, int row, const Epilogue& epilogue,
                F32x16* y, int stride) {
    constexpr int held = halved(BITS) ? 2 : 1, steps = 8 / held, lines = lines_of(BITS);
    const int half = m.half(), blocks = m.blocks(), inputs = m.block * held;
    const std::size_t bytes = std::size_t(inputs) / CELL * lines * 64;
    const std::uint8_t* from = m.codes.data() + unit * m.unit_size();
    const std::uint8_t* records = m.records_of(unit);
    const std::int8_t* digits = x.digits + std::size_t(row) * 2 * half;
    const BlockSummary* parts = x.parts + std::size_t(row) * blocks;
    alignas(16) std::uint8_t middle[LANES];
    std::memset(middle, m.zero, LANES);
    const bool centred = m.zero || m.zeros.data();
    __m256 sums[2][R];
    for (auto& line : sums)
        for (auto& sum : line) sum = _mm256_setzero_ps();
    const Lookahead ahead(m, AHEAD, int(bytes), blocks / held, 1);
    GroupOfBlock<held> at_group(m);
    for (int b = 0; b < blocks; b += held, from += bytes) {
        const int g = at_group.group;
        const std::ptrdiff_t further = ahead.codes(b / held, 0);
        if (R >= ASKS_SCALES) ahead.ask_scales(records, b / held);
        const std::int8_t* line = digits + std::size_t(b) * m.block * Sum::DIGIT;
        each_step<0, held>([&](auto turn) __attribute__((always_inline)) {
            const LaneScales lanes = at_group.scales(records, turn);
            const __m256 scales[2] = {lanes.scale.a, lanes.scale.b};
            const __m256 less[2] = {lanes.less.a, lanes.less.b};
            const std::size_t at = (std::size_t(unit) * m.groups + g + turn) * LANES;
            const std::uint8_t* zeros = m.zeros.data() ? m.zeros.data() + at : middle;
            const BlockSummary* with = parts + b + turn;
            Sum all[2][R];
            if (centred)
                for (int side = 0; side < 2; ++side)
                    for (int r = 0; r < R; ++r)
                        all[side][r] = Sum(load_zeros8(zeros + 8 * side), &with[r * blocks].low);
            const std::uint8_t* cell = from;
            for (int k = 0; k < inputs; k += CELL, cell += lines * 64) {
                if (epilogue.upcoming && !turn) [[unlikely]]
                    (*epilogue.upcoming)(ASKED);
                each_step<turn * steps, steps>([&](auto p) __attribute__((always_inline)) {
                    if (p < lines) __builtin_prefetch(cell + p * 64 + further, 0, 2);
                    each_step<0, Sum::PARTS>([&](auto part) __attribute__((always_inline)) {
                        const __m256i codes[2] = {
                            Sum::template part_of<BITS, p, part>(cell, m.map),
                            Sum::template part_of<BITS, p, part>(cell + 32, m.map)};
#pragma GCC unroll 6
                        for (int r = 0; r < R; ++r)
                            for (int side = 0; side < 2; ++side)
                                all[side][r].template add_part<part>(
                                    codes[side], line + std::size_t(r) * 2 * half, k + 4 * p);
                    });
                    if constexpr ((p + 1) % UNSETTLED<BITS> == 0 || p + 1 == turn * steps + steps)
                        for (auto& some : all)
                            for (auto& sum : some) sum.settle();
                });
            }
            for (int r = 0; r < R; ++r) {
                const BlockSummary& of_row = with[r * blocks];
                const __m256 of_all = _mm256_set1_ps(of_row.scale);
                for (int side = 0; side < 2; ++side) {
                    __m256& sum = sums[side][r];
                    const __m256 whole = _mm256_cvtepi32_ps(all[side][r].sum);
                    sum = _mm256_fmadd_ps(whole, _mm256_mul_ps(scales[side], of_all), sum);
                    if (m.lessened)
                        sum = _mm256_fmadd_ps(less[side], _mm256_set1_ps(of_row.minus), sum);
                }
            }
        });
        at_group.next();
    }
    for (int r = 0; r < R; ++r) y[r * stride] = F32x16{sums[0][r], sums[1][r]} * splat(m.factor);
}

// The last rows of a product, no more than R.
template <int BITS, class Sum, int R>
void half_tile(const Packed& m, int first, int last, const Digits& x, int row, int rows,
               const Epilogue& epilogue) {
    if (rows == R) {
        for (int unit = first; unit < last; unit += 2) {
            const int count = last - unit < 2 ? 1 : 2;
            F32x16 sums[R][2];
            for (int c = 0; c < count; ++c)
                half_block<BITS, Sum, R>(m, unit + c, x, row, epilogue, sums[0] + c, 2);
            finish_pair(epilogue, m.bias.data(), row, R, unit, count == 2, sums);
        }
    } else if constexpr (R > 1) {
        half_tile<BITS, Sum, R - 1>(m, first, last, x, row, rows, epilogue);
    }
}

// y[row, outputs of units first..last) for all rows, without tiles.
template <int BITS, class Sum>
void product_in_lanes(const Packed& m, int first, int last, const Digits& x, int rows,
                      const Epilogue& epilogue) {
    const int tiles = tiles_of(rows, MOST_HALVED), few = near_units(m.unit_size());
    for (int unit = first; unit < last; unit += few) {
        const int stop = unit + few < last ? unit + few : last;
        each_tile(rows, tiles, [&](int row, int count) {
            half_tile<BITS, Sum, MOST_HALVED>(m, unit, stop, x, row, count, epilogue);
        });
    }
}

}  // namespace outrider

#endif
