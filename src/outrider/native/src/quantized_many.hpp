// Products of many rows with matrices of few bits: codes become bytes and scales fp32 once for all
// rows, and one kernel serves every number of bits. A sum takes the steps of `digit_block`, so that
// both give the same bits.
#pragma once

#include "quantized.hpp"

namespace outrider {

// Units made ready for many rows.
struct Ready {
    const std::uint8_t* codes;  // [units][cells][8][16][4]
    const float* scales;        // [units][groups][2][16]: scale and less
    std::size_t size;           // of a unit's codes
};

template <int BITS>
Ready make_ready(const Packed& m, int unit, int count) {
    thread_local Memory<std::uint8_t> code_room;
    thread_local Memory<float> scale_room;
    Ready to = {m.codes.data() + unit * m.unit_size(), nullptr, m.unit_size()};
    if constexpr (BITS != 8) {
        to.size = std::size_t(m.width()) * LANES;
        std::uint8_t* bytes = code_room.reserve(count * to.size);
        const std::uint8_t* from = to.codes;
        to.codes = bytes;
        for (int k = 0; k < count * m.width(); k += CELL, from += lines_of(BITS) * 64)
            each_step<0, 8>([&](auto p) __attribute__((always_inline)) {
                ByteCodes::of<BITS, p>(from, m.map).put(bytes);
                bytes += 64;
            });
    }
    float* scales = scale_room.reserve(std::size_t(count) * m.groups * 2 * LANES);
    to.scales = scales;
    for (int c = 0; c < count; ++c)
        for (int g = 0; g < m.groups; ++g, scales += 2 * LANES) {
            const LaneScales lanes = scales_of(m, unit + c, g);
            store(scales, lanes.scale);
            store(scales + LANES, lanes.less);
        }
    return to;
}

// `count` <= R rows by C units, of which the first is the `near`th of those that are ready. Rows
// that are lacking are the last one again.
template <class Sum, int STEPS, int R, int C>
void ready_block(const Packed& m, const Ready& units, int unit, int near,
                 const Digits& x, int row, int count, const Epilogue& epilogue) {
    constexpr int steps = STEPS < 8 ? STEPS : 8;
    const int half = m.half(), blocks = m.blocks();
    const std::uint8_t* w = units.codes + near * units.size;
    const float* scales = units.scales + std::size_t(near) * m.groups * 2 * LANES;
    const std::int8_t* line[R];
    const BlockSummary* parts[R];
    for (int r = 0; r < R; ++r) {
        const std::size_t at = row + (r < count ? r : count - 1);
        line[r] = x.digits + at * 2 * half;
        parts[r] = x.parts + at * blocks;
    }
    F32x16 sums[R][C];
    for (auto& of_row : sums)
        for (auto& sum : of_row) sum = splat(0.0f);
    for (int b = 0, part = 0, g = 0; b < blocks; ++b) {
        if (epilogue.upcoming && !(STEPS < 8 && b % 2)) [[unlikely]]
            (*epilogue.upcoming)(m.block / (4 * steps) * ASKED);
        Sum all[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) all[r][c] = Sum(parts[r][b].offset);
        if (m.zeros.data()) [[unlikely]]
            for (int c = 0; c < C; ++c) {
                const Ints zeros = load_zeros(
                    m.zeros.data() + (std::size_t(unit + c) * m.groups + g) * LANES);
                for (int r = 0; r < R; ++r) all[r][c] = Sum(zeros, parts[r][b]);
            }
        for (int k = 0; k < (STEPS > 8 ? m.block : 4 * steps); k += 4 * steps, w += 64 * steps) {
            each_step<0, steps>([&](auto p) __attribute__((always_inline)) {
                typename Sum::FourCodes codes[C];
                for (int c = 0; c < C; ++c)
                    codes[c] = Sum::FourCodes::template of<8, p>(w + c * units.size, nullptr);
                for (int r = 0; r < R; ++r)
                    for (int c = 0; c < C; ++c)
                        all[r][c].add(codes[c], line[r], half, 4 * p);
            });
            for (int r = 0; r < R; ++r) line[r] += 4 * steps;
        }
        const float* with = scales + std::size_t(g) * 2 * LANES;
        const std::size_t next = std::size_t(m.groups) * 2 * LANES;
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c)
                sums[r][c] = fma(to_float(all[r][c].all()),
                                 load(with + c * next) * splat(parts[r][b].scale), sums[r][c]);
        if (m.lessened)
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c)
                    sums[r][c] =
                        fnma(load(with + c * next + LANES), splat(parts[r][b].sum), sums[r][c]);
        if (++part == m.split) {
            part = 0;
            ++g;
        }
    }
    for (int r = 0; r < count; ++r) {
        F32x16 of_row[C];
        for (int c = 0; c < C; ++c) of_row[c] = sums[r][c] * splat(m.factor);
        finish<C>(epilogue, m.bias.data(), row + r, unit, of_row);
    }
}

template <class Sum, bool HALVED, int R, int C>
void ready_units(const Packed& m, const Ready& units, int unit, int near, const Digits& x, int row,
                 int count, const Epilogue& epilogue) {
    if constexpr (HALVED)
        return ready_block<Sum, 4, R, C>(m, units, unit, near, x, row, count, epilogue);
    else if (m.block == 32)
        return ready_block<Sum, 8, R, C>(m, units, unit, near, x, row, count, epilogue);
    else
        return ready_block<Sum, 16, R, C>(m, units, unit, near, x, row, count, epilogue);
}

template <int BITS, class Sum>
void product_of_ready(const Packed& m, int first, int last, const Digits& x, int rows,
                      const Epilogue& epilogue) {
    constexpr int R = Sum::MANY_ROWS, C = 2;
    const int tiles = tiles_of(rows, R), few = near_units(std::size_t(m.width()) * LANES);
    for (int unit = first; unit < last; unit += few) {
        const int count = unit + few < last ? few : last - unit;
        const Ready units = make_ready<BITS>(m, unit, count);
        each_tile(rows, tiles, [&](int row, int have) {
            int c = 0;
            for (; c + C <= count; c += C)
                ready_units<Sum, halved(BITS), R, C>(m, units, unit + c, c, x, row, have, epilogue);
            if (c < count)
                for (int r = 0; r < have; ++r)
                    digit_block<BITS, Sum, 1, 1>(m, unit + c, x, row + r, epilogue);
        });
    }
}

}  // namespace outrider
