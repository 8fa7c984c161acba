// Sixteen lanes on any CPU: the compiler's vectors of four.
#pragma once

#include "numbers.hpp"

namespace outrider {

// Rows of a product whose sums stay in registers, of bf16 and of fp32, and how many sums do.
constexpr int MAX_ROWS = 1, MAX_FLOAT_ROWS = 1;
constexpr int MAX_SUMS = 2;
constexpr bool WIDENS_BF16 = false;

typedef float V4 __attribute__((vector_size(16)));
typedef std::uint32_t U4 __attribute__((vector_size(16)));

struct F32x16 {
    V4 v[4];
};
struct Pairs {
    U4 v[4];
};

template <class Make>
inline F32x16 each(Make make) {
    return {{make(0), make(1), make(2), make(3)}};
}
inline V4 load4(const float* p) {
    V4 out;
    std::memcpy(&out, p, 16);
    return out;
}
inline F32x16 splat(float x) {
    return each([&](int) { return V4{x, x, x, x}; });
}
inline F32x16 load(const float* p) {
    return each([&](int i) { return load4(p + 4 * i); });
}
inline void store(float* p, F32x16 a) { std::memcpy(p, a.v, 64); }
inline F32x16 operator+(F32x16 a, F32x16 b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline F32x16 operator-(F32x16 a, F32x16 b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline F32x16 operator*(F32x16 a, F32x16 b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline F32x16 operator/(F32x16 a, F32x16 b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return a * b + c; }
inline F32x16 where_less(F32x16 x, F32x16 y, F32x16 b, F32x16 a) {
    return each([&](int i) {
        U4 mask = (U4)(x.v[i] < y.v[i]);
        return (V4)(((U4)b.v[i] & mask) | ((U4)a.v[i] & ~mask));
    });
}
inline F32x16 max(F32x16 a, F32x16 b) { return where_less(b, a, a, b); }
inline F32x16 min(F32x16 a, F32x16 b) { return where_less(a, b, a, b); }
inline F32x16 scale2(F32x16 a, F32x16 shifted) {
    return each([&](int i) { return (V4)((U4)a.v[i] + ((U4)shifted.v[i] << 23)); });
}
inline F32x16 load(const bf16* p) {
    float wide[16];
    for (int i = 0; i < 16; ++i) wide[i] = widen(p[i]);
    return load(wide);
}
inline void store(bf16* p, F32x16 a) {
    float wide[16];
    store(wide, a);
    for (int i = 0; i < 16; ++i) p[i] = narrow(wide[i]);
}
inline Pairs load_pairs(const bf16* p) {
    Pairs out;
    std::memcpy(out.v, p, 64);
    return out;
}
inline Pairs splat_pair(const bf16* p) {
    std::uint32_t x;
    std::memcpy(&x, p, 4);
    U4 all = {x, x, x, x};
    return {{all, all, all, all}};
}
inline F32x16 low(Pairs a) {
    return each([&](int i) { return (V4)(a.v[i] << 16); });
}
inline F32x16 high(Pairs a) {
    return each([&](int i) { return (V4)(a.v[i] & 0xffff0000u); });
}
inline F32x16 dot(F32x16 sum, Pairs a, Pairs b) {
    return fma(high(a), high(b), fma(low(a), low(b), sum));
}
inline float total(F32x16 a) {
    V4 s = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
    return (s[0] + s[2]) + (s[1] + s[3]);
}

struct Ints {
    std::int32_t v[16];
};
template <class Make>
inline Ints each_int(Make make) {
    Ints out;
    for (int i = 0; i < LANES; ++i) out.v[i] = make(i);
    return out;
}
inline Ints ints(std::int32_t x) {
    return each_int([&](int) { return x; });
}
inline Ints operator+(Ints a, Ints b) {
    return each_int([&](int i) { return a.v[i] + b.v[i]; });
}
inline Ints max(Ints a, Ints b) {
    return each_int([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Ints magnitude(F32x16 a) {
    Ints out;
    std::memcpy(out.v, a.v, 64);
    return each_int([&](int i) { return out.v[i] & 0x7fffffff; });
}
inline Ints rounded(F32x16 a) {
    float near[LANES];
    const F32x16 magic = splat(12582912.0f);  // the sum's last bit is worth 1
    store(near, (a + magic) - magic);
    return each_int([&](int i) { return std::int32_t(near[i]); });
}
inline F32x16 to_float(Ints a) {
    float out[LANES];
    for (int i = 0; i < LANES; ++i) out[i] = float(a.v[i]);
    return load(out);
}
inline F32x16 load_half(const std::uint16_t* p) {
    float out[LANES];
    for (int i = 0; i < LANES; ++i) out[i] = from_half(p[i]);
    return load(out);
}
inline F32x16 load_signed(const std::uint8_t* p) {
    return to_float(each_int([&](int i) { return std::int8_t(p[i]); }));
}
// The low nibbles of sixteen bytes, or with a shift of 4 the high ones.
inline F32x16 load_nibbles(const std::uint8_t* p, int shift) {
    return to_float(each_int([&](int i) { return p[i] >> shift & 15; }));
}
inline Ints load_zeros(const std::uint8_t* p) {
    return each_int([&](int i) { return p[i] | std::int32_t(p[i]) << 23; });
}

// A register of numbers, for noise.
constexpr int WORDS = 4;
typedef std::uint32_t Words __attribute__((vector_size(16)));
struct Wide {  // 64-bit products
    Words high, low;
};
// Compilers do not find the instruction for this.
inline Wide multiply(Words x, std::uint32_t by) {
    Wide out;
    for (int i = 0; i < WORDS; ++i) {
        const std::uint64_t product = std::uint64_t(by) * x[i];
        out.high[i] = std::uint32_t(product >> 32);
        out.low[i] = std::uint32_t(product);
    }
    return out;
}

// Each instruction adds PRODUCTS products to a register of sums.
using Register = V4;
struct FloatProducts {
    static constexpr int PRODUCTS = 4;
    static Register add(Register sum, Register a, Register b) { return a * b + sum; }
};
using HalfProducts = FloatProducts;

// Keeps the compiler from knowing what a register holds.
inline void hide(Register& x) {
#if defined(__x86_64__)
    asm volatile("" : "+x"(x));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(x));
#else
    asm volatile("" : "+m"(x));
#endif
}

}  // namespace outrider
