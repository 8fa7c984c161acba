// Exact sums of products of codes (bytes) and digits (int16) on every instruction set.
//
// A row's digits take 2 * half bytes. With AVX-512 VNNI and Arm's dot products these are [2][half]
// bytes, digit = 256 * the first + the second (-128 to 127); elsewhere int16, on x86 of every four
// inputs the first, the third, the second and the fourth, which is how pairs of codes fall out of
// their words. Digits of 8 bits are bytes where `in_bytes` says so of the codes' bits.
//
// Sums take the codes and digits of four inputs at a time, unpacked once for all rows: a step of a
// cell, see packed.hpp. What is kept in less than 32 bits meanwhile is taken up by `settle`, after
// UNSETTLED steps at the latest. Registers hold REGISTERS of each sum, and the sums of ROWS rows,
// or of BUNDLE. The products of a set that `outrider_peak` counts stand beside its sums.
#pragma once

#if defined(__AVX512VNNI__)
#include "sums_vnni512.hpp"
#elif defined(__AVX512F__)
#include "sums_avx512.hpp"
#elif defined(__AVXVNNI__)
#include "sums_avxvnni.hpp"
#elif defined(__AVX2__)
#define IN_HALVES  // sums are of eight outputs rather than of sixteen
#include "sums_avx2.hpp"
#elif defined(OUTRIDER_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include "sums_dotprod.hpp"
#elif defined(OUTRIDER_NEON)
#include "sums_neon.hpp"
#else
#include "sums_any.hpp"
#endif

namespace outrider {

// Steps whose products with digits of 8 bits fit 16 bits, two products to each.
template <int BITS>
constexpr int UNSETTLED = BITS == 5   ? 4
                          : BITS == 6 ? 2
                                      : 8;

// Whether digits of 8 bits are bytes beside codes of `bits`.
constexpr bool in_bytes(int bits) {
    return (bits == 8 || bits == MAPPED ? Short<8>::DIGIT : Short<4>::DIGIT) == 1;
}

}  // namespace outrider
