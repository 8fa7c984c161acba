// Exact sums of products of codes (bytes) and digits (int16) on every instruction set.
//
// Sixteen outputs' codes of four inputs stand in 64 bytes: [16 outputs][4 inputs]; of 4-bit codes
// those of eight: low nibbles the first four inputs, high nibbles the other four.
#pragma once

#include <type_traits>

#include "integers.hpp"

namespace outrider {

// What a block of activations brings along.
struct Part {
    float scale;
    std::int16_t low, high;  // -(sum of the digits) = low + 128 * high
};

// A row's digits take 2 * half bytes. With AVX-512 VNNI these are [2][half] bytes, digit = 256 * the
// first + the second (-128 to 127); elsewhere int16, of every four inputs the first, the third,
// the second and the fourth, which is how pairs of codes fall out of their words. Digits of 8 bits
// are bytes where `in_bytes` says so of the codes' bits.
//
// Sums take the codes and digits of INPUTS after INPUTS; what is kept in less than 32 bits
// meanwhile is taken up by `settle`. They want the codes of four inputs, unpacked once for all rows:
// Four(codes, p), p = 1 for those in the high nibbles. Registers hold REGISTERS of each sum, and
// the sums of ROWS rows.
constexpr int INPUTS = 32;

#if defined(__AVX512F__)
template <int BITS>
struct Codes;
template <>
struct Codes<8> {
    __m512i first;
    Codes() = default;
    explicit Codes(const std::uint8_t* p) : first(_mm512_loadu_si512(p)) {}
};
template <>
struct Codes<4> {
    __m512i first, second;
    Codes() = default;
    explicit Codes(const std::uint8_t* p) {
        const __m512i mask = _mm512_set1_epi8(15), both = _mm512_loadu_si512(p);
        first = _mm512_and_si512(both, mask);
        second = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    }
};
// The codes of four inputs, as bytes.
struct ByteFour {
    __m512i v;
    ByteFour() = default;
    ByteFour(const Codes<8>& codes, int) : v(codes.first) {}
    ByteFour(const Codes<4>& codes, int p) : v(p ? codes.second : codes.first) {}
};
#endif

#if defined(__AVX512VNNI__)

constexpr int DIGIT_BYTES = 1;  // from a digit to the next
constexpr int MOST_SUMS = 16;   // registers that hold a block's sums

// Sums over a block: 256 * high + low.
struct Sums {
    using Four = ByteFour;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 2, ROWS = 8;
    __m512i high, low;
    Sums() : high(_mm512_setzero_si512()), low(_mm512_setzero_si512()) {}
    Sums(Ints zeros, const Part& part)
        : high(_mm512_setzero_si512()),
          low(_mm512_dpwssd_epi32(high, zeros.v, repeated(&part.low))) {}
    void add(Four codes, const std::int8_t* row, int half, int at) {
        high = _mm512_dpbusd_epi32(high, codes.v, repeated(row + at));
        low = _mm512_dpbusd_epi32(low, codes.v, repeated(row + half + at));
    }
    void settle() {}
    Ints all() const { return {_mm512_add_epi32(_mm512_slli_epi32(high, 8), low)}; }
};

// The same of digits of 8 bits.
struct ShortSums {
    using Four = ByteFour;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 1, ROWS = 8;
    __m512i low;
    ShortSums() : low(_mm512_setzero_si512()) {}
    ShortSums(Ints zeros, const Part& part) : low(Sums(zeros, part).low) {}
    void add(Four codes, const std::int8_t* row, int half, int at) {
        low = _mm512_dpbusd_epi32(low, codes.v, repeated(row + half + at));
    }
    void settle() {}
    Ints all() const { return {low}; }
};
template <int BITS>
using Short = ShortSums;

inline void put_digits(std::int8_t* row, int half, int at, Ints digits, bool) {
    const __m512i upper = _mm512_add_epi32(digits.v, _mm512_set1_epi32(128));
    _mm_storeu_si128((__m128i*)(row + at), _mm512_cvtepi32_epi8(_mm512_srai_epi32(upper, 8)));
    _mm_storeu_si128((__m128i*)(row + half + at), _mm512_cvtepi32_epi8(digits.v));
}

#elif defined(__AVX2__)

constexpr int DIGIT_BYTES = 2;

#if defined(__AVX512F__)
constexpr int MOST_SUMS = 16, INTS = 1;  // INTS: registers of an Ints
// The same as words: of the first and the third input, of the second and the fourth.
struct WordFour {
    __m512i odd, even;
    WordFour() = default;
    template <int BITS>
    WordFour(const Codes<BITS>& codes, int p) {
        const __m512i bytes = ByteFour(codes, p).v;
        odd = _mm512_and_si512(bytes, _mm512_set1_epi16(255));
        even = _mm512_srli_epi16(bytes, 8);
    }
};
inline void add_pairs(Ints& sum, __m512i codes, __m512i digits) {
    sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(codes, digits));
}
inline __m256i narrowed(Ints digits) { return _mm512_cvtepi32_epi16(digits.v); }

