// Sixteen lanes in four registers of 128 bits.
#pragma once

#include <arm_neon.h>

#include "numbers.hpp"

namespace outrider {

// Rows of a product whose sums stay in registers, of bf16 and of fp32, and how many sums do.
constexpr int MAX_ROWS = 4, MAX_FLOAT_ROWS = 6;  // bf16 wants some to widen numbers in
constexpr int MAX_SUMS = 4;

struct F32x16 {
    float32x4_t v[4];
};
struct Pairs {
    uint32x4_t v[4];
};
struct Ints {
    int32x4_t v[4];
};

template <class Make>
inline F32x16 each(Make make) {
    return {{make(0), make(1), make(2), make(3)}};
}
template <class Make>
inline Ints each_int(Make make) {
    return {{make(0), make(1), make(2), make(3)}};
}
template <class Make>
inline Pairs each_pair(Make make) {
    return {{make(0), make(1), make(2), make(3)}};
}
inline F32x16 splat(float x) {
    return each([&](int) { return vdupq_n_f32(x); });
}
inline F32x16 load(const float* p) {
    return each([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, F32x16 a) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline F32x16 operator+(F32x16 a, F32x16 b) {
    return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline F32x16 operator-(F32x16 a, F32x16 b) {
    return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline F32x16 operator*(F32x16 a, F32x16 b) {
    return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline F32x16 operator/(F32x16 a, F32x16 b) {
    return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline F32x16 where_less(F32x16 x, F32x16 y, F32x16 b, F32x16 a) {
    return each([&](int i) { return vbslq_f32(vcltq_f32(x.v[i], y.v[i]), b.v[i], a.v[i]); });
}
// The CPU's own would return what is no number, whichever operand that is.
inline F32x16 max(F32x16 a, F32x16 b) { return where_less(b, a, a, b); }
inline F32x16 min(F32x16 a, F32x16 b) { return where_less(a, b, a, b); }
inline F32x16 scale2(F32x16 a, F32x16 shifted) {
    return each([&](int i) {
        const int32x4_t n = vshlq_n_s32(vreinterpretq_s32_f32(shifted.v[i]), 23);
        return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v[i]), n));
    });
}
inline F32x16 load(const bf16* p) {
    return each([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
inline Pairs load_pairs(const bf16* p) {
    return each_pair([&](int i) { return vreinterpretq_u32_u16(vld1q_u16(p + 8 * i)); });
}
inline Pairs splat_pair(const bf16* p) {
    std::uint32_t pair;
    std::memcpy(&pair, p, 4);
    return each_pair([&](int) { return vdupq_n_u32(pair); });
}
inline F32x16 low(Pairs a) {
    return each([&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(a.v[i], 16)); });
}
inline F32x16 high(Pairs a) {
    const uint32x4_t mask = vdupq_n_u32(0xffff0000u);
    return each([&](int i) { return vreinterpretq_f32_u32(vandq_u32(a.v[i], mask)); });
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline void store(bf16* p, F32x16 a) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_bf16(vcvt_bf16_f32(a.v[i])));
}
// The CPU rounds the sum of a lane's two products, and then that with the lane, both to odd: the
// bits of a lane depend on nothing beside it. (FEAT_EBF16 has another mode, which a program would
// have to turn on.)
inline F32x16 dot(F32x16 sum, Pairs a, Pairs b) {
    return each([&](int i) {
        return vbfdotq_f32(sum.v[i], vreinterpretq_bf16_u32(a.v[i]),
                           vreinterpretq_bf16_u32(b.v[i]));
    });
}
constexpr bool WIDENS_BF16 = false;
#else
// Rounded to bf16, in the upper half of each lane; the lower is left over.
inline uint32x4_t rounded_up(float32x4_t a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vbslq_u32(vceqq_f32(a, a), up, vorrq_u32(bits, vdupq_n_u32(0x400000)));
}
inline void store(bf16* p, F32x16 a) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vshrn_n_u32(rounded_up(a.v[i]), 16));
}
inline F32x16 as_bf16(F32x16 a) {
    return high(each_pair([&](int i) { return rounded_up(a.v[i]); }));
}
inline F32x16 dot(F32x16 sum, Pairs a, Pairs b) {
    return fma(high(a), high(b), fma(low(a), low(b), sum));
}
constexpr bool WIDENS_BF16 = true;
#endif

inline float total(F32x16 a) {
    const float32x4_t s = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    return vpadds_f32(vadd_f32(vget_low_f32(s), vget_high_f32(s)));
}

inline Ints ints(std::int32_t x) {
    return each_int([&](int) { return vdupq_n_s32(x); });
}
inline Ints operator+(Ints a, Ints b) {
    return each_int([&](int i) { return vaddq_s32(a.v[i], b.v[i]); });
}
inline Ints max(Ints a, Ints b) {
    return each_int([&](int i) { return vmaxq_s32(a.v[i], b.v[i]); });
}
inline Ints magnitude(F32x16 a) {
    const int32x4_t mask = vdupq_n_s32(0x7fffffff);
    return each_int([&](int i) { return vandq_s32(vreinterpretq_s32_f32(a.v[i]), mask); });
}
inline Ints rounded(F32x16 a) {
    return each_int([&](int i) { return vcvtnq_s32_f32(a.v[i]); });
}
inline F32x16 to_float(Ints a) {
    return each([&](int i) { return vcvtq_f32_s32(a.v[i]); });
}
inline F32x16 load_half(const std::uint16_t* p) {
    return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline Ints widened_bytes(int8x16_t bytes) {
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)),
             vmovl_high_s16(high)}};
}
inline F32x16 load_signed(const std::uint8_t* p) {
    return to_float(widened_bytes(vreinterpretq_s8_u8(vld1q_u8(p))));
}
// The low nibbles of sixteen bytes, or with a shift of 4 the high ones.
inline F32x16 load_nibbles(const std::uint8_t* p, int shift) {
    const uint8x16_t bytes = vshlq_u8(vld1q_u8(p), vdupq_n_s8(std::int8_t(-shift)));
    return to_float(widened_bytes(vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)))));
}
inline Ints load_zeros(const std::uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))),
             vreinterpretq_s32_u32(vmovl_high_u16(low)),
             vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
             vreinterpretq_s32_u32(vmovl_high_u16(high))}};
}

