// Reads the codes of GGUF files. Blocks are ggml's (ggml-common.h there, ggml-quants.c for what
// they mean), little-endian: their codes and scales are kept, and only their places change.
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <memory>

#include "coded.hpp"
#include "pool.hpp"

namespace outrider {
namespace {

constexpr int MOST_CODES = 256, MOST_GROUPS = 16;

// What a block holds, one number to a code or group.
struct Block {
    std::uint8_t codes[MOST_CODES];
    std::uint16_t scale, less;
    std::int8_t steps[MOST_GROUPS];
    std::uint8_t less_steps[MOST_GROUPS];
};

using Read = void (*)(const std::uint8_t* from, Block& to);

struct Type {
    int number;
    int inputs, bytes, group;  // of a block
    int bits, zero;
    Scaling scaling;
    bool lessened;
    const std::int8_t* map;  // of MAPPED codes, less `zero`
    Read read;
};

std::uint16_t word(const std::uint8_t* p) { return std::uint16_t(p[0] | p[1] << 8); }

// 32 codes: low nibbles first.
void nibbles(const std::uint8_t* from, std::uint8_t* to) {
    for (int i = 0; i < 16; ++i) {
        to[i] = from[i] & 15;
        to[i + 16] = from[i] >> 4;
    }
}
// 64 codes: low nibbles first.
void many_nibbles(const std::uint8_t* from, std::uint8_t* to) {
    for (int i = 0; i < 32; ++i) {
        to[i] = from[i] & 15;
        to[i + 32] = from[i] >> 4;
    }
}
void fifth_bits(const std::uint8_t* from, std::uint8_t* to) {
    for (int i = 0; i < 32; ++i) to[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}
// 128 codes of two bits, of which 32 bytes hold four times 32.
void pairs(const std::uint8_t* from, std::uint8_t* to) {
    for (int j = 0; j < 4; ++j)
        for (int i = 0; i < 32; ++i) to[32 * j + i] = from[i] >> 2 * j & 3;
}

void read_q4_0(const std::uint8_t* from, Block& to) {
    to.scale = word(from);
    nibbles(from + 2, to.codes);
}
void read_q4_1(const std::uint8_t* from, Block& to) {
    to.scale = word(from);
    to.less = word(from + 2) ^ 0x8000;
    nibbles(from + 4, to.codes);
}
void read_q5_0(const std::uint8_t* from, Block& to) {
    to.scale = word(from);
    nibbles(from + 6, to.codes);
    fifth_bits(from + 2, to.codes);
}
void read_q5_1(const std::uint8_t* from, Block& to) {
    to.scale = word(from);
    to.less = word(from + 2) ^ 0x8000;
    nibbles(from + 8, to.codes);
    fifth_bits(from + 4, to.codes);
}
void read_q8_0(const std::uint8_t* from, Block& to) {
    to.scale = word(from);
    for (int i = 0; i < 32; ++i) to.codes[i] = from[2 + i] ^ 0x80;
}
void read_q2_k(const std::uint8_t* from, Block& to) {
    std::memcpy(to.steps, from, 16);
    pairs(from + 16, to.codes);
    pairs(from + 48, to.codes + 128);
    to.scale = word(from + 80);
    to.less = word(from + 82);
}
void read_q3_k(const std::uint8_t* from, Block& to) {
    pairs(from + 32, to.codes);
    pairs(from + 64, to.codes + 128);
    for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 32; ++i) to.codes[32 * j + i] |= (from[i] >> j & 1) << 2;
    const std::uint8_t* s = from + 96;
    for (int j = 0; j < 16; ++j) {
        const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4, high = s[8 + j % 4] >> j / 4 * 2 & 3;
        to.steps[j] = std::int8_t((low | high << 4) - 32);
    }
    to.scale = word(from + 108);
}
// Eight scales and eight minima of six bits in twelve bytes.
void sixes(const std::uint8_t* from, Block& to) {
    for (int j = 0; j < 4; ++j) {
        to.steps[j] = from[j] & 63;
        to.less_steps[j] = from[j + 4] & 63;
        to.steps[j + 4] = std::int8_t((from[j + 8] & 15) | from[j] >> 6 << 4);
        to.less_steps[j + 4] = std::uint8_t(from[j + 8] >> 4 | from[j + 4] >> 6 << 4);
    }
}
void read_q4_k(const std::uint8_t* from, Block& to) {
    to.scale = word(from);
    to.less = word(from + 2);
    sixes(from + 4, to);
    for (int j = 0; j < 4; ++j) many_nibbles(from + 16 + 32 * j, to.codes + 64 * j);
}
void read_q5_k(const std::uint8_t* from, Block& to) {
    to.scale = word(from);
    to.less = word(from + 2);
    sixes(from + 4, to);
    for (int j = 0; j < 4; ++j) many_nibbles(from + 48 + 32 * j, to.codes + 64 * j);
    for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 32; ++i) to.codes[32 * j + i] |= (from[16 + i] >> j & 1) << 4;
}
void read_q6_k(const std::uint8_t* from, Block& to) {
    for (int n = 0; n < 2; ++n) {
        std::uint8_t* codes = to.codes + 128 * n;
        const std::uint8_t *low = from + 64 * n, *high = from + 128 + 32 * n;
        pairs(high, codes);
        for (int i = 0; i < 32; ++i)
            for (int j = 0; j < 4; ++j) {
                std::uint8_t& code = codes[32 * j + i];
                const int four = low[32 * (j % 2) + i] >> j / 2 * 4 & 15;
                code = std::uint8_t(code << 4 | four);
            }
    }
    std::memcpy(to.steps, from + 192, 16);
    to.scale = word(from + 208);
}
void read_iq4_xs(const std::uint8_t* from, Block& to) {
    to.scale = word(from);
    const int high = word(from + 2);
    for (int j = 0; j < 8; ++j) {
        const int low = from[4 + j / 2] >> j % 2 * 4 & 15;
        to.steps[j] = std::int8_t((low | (high >> 2 * j & 3) << 4) - 32);
        nibbles(from + 8 + 16 * j, to.codes + 32 * j);
    }
}
void read_mxfp4(const std::uint8_t* from, Block& to) {
    // 2^(e - 128) as bf16; the two smallest are denormal.
    to.scale = from[0] > 1 ? std::uint16_t((from[0] - 1) << 7) : std::uint16_t(0x20 << from[0]);
    nibbles(from + 1, to.codes);
}

// IQ4's values, and those of 4-bit floats twice as large.
constexpr std::int8_t IQ4[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                               1,    13,   25,  38,  53,  69,  89,  113};
constexpr std::int8_t FP4[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

constexpr Type TYPES[] = {
    {2, 32, 18, 32, 4, 8, Scaling::halves, false, nullptr, read_q4_0},
    {3, 32, 20, 32, 4, 0, Scaling::halves, true, nullptr, read_q4_1},
    {6, 32, 22, 32, 5, 16, Scaling::halves, false, nullptr, read_q5_0},
    {7, 32, 24, 32, 5, 0, Scaling::halves, true, nullptr, read_q5_1},
    {8, 32, 34, 32, 8, 128, Scaling::halves, false, nullptr, read_q8_0},
    {10, 256, 84, 16, 2, 0, Scaling::nibbles, true, nullptr, read_q2_k},
    {11, 256, 110, 16, 3, 4, Scaling::steps, false, nullptr, read_q3_k},
    {12, 256, 144, 32, 4, 0, Scaling::steps, true, nullptr, read_q4_k},
    {13, 256, 176, 32, 5, 0, Scaling::steps, true, nullptr, read_q5_k},
    {14, 256, 210, 16, 6, 32, Scaling::steps, false, nullptr, read_q6_k},
    {20, 32, 18, 32, MAPPED, 127, Scaling::halves, false, IQ4, read_q4_0},
    {23, 256, 136, 32, MAPPED, 127, Scaling::steps, false, IQ4, read_iq4_xs},
    {39, 32, 17, 32, MAPPED, 12, Scaling::wides, false, FP4, read_mxfp4},
};

const Type* type_of(int number) {
    for (const Type& type : TYPES)
        if (type.number == number) return &type;
    return nullptr;
}

bool is_finite_half(std::uint16_t x) { return (x & 0x7c00) != 0x7c00; }

// Rows read from a file into the units of a matrix.
struct Packing : Work {
    Packed m;
    std::vector<CodedRows> parts;
    const Type* type;
    bool turns;
    std::atomic<const char*> wrong{nullptr};

    std::size_t row_bytes() const { return std::size_t(m.in) / type->inputs * type->bytes; }

    // The part and its row that are an output of the matrix.
    const CodedRows* find(int unit, int lane, int& row) const {
        const std::size_t half = parts.size() / 2;
        const std::size_t first = turns && unit % 2 ? half : 0;
        const std::size_t last = turns && unit % 2 == 0 ? half : parts.size();
        row = (turns ? unit / 2 : unit) * LANES + lane;
        for (std::size_t i = first; i < last; ++i) {
            if (row < parts[i].rows) return &parts[i];
            row -= parts[i].rows;
        }
        return nullptr;
    }

    // Reads the rows of a unit to `to` [16][row_bytes]; returns how many there are.
    int read(int unit, std::uint8_t* to) {
        const std::size_t bytes = row_bytes();
        int lane = 0;
        while (lane < LANES) {
            int row;
            const CodedRows* part = find(unit, lane, row);
            if (!part) break;
            int count = 1;  // rows that stand behind each other
            if (part->order)
                row = part->order[row];
            else
                while (lane + count < LANES && row + count < part->rows) ++count;
            std::size_t left = count * bytes;
            std::int64_t at = part->offset + std::int64_t(row) * std::int64_t(bytes);
            for (std::uint8_t* next = to + lane * bytes; left;) {
                const ssize_t got = pread(part->file, next, left, at);
                if (got < 0 && errno == EINTR) continue;
                if (got <= 0) {
                    wrong = "the file cannot be read to the end of a tensor";
                    return 0;
                }
                next += got;
                at += got;
                left -= std::size_t(got);
            }
            lane += count;
        }
        return lane;
    }

    void put(std::uint8_t* record, int at, int lane, std::uint16_t x) {
        std::memcpy(record + at + 2 * lane, &x, 2);
    }

    void pack_unit(int unit, const std::uint8_t* rows, int count) {
        const int blocks = m.in / type->inputs, cells = type->inputs / CELL;
        const int groups = type->inputs / type->group, size = lines_of(m.bits) * 64;
        const bool halves = m.scaling != Scaling::wides;
        std::uint8_t* unit_codes = m.codes.data() + unit * m.unit_size();
        std::uint8_t* record = m.scales.data() + unit * m.scales_size();
        Block block = {};
        for (int b = 0; b < blocks; ++b, record += m.record)
            for (int lane = 0; lane < count; ++lane) {
                type->read(rows + lane * row_bytes() + std::size_t(b) * type->bytes, block);
                if (halves && !(is_finite_half(block.scale) && is_finite_half(block.less)))
                    wrong = "a scale is not finite";
                for (int i = 0; i < cells; ++i) {
                    std::uint32_t words[8];
                    std::memcpy(words, block.codes + i * CELL, sizeof words);
                    encode(unit_codes + std::size_t(b * cells + i) * size, lane, m.bits, words);
                }
                put(record, 0, lane, block.scale);
                if (m.lessened) put(record, 2 * LANES, lane, block.less);
                if (m.scaling == Scaling::halves || m.scaling == Scaling::wides) continue;
                for (int g = 0; g < groups; ++g) {
                    record[m.step_at(g) + lane] = std::uint8_t(block.steps[g]);
                    if (m.scaling == Scaling::steps && m.lessened)
                        record[m.less_at(g) + lane] = block.less_steps[g];
                }
            }
    }

    void run(Team& team) override {
        team.share(m.units, 4, [&](int first, int last) {
            thread_local Memory<std::uint8_t> room;
            std::uint8_t* rows = room.reserve(LANES * row_bytes());
            for (int unit = first; unit < last && !wrong; ++unit) {
                const int count = read(unit, rows);
                if (count < LANES) {  // zeros stand behind the last row
                    std::memset(m.codes.data() + unit * m.unit_size(), 0, m.unit_size());
                    std::memset(m.scales.data() + unit * m.scales_size(), 0, m.scales_size());
                }
                pack_unit(unit, rows, count);
            }
        });
    }
};

}  // namespace

const char* pack_coded(Packed& to, const std::vector<CodedRows>& parts, const float* bias, int in,
                       bool turns) {
    const auto work = std::make_shared<Packing>();
    Packed& m = work->m;
    work->parts = parts;
    work->turns = turns;
    work->type = type_of(parts[0].type);
    if (!work->type) return "there is no such type of codes";
    const Type& type = *work->type;
    int rows = 0;
    for (const CodedRows& part : parts) {
        rows += part.rows;
        if (part.type != type.number) return "codes that take turns are of two types";
        for (int i = 0; part.order && i < part.rows; ++i)
            if (part.order[i] < 0 || part.order[i] >= part.rows) return "there is no such row";
    }
    int gates = 0;
    for (std::size_t i = 0; i < parts.size() / 2; ++i) gates += parts[i].rows;
    if (turns && (parts.size() % 2 || 2 * std::int64_t(gates) != rows))
        return "a gate has other rows than what it gates";
    if (in % type.inputs) return "a row of codes ends inside a block";
    m.in = in;
    m.bits = type.bits;
    m.zero = type.zero;
    m.scaling = type.scaling;
    m.lessened = type.lessened;
    for (int i = 0; type.map && i < 16; ++i) m.map[i] = std::uint8_t(type.map[i] + type.zero);
    m.group = type.group;
    m.groups = in / type.group;
    m.split = 1;
    m.block = halved(m.bits) ? CELL / 2 : CELL;
    m.per_record = type.inputs / type.group;
    const int each = m.scaling == Scaling::nibbles ? 1 : m.lessened ? 2 : 1;
    m.record = (m.lessened ? 4 : 2) * LANES;
    if (m.scaling == Scaling::steps || m.scaling == Scaling::nibbles)
        m.record += each * m.per_record * LANES;
    m.units = turns ? padded(rows / 2, LANES) / LANES * 2 : padded(rows, LANES) / LANES;
    m.codes = Memory<std::uint8_t>::of_weights(product_of({std::size_t(m.units), m.unit_size()}));
    m.scales =
        Memory<std::uint8_t>::of_weights(product_of({std::size_t(m.units), m.scales_size()}));
    if (bias) {
        m.bias = Memory<float>(std::size_t(m.units) * LANES);
        for (int unit = 0; unit < m.units; ++unit)
            for (int lane = 0; lane < LANES; ++lane) {
                int row;
                if (!work->find(unit, lane, row)) continue;
                const int before = turns && unit % 2 ? gates : 0;
                m.bias.data()[unit * LANES + lane] =
                    bias[turns ? before + unit / 2 * LANES + lane : unit * LANES + lane];
            }
    }
    Turn().run(work, 1, pool_size());
    quiet_pool();  // the order of rows is the caller's
    if (const char* wrong = work->wrong) return wrong;
    to = std::move(m);
    return nullptr;
}

}  // namespace outrider
