// Products of several rows with matrices of few bits, by AVX-512 VNNI. Rows pass by in
// bundles, whose numbers stand in the order in which they are read. For many rows codes become
// bytes and scales fp32 once for all, so that one kernel serves every number of bits. A sum takes
// the steps of `digit_block`: both give the same bits.
#pragma once

#include "quantized.hpp"

#if defined(__AVX512VNNI__)

#include "digits512.hpp"

namespace outrider {

constexpr int FEWEST_BUNDLED = 2;  // rows
// Rows from which codes are made bytes once rather than for every bundle.
constexpr int FEWEST_READY = 37;

// A bundle of rows, block after block. A block has [ROWS] beginnings of sums, digits [PLANES]
// [inputs / 4][ROWS][4], [ROWS] scales and [ROWS] `minus`. A beginning is -(sum of the digits) *
// zero or, where outputs have zeros of their own, a BlockSummary's (low, high).
template <class Sum, int R = Sum::BUNDLE>
struct Bundle {
    static constexpr int ROWS = R, LINE = 4 * ROWS, PLANES = Sum::REGISTERS;

    static std::size_t bytes(const Packed& m) {
        return std::size_t(m.blocks()) * LINE * (3 + PLANES * m.block / 4);
    }
    static const std::int8_t* of(const Packed& m, const Digits& x, int row) {
        return x.digits + row / ROWS * bytes(m);
    }
    // The bundles of rows [first, last) of x [count, stride], whole ones where they do not end with
    // x. Rows that the last bundle lacks are zeros, with scales of zero: what happens to stand
    // there may be denormal, and slow.
    template <class T>
    static void fill(const Packed& m, const T* x, std::size_t stride, int first, int last,
                     Digits to) {
        const auto make = m.block == 32   ? fill_one<32, T>
                          : m.block == 16 ? fill_one<16, T>
                                          : fill_one<0, T>;
        for (int r = first; r < last; r += ROWS)
            make(m, x + r * stride, stride, last - r < ROWS ? last - r : ROWS,
                 to.digits + r / ROWS * bytes(m));
    }

private:
    // A bundle of `rows` rows of x, in blocks of LENGTH inputs, if it is not 0.
    template <int LENGTH, class T>
    static void fill_one(const Packed& m, const T* x, std::size_t stride, int rows,
                         std::int8_t* to) {
        alignas(64) static constexpr T zeros[LONGEST_BLOCK] = {};
        alignas(64) T rest[ROWS][LONGEST_BLOCK];
        const std::size_t size = bytes(m) / m.blocks();
        for (int b = 0; b < m.blocks(); ++b, to += size) {
            const int start = m.start(b), length = m.length(b);
            const T* from[ROWS];
            for (int r = 0; r < ROWS; ++r) {
                from[r] = r < rows ? x + r * stride + start : zeros;
                if (length >= m.block) continue;
                std::memset(rest[r], 0, sizeof rest[r]);
                std::memcpy(rest[r], from[r], length * sizeof(T));
                from[r] = rest[r];
            }
            digitise_rows<ROWS, PLANES == 1, LENGTH>(from, m.block, m.zeros.data(), m.zero, to);
        }
    }
};

// Whether rows pass by in one wide bundle, whose sums over blocks stand in memory, rather than in
// two, of which the second has few rows.
template <class Sum>
bool are_wide(int rows) {
    return Sum::BUNDLE < rows && rows <= Sum::WIDE_BUNDLE;
}

// Rows of each bundle of `count`.
template <class Sum>
int rows_of_bundle(int count) {
    return are_wide<Sum>(count) ? Sum::WIDE_BUNDLE : Sum::BUNDLE;
}

// Rows [first, last) of x [count, stride] to the bundles of their number.
template <class Sum, class T>
void fill_bundles(const Packed& m, const T* x, std::size_t stride, int first, int last, int count,
                  Digits to) {
    are_wide<Sum>(count) ? Bundle<Sum, Sum::WIDE_BUNDLE>::fill(m, x, stride, first, last, to)
                         : Bundle<Sum>::fill(m, x, stride, first, last, to);
}

// Units made ready for many rows or, without scales, as they are stored.
struct Ready {
    const std::uint8_t* codes;  // [units][cells][8][16][4]
    const float* scales;        // [units][blocks][2][16]: scale and less
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
                _mm512_store_si512(bytes, ByteCodes::of<BITS, p>(from, m.map).v);
                bytes += 64;
            });
    }
    float* scales = scale_room.reserve(std::size_t(count) * m.blocks() * 2 * LANES);
    to.scales = scales;
    for (int c = 0; c < count; ++c)
        for (int b = 0; b < m.blocks(); ++b, scales += 2 * LANES) {
            const LaneScales lanes = scales_of(m, unit + c, b / m.split);
            store(scales, lanes.scale);
            store(scales + LANES, lanes.less);
        }
    return to;
}

