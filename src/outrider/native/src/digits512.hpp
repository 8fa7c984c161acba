// Digits of a bundle's rows by AVX-512: the numbers of `digitise_inputs`. Rows stand side by side
// in registers, so that what is taken across a row's lanes, and the order of a bundle, cost the
// same for eight rows as for one.
#pragma once

#include <array>

#include "quantized.hpp"

namespace outrider {

constexpr int EIGHT = 8;  // rows of a bundle, at most

// Lane i is what `join` makes of the lanes of v[i].
template <class Join>
inline __m256i across(const Ints* v, Join join) {
    const auto pairs = [&](int i) {
        return join(Ints{_mm512_unpacklo_epi32(v[i].v, v[i + 1].v)},
                    Ints{_mm512_unpackhi_epi32(v[i].v, v[i + 1].v)});
    };
    const auto fours = [&](int i) {
        const Ints a = pairs(i), b = pairs(i + 2);
        return join(Ints{_mm512_unpacklo_epi64(a.v, b.v)}, Ints{_mm512_unpackhi_epi64(a.v, b.v)});
    };
    const Ints a = fours(0), b = fours(4);
    const __m512i both =
        join(Ints{_mm512_shuffle_i32x4(a.v, b.v, 0x88)}, Ints{_mm512_shuffle_i32x4(a.v, b.v, 0xdd)})
            .v;
    const __m512i other = _mm512_shuffle_i32x4(both, both, 0xb1);
    const __m512i all = join(Ints{both}, Ints{other}).v;
    return _mm512_castsi512_si256(_mm512_shuffle_i32x4(all, all, 0x08));
}

// Writes four lines of ROWS digits of four inputs: those of line i stand in lane i of 128 bits, of
// rows 0 to 3 in `first` and of the others in `second`.
template <int ROWS>
inline void store_lines(std::int8_t* to, __m512i first, __m512i second) {
    static constexpr auto order = [] {
        std::array<std::int64_t, 16> at{};  // pairs of rows
        for (int i = 0; i < 2 * ROWS; ++i) {
            const int line = i / (ROWS / 2), pair = i % (ROWS / 2);
            at[i] = 2 * line + pair % 2 + (pair < 2 ? 0 : 8);
        }
        return at;
    }();
    const auto ordered = [&](int i) {
        return _mm512_permutex2var_epi64(first, _mm512_loadu_si512(&order[i]), second);
    };
    _mm512_storeu_si512(to, ROWS == 4 ? first : ordered(0));
    if constexpr (ROWS > 4)
        _mm512_mask_storeu_epi64(to + 64, __mmask8((1 << (2 * ROWS - 8)) - 1), ordered(8));
}

// A block of ROWS rows, of `block` inputs or, where that is known, of LENGTH: its lines of digits
// of 16 bits in two planes or, where COARSE, of 8 bits in one, and what else a bundle has of it.
// Beginnings are those of outputs with zeros of their own, or with `zero`.
template <int ROWS, bool COARSE, int LENGTH, class T>
inline void digitise_rows(const T* const* x, int block, bool own_zeros, int zero, std::int8_t* to) {
    constexpr int LINE = 4 * ROWS, PLANES = COARSE ? 1 : 2;
    constexpr __mmask8 all = (1 << ROWS) - 1;
    if (LENGTH) block = LENGTH;
    Ints lanes[EIGHT];
    for (int r = 0; r < EIGHT; ++r) {
        lanes[r] = r < ROWS ? magnitude(load(x[r])) : ints(0);
        for (int k = LANES; r < ROWS && k < block; k += LANES)
            lanes[r] = max(lanes[r], magnitude(load(x[r] + k)));
    }
    const __m256i bits = across(lanes, [](Ints a, Ints b) { return max(a, b); });
    const __m256 top = _mm256_castsi256_ps(bits);
    const __m256 most = _mm256_set1_ps(float(COARSE ? HIGHEST_SHORT : HIGHEST_DIGIT));
    const __mmask8 finite = _mm256_cmplt_epi32_mask(bits, _mm256_set1_epi32(0x7f800000));
    const __mmask8 usual = finite & _mm256_cmp_ps_mask(top, _mm256_set1_ps(FAINTEST), _CMP_GE_OQ);
    // Of those that are no numbers the digits do not matter.
    alignas(32) float inverse[EIGHT];
    _mm256_store_ps(inverse, _mm256_maskz_div_ps(usual, most, top));
    const __m256 scale =
        _mm256_mask_blend_ps(finite, _mm256_set1_ps(NAN), _mm256_maskz_div_ps(usual, top, most));
    for (Ints& one : lanes) one = ints(0);
    std::int8_t* line = to + LINE;
    for (int k = 0; k < block; k += 2 * LANES, line += EIGHT * LINE) {
        __m512i words[EIGHT];  // of digits: lane i has those of four inputs i, and i + 4
        for (int r = 0; r < ROWS; ++r) {
            const F32x16 by = splat(inverse[r]);
            const Ints a = rounded(load(x[r] + k) * by);
            const Ints b = LENGTH == LANES ? ints(0) : rounded(load(x[r] + k + LANES) * by);
            lanes[r] = lanes[r] + a + b;
            words[r] = _mm512_packs_epi32(a.v, b.v);
        }
        // Lines of a plane, by what makes bytes of the words of two rows.
        const auto put = [&](std::int8_t* at, auto narrowed) {
            __m512i two[EIGHT / 2] = {};
            for (int r = 0; r < ROWS; r += 2) two[r / 2] = narrowed(words[r], words[r + 1]);
            const auto lines = [&](auto half) {
                const auto four = [&](int i) {
                    return _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(two[i]),
                                                                 _mm512_castsi512_ps(two[i + 1]),
                                                                 half ? 0xdd : 0x88));
                };
                store_lines<ROWS>(at + half * 4 * LINE, four(0), four(2));
            };
            lines(std::integral_constant<int, 0>());
            if (block > LANES) lines(std::integral_constant<int, 1>());
        };
        if constexpr (COARSE) {
            put(line, [](__m512i a, __m512i b) { return _mm512_packs_epi16(a, b); });
        } else {
            const __m512i half = _mm512_set1_epi16(128), low = _mm512_set1_epi16(255);
            put(line, [&](__m512i a, __m512i b) {
                return _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8),
                                          _mm512_srai_epi16(_mm512_add_epi16(b, half), 8));
            });
            put(line + block / 4 * LINE, [&](__m512i a, __m512i b) {
                return _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
            });
        }
    }
    const __m256i sums = across(lanes, [](Ints a, Ints b) { return a + b; });
    const __m256i less = _mm256_sub_epi32(_mm256_setzero_si256(), sums);
    const __m256i begin = own_zeros
                              ? _mm256_or_si256(_mm256_and_si256(less, _mm256_set1_epi32(127)),
                                                _mm256_slli_epi32(_mm256_srai_epi32(less, 7), 16))
                              : _mm256_mullo_epi32(less, _mm256_set1_epi32(zero));
    _mm256_mask_storeu_epi32(to, all, begin);
    to += LINE * (1 + PLANES * block / 4);
    _mm256_mask_storeu_ps(reinterpret_cast<float*>(to), all, scale);
    _mm256_mask_storeu_ps(reinterpret_cast<float*>(to + LINE), all,
                          _mm256_mul_ps(_mm256_cvtepi32_ps(less), scale));
}

}  // namespace outrider
