// Packing of matrices of few bits; see packed.hpp for the layout.
#include <cmath>

#include "packed.hpp"

namespace outrider {
namespace {

// To fp16, to nearest even, for |x| < 65504: what lies below its range is rounded as it would be.
std::uint16_t to_half(float x) {
    const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    int exponent;
    const float fraction = std::frexp(std::fabs(x), &exponent);  // in [0.5, 1)
    if (fraction == 0) return sign;
    // A normal number has 11 bits, one below 2^-14 as many as lie above 2^-24.
    const int bits = exponent < -13 ? exponent + 24 : 11;
    if (bits < 0) return sign;
    const long whole = std::lrint(std::ldexp(fraction, bits));
    if (exponent < -13) return std::uint16_t(sign | whole);
    return std::uint16_t(sign + ((exponent + 13) << 10) + whole);
}

// The power of two that brings the largest scale to 2^13 and above, or 0 if one is no number.
float factor_of(const float* scales, std::size_t count) {
    float top = 0;
    for (std::size_t i = 0; i < count; ++i) {
        if (!std::isfinite(scales[i])) return 0;
        top = std::fmax(top, std::fabs(scales[i]));
    }
    int exponent = 14;
    if (top > 0) std::frexp(top, &exponent);
    return std::ldexp(1.0f, exponent - 14 < -126 ? -126 : exponent - 14);
}

std::uint16_t half_at(const std::uint8_t* p, int lane) {
    std::uint16_t half;
    std::memcpy(&half, p + 2 * lane, 2);
    return half;
}

// Copies what one of 16 outputs has in `count` lines of numbers of `size` bytes.
void copy_lane(std::uint8_t* to, int place, const std::uint8_t* from, int row, std::size_t count,
               int size) {
    for (std::size_t i = 0; i < count; ++i)
        std::memcpy(to + (i * LANES + place % LANES) * size,
                    from + (i * LANES + row % LANES) * size, size);
}

// The codes of 32 inputs of an output, as `encode` takes them.
void decode(const Packed& m, const std::uint8_t* cell, int lane, std::uint8_t to[CELL]) {
    auto line = [&](int i, int j) { return cell[i * 64 + lane * 4 + j]; };
    for (int k = 0; k < CELL; ++k) {
        const int p = k / 4, j = k % 4;
        if (m.bits == 8) {
            to[k] = line(p, j);
        } else if (m.bits == 2 || m.bits == 3) {
            to[k] = line(p / 4, j) >> p % 4 * 2 & 3;
            if (m.bits == 3) to[k] |= (line(2, j) >> p & 1) << 2;
        } else {
            to[k] = line(p / 2, j) >> p % 2 * 4 & 15;
            if (m.bits == 5) to[k] |= (line(4, j) >> p & 1) << 4;
            if (m.bits == 6) to[k] |= (line(4 + p / 4, j) >> p % 4 * 2 & 3) << 4;
            if (m.bits == MAPPED) to[k] = m.map[to[k]];
        }
    }
}

}  // namespace

void encode(std::uint8_t* cell, int lane, int bits, const std::uint32_t codes[8]) {
    std::uint32_t lines[8] = {};
    constexpr std::uint32_t one = 0x01010101, two = 0x03030303, four = 0x0f0f0f0f;
    switch (bits) {
        case 8:
            for (int p = 0; p < 8; ++p) lines[p] = codes[p];
            break;
        case 2:
        case 3:
            for (int p = 0; p < 8; ++p) {
                lines[p / 4] |= (codes[p] & two) << p % 4 * 2;
                lines[2] |= (codes[p] >> 2 & one) << p;
            }
            break;
        default:
            for (int p = 0; p < 8; ++p) lines[p / 2] |= (codes[p] & four) << p % 2 * 4;
            if (bits == 5)
                for (int p = 0; p < 8; ++p) lines[4] |= (codes[p] >> 4 & one) << p;
            if (bits == 6)
                for (int p = 0; p < 8; ++p) lines[4 + p / 4] |= (codes[p] >> 4 & two) << p % 4 * 2;
    }
    for (int i = 0; i < lines_of(bits); ++i) std::memcpy(cell + i * 64 + lane * 4, &lines[i], 4);
}

const char* pack(Packed& to, const std::uint8_t* codes, const float* scales,
                 const std::uint8_t* zeros, const float* bias, int out, int in, int bits, int group,
                 int groups, int parts) {
    if ((bits != 4 && bits != 8) || group < 1)
        return "a quantised matrix has bits other than 4 and 8, or groups of no inputs";
    group = group < in ? group : in;
    if (groups != (in - 1) / group + 1) return "a quantised matrix has other scales than groups";
    Packed m;
    const int rows = out / parts;
    m.in = in;
    m.bits = bits;
    m.zero = 1 << (bits - 1);
    m.group = group;
    m.groups = groups;
    m.split = (group + LONGEST_BLOCK - 1) / LONGEST_BLOCK;
    if (std::int64_t(m.groups) * m.split * LONGEST_BLOCK * 2 > MOST)
        return "a quantised matrix is too wide";
    m.block = group <= 32 ? 32 : group <= 64 ? 64 : LONGEST_BLOCK;
    m.units = padded(rows, LANES) / LANES * parts;
    m.record = 2 * LANES;
    m.factor = factor_of(scales, std::size_t(out) * m.groups);
    if (m.factor == 0) return "a quantised matrix has a scale that is not finite";
    m.codes = Memory<std::uint8_t>::of_weights(m.units * m.unit_size());
    m.scales = Memory<std::uint8_t>::of_weights(m.units * m.scales_size());
    if (zeros) m.zeros = Memory<std::uint8_t>(std::size_t(m.units) * m.groups * LANES);
    if (bias) m.bias = Memory<float>(std::size_t(m.units) * LANES);
    const float inverse = 1 / m.factor;
    unsigned seen = 0;
    for (int unit = 0; unit < m.units; ++unit) {
        const int first = unit / parts * LANES, part = unit % parts * rows;
        std::uint8_t* cell = m.codes.data() + unit * m.unit_size();
        for (int lane = 0; lane < LANES && first + lane < rows; ++lane) {
            const std::size_t row = part + first + lane;
            const std::uint8_t* from = codes + row * in;
            for (int b = 0; b < m.blocks(); ++b) {
                const int start = m.start(b), count = m.length(b);
                std::uint8_t block[LONGEST_BLOCK] = {};
                for (int k = 0; k < count; ++k) seen |= block[k] = from[start + k];
                for (int k = 0; k < m.block; k += CELL) {
                    std::uint32_t words[8];
                    std::memcpy(words, block + k, sizeof words);
                    const std::size_t at = std::size_t(b * m.block + k) / CELL * bits * 64;
                    encode(cell + at, lane, bits, words);
                }
            }
            for (int g = 0; g < m.groups; ++g) {
                const std::size_t at = std::size_t(unit) * m.groups + g;
                const std::uint16_t scale = to_half(scales[row * m.groups + g] * inverse);
                std::memcpy(m.scales.data() + at * m.record + 2 * lane, &scale, 2);
                if (!zeros) continue;
                seen |= zeros[row * m.groups + g];
                m.zeros.data()[at * LANES + lane] = zeros[row * m.groups + g];
            }
            if (bias) m.bias.data()[unit * LANES + lane] = bias[row];
        }
    }
    if (seen >> bits) return "a quantised matrix has codes or zeros of more bits than it says";
    to = std::move(m);
    return nullptr;
}

Packed empty_like(const Packed& from, int rows) {
    Packed to;
    static_cast<Coding&>(to) = from;
    to.units = padded(rows, LANES) / LANES;
    to.codes = Memory<std::uint8_t>::of_weights(to.units * to.unit_size());
    to.scales = Memory<std::uint8_t>::of_weights(to.units * to.scales_size());
    if (from.zeros.size())
        to.zeros = Memory<std::uint8_t>(std::size_t(to.units) * to.groups * LANES);
    if (from.bias.size()) to.bias = Memory<float>(std::size_t(to.units) * LANES);
    return to;
}

void copy_row(Packed& to, int place, const Packed& from, int row) {
    const int into = place / LANES, out = row / LANES;
    copy_lane(to.codes.data() + into * to.unit_size(), place,
              from.codes.data() + out * from.unit_size(), row, from.unit_size() / 64, 4);
    const int halves = from.lessened ? 2 : 1, bytes = from.record / LANES - 2 * halves;
    for (int g = 0; g < from.groups; g += from.per_record) {
        std::uint8_t* record = to.scales.data() + (to.record_of(into, g) - to.scales.data());
        copy_lane(record, place, from.record_of(out, g), row, halves, 2);
        const int behind = 2 * halves * LANES;
        copy_lane(record + behind, place, from.record_of(out, g) + behind, row, bytes, 1);
    }
    const std::size_t zeros = std::size_t(from.groups) * LANES;
    if (from.zeros.size())
        copy_lane(to.zeros.data() + into * zeros, place, from.zeros.data() + out * zeros, row,
                  from.groups, 1);
    if (from.bias.size()) to.bias.data()[place] = from.bias.data()[row];
}

void unpack_row(const Packed& m, int row, float* to) {
    const int unit = row / LANES, lane = row % LANES;
    const std::uint8_t* unit_codes = m.codes.data() + unit * m.unit_size();
    for (int b = 0; b < m.blocks(); ++b) {
        const int g = b / m.split, place = g % m.per_record;
        const std::uint8_t *record = m.record_of(unit, g), *step = record + m.step_at(place) + lane;
        const std::uint16_t top = half_at(record, lane);
        float scale = m.scaling == Scaling::wides ? widen(top) : from_half(top) * m.factor;
        float less = m.lessened ? from_half(half_at(record + 2 * LANES, lane)) : 0;
        if (m.scaling == Scaling::steps) {
            scale *= float(std::int8_t(*step));
            if (m.lessened) less *= float(record[m.less_at(place) + lane]);
        } else if (m.scaling == Scaling::nibbles) {
            scale *= float(*step & 15);
            less *= float(*step >> 4);
        }
        const int zero = m.zeros.data()
                             ? m.zeros.data()[(std::size_t(unit) * m.groups + g) * LANES + lane]
                             : m.zero;
        const int start = m.start(b), count = m.length(b);
        for (int k = 0; k < count; k += CELL) {
            const int in = b * m.block + k;
            std::uint8_t codes[CELL];
            decode(m, unit_codes + std::size_t(in) / CELL * lines_of(m.bits) * 64, lane, codes);
            const int first = in % CELL;  // of a cell of two blocks
            for (int i = 0; i < count - k && first + i < CELL; ++i)
                to[start + k + i] = scale * float(codes[first + i] - zero) - less;
        }
    }
}

}  // namespace outrider