// The first RUN rows of a bundle of R, of which `rows` from `row` on count, by two units, or by one
// of them twice. Blocks have STEPS steps or, where that is 0, whole cells. What comes behind codes
// that are stored is asked for if this is the first bundle.
template <int BITS, class Sum, int STEPS, int R, int RUN, bool READY>
void bundle_block(const Packed& m, const Ready& units, int first, int unit, bool both,
                  const Digits& x, int row, int rows, const Epilogue& epilogue) {
    using Rows = Bundle<Sum, R>;
    // Blocks that share a cell of stored codes.
    constexpr int C = 2, steps = STEPS ? STEPS : 8, held = READY ? 1 : 8 / steps;
    constexpr int lines = lines_of(BITS), used = READY ? steps : lines;
    const int blocks = m.blocks(), cells = STEPS ? 1 : m.block / CELL;
    const std::ptrdiff_t plane = cells * steps * Rows::LINE;
    const std::ptrdiff_t size = both ? units.size : 0, more = both ? blocks * 2 * LANES : 0;
    const std::uint8_t* w = units.codes + (unit - first) * units.size;
    const float* with =
        READY ? units.scales + std::size_t(unit - first) * blocks * 2 * LANES : nullptr;
    const std::int8_t* at = Rows::of(m, x, row);
    auto number = [&](int i) {
        float of_row;
        std::memcpy(&of_row, at + 4 * i, 4);
        return splat(of_row);
    };
    F32x16 sums[RUN][C];
    for (auto& line : sums)
        for (auto& sum : line) sum = splat(0.0f);
    const Lookahead ahead(m, AHEAD / C, cells * lines * 64, blocks / held, C);
    GroupOfBlock<held> at_group(m);
    for (int b = 0; b < blocks; b += held) {
        const int g = at_group.group;
        [[maybe_unused]] const std::ptrdiff_t further =
            READY || row ? 0 : ahead.codes(b / held, size);
        each_step<0, held>([&](auto turn) __attribute__((always_inline)) {
            Sum all[RUN][C];
            for (int r = 0; r < RUN; ++r)
                for (int c = 0; c < C; ++c) all[r][c] = Sum(Ints{repeated(at + 4 * r)});
            if (m.zeros.data()) [[unlikely]]
                for (int c = 0; c < C; ++c) {
                    const std::size_t group = std::size_t(unit + c * both) * m.groups + g + turn;
                    const Ints zeros = load_zeros(m.zeros.data() + group * LANES);
                    for (int r = 0; r < RUN; ++r) all[r][c] = Sum(zeros, at + 4 * r);
                }
            at += Rows::LINE;
            for (int i = 0; i < cells; ++i, at += steps * Rows::LINE) {
                each_step<turn * steps, steps>([&](auto p) __attribute__((always_inline)) {
                    for (int c = 0; c < C; ++c) {
                        if (!READY && p < lines)
                            __builtin_prefetch(w + c * size + p * 64 + further, 0, 2);
                        const auto codes = ByteCodes::of<BITS, p>(w + c * size, m.map);
                        for (int r = 0; r < RUN; ++r)
                            all[r][c].add(codes, at + 4 * r, (Rows::PLANES - 1) * plane,
                                          (p - turn * steps) * Rows::LINE);
                    }
                });
                if (turn + 1 == held) w += used * 64;
            }
            at += (Rows::PLANES - 1) * plane;
            LaneScales lanes[C];
            for (int c = 0; c < C; ++c)
                if constexpr (READY)
                    lanes[c] = {load(with + c * more), load(with + c * more + LANES)};
                else
                    lanes[c] = at_group.scales(m.records_of(unit + c * both), turn);
            for (int c = 0; c < C; ++c)
                for (int r = 0; r < RUN; ++r)
                    sums[r][c] =
                        fma(to_float(all[r][c].all()), lanes[c].scale * number(r), sums[r][c]);
            if (m.lessened)
                for (int c = 0; c < C; ++c)
                    for (int r = 0; r < RUN; ++r)
                        sums[r][c] = fma(lanes[c].less, number(Rows::ROWS + r), sums[r][c]);
            at += 2 * Rows::LINE;
            if (READY) with += 2 * LANES;
        });
        at_group.next();
    }
    for (auto& line : sums)
        for (auto& sum : line) sum = sum * splat(m.factor);
    rows = rows < RUN ? rows : RUN;
    finish_pair(epilogue, m.bias.data(), row, rows, unit, both, sums);
}

