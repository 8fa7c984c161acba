// Packing of matrices of 4 or 8 bits; see packed.hpp for the layout.
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

std::size_t place(const Packed& m, int lane, int k) {
    const std::size_t step = std::size_t(k) * m.bits / 32;
    return step * 64 + lane * 4 + k % 4;
}

}  // namespace

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
    m.group = group;
    m.groups = groups;
    m.split = (group + LONGEST_BLOCK - 1) / LONGEST_BLOCK;
    if (std::int64_t(m.groups) * m.split * LONGEST_BLOCK * 2 > MOST)
        return "a quantised matrix is too wide";
    m.block = group <= 32 ? 32 : group <= 64 ? 64 : LONGEST_BLOCK;
    m.units = padded(rows, LANES) / LANES * parts;
    m.factor = factor_of(scales, std::size_t(out) * m.groups);
    if (m.factor == 0) return "a quantised matrix has a scale that is not finite";
    const std::size_t lanes = std::size_t(m.units) * m.groups * LANES;
    m.codes = Memory<std::uint8_t>(m.units * m.unit_size());
    m.scales = Memory<std::uint16_t>(lanes);
    if (zeros) m.zeros = Memory<std::uint8_t>(lanes);
    if (bias) m.bias = Memory<float>(std::size_t(m.units) * LANES);
    const float inverse = 1 / m.factor;
    unsigned seen = 0;
    for (int unit = 0; unit < m.units; ++unit) {
        const int first = unit / parts * LANES, part = unit % parts * rows;
        std::uint8_t* unit_codes = m.codes.data() + unit * m.unit_size();
        for (int lane = 0; lane < LANES && first + lane < rows; ++lane) {
            const std::size_t row = part + first + lane;
            const std::uint8_t* from = codes + row * in;
            for (int b = 0; b < m.blocks(); ++b) {
                const int start = m.start(b), count = m.length(b);
                for (int k = 0; k < count; ++k) {
                    const unsigned code = from[start + k];
                    const int at = b * m.block + k;
                    seen |= code;
                    unit_codes[place(m, lane, at)] |=
                        std::uint8_t(bits == 4 && at / 4 % 2 ? code << 4 : code);
                }
            }
            for (int g = 0; g < m.groups; ++g) {
                const std::size_t at = (std::size_t(unit) * m.groups + g) * LANES + lane;
                m.scales.data()[at] = to_half(scales[row * m.groups + g] * inverse);
                if (!zeros) continue;
                seen |= zeros[row * m.groups + g];
                m.zeros.data()[at] = zeros[row * m.groups + g];
            }
            if (bias) m.bias.data()[unit * LANES + lane] = bias[row];
        }
    }
    if (seen >> bits) return "a quantised matrix has codes or zeros of more bits than it says";
    to = std::move(m);
    return nullptr;
}

void unpack_row(const Packed& m, int row, float* to) {
    const int unit = row / LANES, lane = row % LANES;
    const std::uint8_t* codes = m.codes.data() + unit * m.unit_size();
    for (int b = 0; b < m.blocks(); ++b) {
        const std::size_t at = (std::size_t(unit) * m.groups + b / m.split) * LANES + lane;
        const float scale = from_half(m.scales.data()[at]) * m.factor;
        const int zero = m.zeros.data() ? m.zeros.data()[at] : 1 << (m.bits - 1);
        const int start = m.start(b), count = m.length(b);
        for (int k = 0; k < count; ++k) {
            const int in = b * m.block + k;
            const std::uint8_t code = codes[place(m, lane, in)];
            const int value = m.bits == 8 ? code : in / 4 % 2 ? code >> 4 : code & 15;
            to[start + k] = scale * float(value - zero);
        }
    }
}

}  // namespace outrider