// Pairs of products of 4-bit codes and digits of 8 bits: at most 2 * 15 * 127, eight of which fit.
struct Bytes {
    __m512i v;
    Bytes() : v(_mm512_setzero_si512()) {}
    void add(ByteFour codes, Ints digits) {
        v = _mm512_add_epi16(v, _mm512_maddubs_epi16(codes.v, digits.v));
    }
    Ints all() const { return {_mm512_madd_epi16(v, _mm512_set1_epi16(1))}; }
};
inline Ints four_of(const void* p) { return {repeated(p)}; }
#else
constexpr int MOST_SUMS = 8, INTS = 2;
// Finishes a sum before the next row's begins: side by side they would need more registers than
// there are. A volatile asm would take twice as long, since it also keeps its place among others.
inline void pin(__m256i& a, __m256i& b) { asm("" : "+x"(a), "+x"(b)); }
template <int BITS>
struct Codes {
    __m256i a, b;
    Codes() = default;
    explicit Codes(const std::uint8_t* p)
        : a(_mm256_loadu_si256((const __m256i*)p)),
          b(_mm256_loadu_si256((const __m256i*)(p + 32))) {}
};
// The codes of four inputs, as bytes.
struct ByteFour {
    __m256i a, b;
    ByteFour() = default;
    ByteFour(const Codes<8>& codes, int) : a(codes.a), b(codes.b) {}
    ByteFour(const Codes<4>& codes, int p) {
        const __m256i mask = _mm256_set1_epi8(15);
        a = _mm256_and_si256(_mm256_srli_epi16(codes.a, 4 * p), mask);
        b = _mm256_and_si256(_mm256_srli_epi16(codes.b, 4 * p), mask);
    }
};
// The same as words: of the first and the third input, of the second and the fourth.
struct WordFour {
    __m256i odd_a, odd_b, even_a, even_b;
    WordFour() = default;
    template <int BITS>
    WordFour(const Codes<BITS>& codes, int p) {
        const __m256i mask = _mm256_set1_epi16((1 << BITS) - 1);
        auto word = [&](__m256i x, int shift) {
            const __m256i moved = _mm256_srli_epi16(x, shift);
            return shift + BITS < 16 ? _mm256_and_si256(moved, mask) : moved;
        };
        odd_a = word(codes.a, 4 * p);
        odd_b = word(codes.b, 4 * p);
        even_a = word(codes.a, 4 * p + 8);
        even_b = word(codes.b, 4 * p + 8);
    }
};
inline void add_pairs(Ints& sum, __m256i a, __m256i b, Ints digits) {
#if defined(__AVXVNNI__)
    sum.a = _mm256_dpwssd_avx_epi32(sum.a, a, digits.a);
    sum.b = _mm256_dpwssd_avx_epi32(sum.b, b, digits.b);
#else
    sum.a = _mm256_add_epi32(sum.a, _mm256_madd_epi16(a, digits.a));
    sum.b = _mm256_add_epi32(sum.b, _mm256_madd_epi16(b, digits.b));
#endif
}
inline __m256i narrowed(Ints digits) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(digits.a, digits.b), 0xd8);
}
inline Ints four_of(const void* p) { return repeated(p); }

// Pairs of products of 4-bit codes and digits of 8 bits: at most 2 * 15 * 127, eight of which fit.
struct Bytes {
    __m256i a, b;
    Bytes() : a(_mm256_setzero_si256()), b(_mm256_setzero_si256()) {}
    void add(const ByteFour& codes, Ints digits) {
        a = _mm256_add_epi16(a, _mm256_maddubs_epi16(codes.a, digits.a));
        b = _mm256_add_epi16(b, _mm256_maddubs_epi16(codes.b, digits.b));
        pin(a, b);
    }
    Ints all() const {
        const __m256i one = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one)};
    }
};
#endif

