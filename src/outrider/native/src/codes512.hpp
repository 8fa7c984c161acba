// Codes of sixteen outputs in a register of 512 bits.
#pragma once

#include "isa.hpp"

namespace outrider {

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
struct ByteCodes {
    __m512i v;
    ByteCodes() = default;
    ByteCodes(const Codes<8>& codes, int) : v(codes.first) {}
    ByteCodes(const Codes<4>& codes, int p) : v(p ? codes.second : codes.first) {}
};

}  // namespace outrider
