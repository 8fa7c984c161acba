// What sums in registers of 256 bits share; `add_pairs` is of each set.
#pragma once

#include "packed.hpp"
#include "word_digits.hpp"

namespace outrider {

constexpr int DIGIT_BYTES = 2;
constexpr int MOST_SUMS = 8;  // registers that hold a block's sums
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
struct ByteCodes {
    __m256i a, b;
    ByteCodes() = default;
    ByteCodes(const Codes<8>& codes, int) : a(codes.a), b(codes.b) {}
    ByteCodes(const Codes<4>& codes, int p) {
        const __m256i mask = _mm256_set1_epi8(15);
        a = _mm256_and_si256(_mm256_srli_epi16(codes.a, 4 * p), mask);
        b = _mm256_and_si256(_mm256_srli_epi16(codes.b, 4 * p), mask);
    }
};
// The same as words: of the first and the third input, of the second and the fourth.
struct WordCodes {
    __m256i odd_a, odd_b, even_a, even_b;
    WordCodes() = default;
    template <int BITS>
    WordCodes(const Codes<BITS>& codes, int p) {
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
// Adds products of words, two to a lane.
inline void add_pairs(Ints& sum, __m256i a, __m256i b, Ints digits);
inline __m256i narrowed(Ints digits) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(digits.a, digits.b), 0xd8);
}
inline Ints four_digits(const void* p) { return repeated(p); }

struct Sums {
    using FourCodes = WordCodes;
    static constexpr int DIGIT = DIGIT_BYTES, REGISTERS = 2, ROWS = 4;
    Ints sum;
    Sums() : sum(ints(0)) {}
    Sums(Ints zeros, const BlockSummary& block) : sum(ints(0)) {
        add_pairs(sum, zeros.a, zeros.b, repeated(&block.low));
    }
    void add(const FourCodes& codes, const std::int8_t* row, int, int at) {
        add_pairs(sum, codes.odd_a, codes.odd_b, repeated(row + 2 * at));
        add_pairs(sum, codes.even_a, codes.even_b, repeated(row + 2 * at + 4));
        pin(sum.a, sum.b);
    }
    void settle() {}
    Ints all() const { return sum; }
};

}  // namespace outrider