// A register of numbers, for noise.
constexpr int WORDS = 4;
typedef std::uint32_t Words __attribute__((vector_size(16)));
struct Wide {  // 64-bit products
    Words high, low;
};
// Compilers do not find the instruction for this.
inline Wide multiply(Words x, std::uint32_t by) {
    const uint32x4_t all = uint32x4_t(x);
    const uint32x4_t first = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(all), by));
    const uint32x4_t second = vreinterpretq_u32_u64(vmull_high_n_u32(all, by));
    return {Words(vuzp2q_u32(first, second)), Words(vuzp1q_u32(first, second))};
}

// Each instruction adds PRODUCTS products to a register of sums.
using Register = int32x4_t;
struct FloatProducts {
    static constexpr int PRODUCTS = 4;
    static Register add(Register sum, Register a, Register b) {
        return vreinterpretq_s32_f32(vfmaq_f32(vreinterpretq_f32_s32(sum), vreinterpretq_f32_s32(a),
                                               vreinterpretq_f32_s32(b)));
    }
};
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct HalfProducts {
    static constexpr int PRODUCTS = 8;
    static Register add(Register sum, Register a, Register b) {
        return vreinterpretq_s32_f32(vbfdotq_f32(
            vreinterpretq_f32_s32(sum), vreinterpretq_bf16_s32(a), vreinterpretq_bf16_s32(b)));
    }
};
#else
using HalfProducts = FloatProducts;
#endif

// Keeps the compiler from knowing what a register holds.
inline void hide(Register& x) { asm volatile("" : "+w"(x)); }

}  // namespace outrider
