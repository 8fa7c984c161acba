// Products with matrices of few bits: integers in a block of inputs, fp32 from block to block.
//
// Activations are not cut to the weights' bits: a row's block becomes digits of 16 bits and one
// scale. The integer sums are exact in whatever order they are taken, and the fp32 sum over blocks
// is taken in order, so that an output's bits depend neither on the rows and units computed beside
// it nor on whether tiles or lanes do it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "packed.hpp"
#include "product.hpp"
#include "steps.hpp"
#include "sums.hpp"

namespace outrider {

constexpr int HIGHEST_DIGIT = 127 * 256, HIGHEST_SHORT = 127;
// Below this a block's activations count as zeros: their scale's inverse would not be finite.
constexpr float FAINTEST = 1e-33f;

// Rows of activations as their product wants them.
struct Digits {
    std::int8_t* digits;  // [rows][2 * half], see sums.hpp, or bundles of rows
    BlockSummary* parts;  // [rows][blocks]
    bool coarse;          // of 8 bits, in the room of 16
};

template <class T>
[[gnu::always_inline]] inline void digitise_inputs(const T* x, int block, int highest_digit,
                                                   std::int8_t* row, int half, int at, bool bytes,
                                                   BlockSummary& part) {
    Ints peak = ints(0);
    for (int i = 0; i < block; i += LANES) peak = max(peak, magnitude(load(x + i)));
    const std::int32_t bits = highest(peak);
    float top;
    std::memcpy(&top, &bits, 4);
    const bool finite = bits < 0x7f800000;
    const bool faint = !finite || top < FAINTEST;
    const F32x16 inverse = splat(faint ? 0.0f : float(highest_digit) / top);
    Ints sum = ints(0);
    for (int i = 0; i < block; i += LANES) {
        const Ints digits = faint ? ints(0) : rounded(load(x + i) * inverse);
        sum = sum + digits;
        put_digits(row, half, at + i, digits, bytes);
    }
    const std::int32_t less = -total(sum);
    const float scale = !finite ? float(NAN) : faint ? 0.0f : top / float(highest_digit);
    part = {scale, float(less) * scale, std::int16_t(less & 127), std::int16_t(less >> 7)};
}

// Digits of block b of a row, in their halves from `at` on.
template <class T>
void digitise_block(const Packed& m, const T* x, int b, bool coarse, std::int8_t* row, int half,
                    int at, BlockSummary& part) {
    const T* from = x + m.start(b);
    const int count = m.length(b);
    alignas(64) T rest[LONGEST_BLOCK];
    if (count < m.block) {
        std::memset(rest, 0, sizeof rest);
        std::memcpy(rest, from, count * sizeof(T));
        from = rest;
    }
    const int most = coarse ? HIGHEST_SHORT : HIGHEST_DIGIT;
    const bool bytes = coarse && in_bytes(m.bits);
    if (m.block == 32)  // loops of known length
        digitise_inputs(from, 32, most, row, half, at, bytes, part);
    else
        digitise_inputs(from, m.block, most, row, half, at, bytes, part);
}

// Rows [first, last) of x [., stride] to `to`.
template <class T>
void digitise(const Packed& m, const T* x, std::size_t stride, int first, int last, Digits to) {
    const int half = m.half(), blocks = m.blocks();
    for (int r = first; r < last; ++r)
        for (int b = 0; b < blocks; ++b)
            digitise_block(m, x + r * stride, b, to.coarse, to.digits + std::size_t(r) * 2 * half,
                           half, b * m.block, to.parts[std::size_t(r) * blocks + b]);
}

// What is asked for while `count` units side by side are read block by block: what stands about
// `distance` bytes of codes further on. Behind the last block stands the first of the next units.
struct Lookahead {
    int blocks, far, more;         // `more` units are passed over there
    std::ptrdiff_t bytes, scales;  // of a block

    Lookahead(const Packed& m, int distance, int bytes, int blocks, int count)
        : blocks(blocks),
          far(std::clamp(distance / bytes, 1, blocks)),
          more(count - 1),
          bytes(bytes),
          scales(std::ptrdiff_t(m.scales_size()) / blocks) {}
    // From block b's codes to those that are asked for; a unit has `size` bytes of them.
    std::ptrdiff_t codes(int b, std::ptrdiff_t size) const {
        return far * bytes + (b + far < blocks ? 0 : more * size);
    }
    // Asks for scales as far ahead, of one unit after the other; a block has a line at most.
    void ask_scales(const std::uint8_t* records, int b) const {
        __builtin_prefetch(records + (b + far) * scales, 0, 2);
    }
};

// What sixteen outputs of a group are scaled by, and what they are lessened by.
struct LaneScales {
    F32x16 scale, less;
};
// Those of the group at `place` in a record.
inline LaneScales scales_at(const Packed& m, const std::uint8_t* record, int place) {
    auto halves = [&](int at) {
        return load_half(reinterpret_cast<const std::uint16_t*>(record + at));
    };
    LaneScales all = {
        m.scaling == Scaling::wides ? load(reinterpret_cast<const bf16*>(record)) : halves(0),
        m.lessened ? halves(2 * LANES) : splat(0.0f)};
    if (m.scaling == Scaling::steps) {
        all.scale = all.scale * load_signed(record + m.step_at(place));
        if (m.lessened) all.less = all.less * load_signed(record + m.less_at(place));
    } else if (m.scaling == Scaling::nibbles) {
        all.scale = all.scale * load_nibbles(record + m.step_at(place), 0);
        all.less = all.less * load_nibbles(record + m.step_at(place), 4);
    }
    return all;
}
inline LaneScales scales_of(const Packed& m, int unit, int g) {
    return scales_at(m, m.record_of(unit, g), g % m.per_record);
}

// The group of a block, block after block, or cell after cell of HELD: these have groups of their
// own. Where its scales stand is counted, since divisions would hold up the loads.
template <int HELD>
struct GroupOfBlock {
    const Packed& m;
    int group = 0, part = 0;
    int place = 0;              // of the group in its record
    std::ptrdiff_t record = 0;  // where that begins in a unit's

    explicit GroupOfBlock(const Packed& m) : m(m) {}
    // The scales of a unit's outputs, of which it has `records`, in the cell's block `turn`.
    LaneScales scales(const std::uint8_t* records, int turn) const {
        const bool further = place + turn >= m.per_record;
        const std::uint8_t* from = records + record + (further ? m.record : 0);
        return scales_at(m, from, further ? place + turn - m.per_record : place + turn);
    }
    void next() {
        if (HELD == 1 && ++part < m.split) return;
        part = 0;
        group += HELD;
        for (place += HELD; place >= m.per_record; place -= m.per_record) record += m.record;
    }
};

}  // namespace outrider