// The kernel for `rows` rows of a bundle of R, by codes as they are stored.
template <int BITS, class Sum, int STEPS, int R, int RUN = R == Sum::BUNDLE ? 2 : R - 1>
auto block_of_rows(int rows) {
    if constexpr (RUN < R)
        if (rows > RUN) return block_of_rows<BITS, Sum, STEPS, R, RUN + 1>(rows);
    return bundle_block<BITS, Sum, STEPS, R, RUN, false>;
}

// y[row, outputs of units first..last) for some rows in bundles of R, by codes as they are stored.
template <int BITS, class Sum, int R>
void product_of_few_bundles(const Packed& m, int first, int last, const Digits& x, int rows,
                            const Epilogue& epilogue) {
    constexpr int STEPS = halved(BITS) ? 4 : 0;
    const Ready units = {m.codes.data(), nullptr, m.unit_size()};
    for (int unit = first; unit < last; unit += 2)
        for (int row = 0; row < rows; row += R) {
            const int left = rows - row < R ? rows - row : R;
            const auto block = block_of_rows<BITS, Sum, STEPS, R>(left);
            if (epilogue.upcoming) [[unlikely]]
                (*epilogue.upcoming)(m.width() / CELL * ASKED);
            block(m, units, 0, unit, unit + 1 < last, x, row, left, epilogue);
        }
}

// y[row, outputs of units first..last) for rows in bundles.
template <int BITS, class Sum>
void product_of_bundles(const Packed& m, int first, int last, const Digits& x, int rows,
                        const Epilogue& epilogue) {
    constexpr int R = Sum::BUNDLE;
    if (are_wide<Sum>(rows))
        return product_of_few_bundles<BITS, Sum, Sum::WIDE_BUNDLE>(m, first, last, x, rows,
                                                                   epilogue);
    if (rows < FEWEST_READY)
        return product_of_few_bundles<BITS, Sum, R>(m, first, last, x, rows, epilogue);
    const auto block = halved(BITS)    ? bundle_block<8, Sum, 4, R, R, true>
                       : m.block == 32 ? bundle_block<8, Sum, 8, R, R, true>
                                       : bundle_block<8, Sum, 0, R, R, true>;
    // Two units stay in the first-level cache while all rows pass by.
    const int bundles = tiles_of(rows, R);
    for (int unit = first; unit < last; unit += 2) {
        const bool both = unit + 1 < last;
        const Ready units = make_ready<BITS>(m, unit, 1 + both);
        Fetch<2> codes(int(m.unit_size() / 64));
        for (int c = 2; c < 4; ++c) codes.add(m.codes.data() + (unit + c) * m.unit_size());
        Fetch<1> scales(padded(int(2 * m.scales_size()), 256) / 64);
        scales.add(m.scales.data() + (unit + 2) * m.scales_size());
        const int of_codes = codes.lines() / bundles + 1, of_scales = scales.lines() / bundles + 1;
        for (int row = 0; row < rows; row += R) {
            codes(of_codes);
            scales(of_scales);
            if (epilogue.upcoming) [[unlikely]]
                (*epilogue.upcoming)(m.width() / CELL * ASKED);
            block(m, units, unit, unit, both, x, row, rows - row < R ? rows - row : R, epilogue);
        }
    }
}

}  // namespace outrider

#endif