struct Sums {
    using Four = WordFour;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = INTS, ROWS = INTS == 1 ? 8 : 4;
    Ints sum;
    Sums() : sum(ints(0)) {}
#if defined(__AVX512F__)
    Sums(Ints zeros, const Part& part) : sum{_mm512_madd_epi16(zeros.v, repeated(&part.low))} {}
    void add(const Four& codes, const std::int8_t* row, int, int at) {
        add_pairs(sum, codes.odd, repeated(row + 2 * at));
        add_pairs(sum, codes.even, repeated(row + 2 * at + 4));
    }
#else
    Sums(Ints zeros, const Part& part) : sum(ints(0)) {
        add_pairs(sum, zeros.a, zeros.b, repeated(&part.low));
    }
    void add(const Four& codes, const std::int8_t* row, int, int at) {
        add_pairs(sum, codes.odd_a, codes.odd_b, repeated(row + 2 * at));
        add_pairs(sum, codes.even_a, codes.even_b, repeated(row + 2 * at + 4));
        pin(sum.a, sum.b);
    }
#endif
    void settle() {}
    Ints all() const { return sum; }
};

// The same of digits of 8 bits.
#if defined(__AVXVNNI__)
struct ShortSums {
    using Four = ByteFour;
    static constexpr int DIGIT = 1, REGISTERS = INTS, ROWS = 6;
    Ints sum;
    ShortSums() : sum(ints(0)) {}
    ShortSums(Ints zeros, const Part& part) : sum(Sums(zeros, part).sum) {}
    void add(const Four& codes, const std::int8_t* row, int, int at) {
        const Ints digits = four_of(row + at);
        sum.a = _mm256_dpbusd_avx_epi32(sum.a, codes.a, digits.a);
        sum.b = _mm256_dpbusd_avx_epi32(sum.b, codes.b, digits.b);
        pin(sum.a, sum.b);
    }
    void settle() {}
    Ints all() const { return sum; }
};
template <int BITS>
using Short = ShortSums;
#else
struct ByteSums {
    using Four = ByteFour;
    static constexpr int DIGIT = 1, REGISTERS = 2 * Sums::REGISTERS, ROWS = Sums::ROWS;
    Sums sums;
    Bytes bytes;
    ByteSums() = default;
    ByteSums(Ints zeros, const Part& part) : sums(zeros, part) {}
    void add(const Four& codes, const std::int8_t* row, int, int at) {
        bytes.add(codes, four_of(row + at));
    }
    void settle() {
        sums.sum = sums.sum + bytes.all();
        bytes = Bytes();
    }
    Ints all() const { return sums.sum; }
};
template <int BITS>
using Short = std::conditional_t<BITS == 4, ByteSums, Sums>;
#endif

inline void put_digits(std::int8_t* row, int, int at, Ints digits, bool bytes) {
    __m256i words = narrowed(digits);
    if (bytes) {
        const __m128i low = _mm256_castsi256_si128(words);
        const __m128i high = _mm256_extracti128_si256(words, 1);
        return _mm_storeu_si128((__m128i*)(row + at), _mm_packs_epi16(low, high));
    }
    words = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i*)(row + 2 * at), words);
}

#else

constexpr int DIGIT_BYTES = 2;
constexpr int MOST_SUMS = 1;

template <int BITS>
struct Codes {
    std::uint8_t bytes[64];
    Codes() = default;
    explicit Codes(const std::uint8_t* p) { std::memcpy(bytes, p, 64); }
};
// The codes of four inputs, where they stand.
struct AnyFour {
    const std::uint8_t* bytes;
    int shift, mask;
    AnyFour() = default;
    template <int BITS>
    AnyFour(const Codes<BITS>& codes, int p)
        : bytes(codes.bytes), shift(4 * p), mask((1 << BITS) - 1) {}
};

struct Sums {
    using Four = AnyFour;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 1, ROWS = 2;
    Ints sum;
    Sums() : sum(ints(0)) {}
    Sums(Ints zeros, const Part& part)
        : sum(each_int([&](int i) { return (zeros.v[i] & 255) * (part.low + 128 * part.high); })) {}
    void add(const Four& codes, const std::int8_t* row, int, int at) {
        std::int16_t d[4];
        std::memcpy(d, row + 2 * at, 8);
        for (int i = 0; i < LANES; ++i) {
            auto code = [&](int j) { return codes.bytes[4 * i + j] >> codes.shift & codes.mask; };
            sum.v[i] += code(0) * d[0] + code(2) * d[1] + code(1) * d[2] + code(3) * d[3];
        }
    }
    void settle() {}
    Ints all() const { return sum; }
};
template <int BITS>
using Short = Sums;

inline void put_digits(std::int8_t* row, int, int at, Ints digits, bool) {
    for (int i = 0; i < LANES; ++i) {
        const int place = i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
        const std::int16_t digit = std::int16_t(digits.v[i]);
        std::memcpy(row + 2 * (at + place), &digit, 2);
    }
}

#endif

// Whether digits of 8 bits are bytes beside codes of `bits`.
constexpr bool in_bytes(int bits) {
    return (bits == 4 ? Short<4>::DIGIT : Short<8>::DIGIT) == 1;
}

}  // namespace outrider
