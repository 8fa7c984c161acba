// How many products the cores can do: what bounds a forward of many rows. Registers alone, without
// loads, by the fastest instruction of the set for each kind of numbers.
#include "guard.hpp"
#include "isa.hpp"
#include "pool.hpp"

namespace outrider {
namespace {

constexpr int STEPS = 1 << 14;  // in a piece
constexpr int SUMS = 12;        // that do not wait for each other

// Each instruction adds PRODUCTS products to a register of sums.
#if defined(__AVX512F__)
using Register = __m512i;
struct FloatProducts {
    static constexpr int PRODUCTS = 16;
    static Register add(Register sum, Register a, Register b) {
        return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
    }
};
#elif defined(__AVX2__)
using Register = __m256i;
struct FloatProducts {
    static constexpr int PRODUCTS = 8;
    static Register add(Register sum, Register a, Register b) {
        return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
    }
};
#else
using Register = V4;
struct FloatProducts {
    static constexpr int PRODUCTS = 4;
    static Register add(Register sum, Register a, Register b) { return a * b + sum; }
};
#endif

#if defined(__AVX512BF16__)
struct HalfProducts {
    static constexpr int PRODUCTS = 32;
    static Register add(Register sum, Register a, Register b) {
        return (Register)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
};
#else
using HalfProducts = FloatProducts;
#endif

// Codes and digits: WordProducts of 16 bits, ByteProducts of 8, NibbleProducts of codes of 4 bits and digits of 8.
#if defined(__AVX512VNNI__)
struct ByteProducts {
    static constexpr int PRODUCTS = 64;
    static Register add(Register sum, Register a, Register b) {
        return _mm512_dpbusd_epi32(sum, a, b);
    }
};
struct WordProducts : ByteProducts {
    static constexpr int PRODUCTS = ByteProducts::PRODUCTS / 2;  // a digit is two bytes
};
using NibbleProducts = ByteProducts;
#elif defined(__AVX512F__)
struct WordProducts {
    static constexpr int PRODUCTS = 32;
    static Register add(Register sum, Register a, Register b) {
        return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
    }
};
struct NibbleProducts {
    static constexpr int PRODUCTS = 64;
    static Register add(Register sum, Register a, Register b) {
        return _mm512_add_epi16(sum, _mm512_maddubs_epi16(a, b));
    }
};
using ByteProducts = WordProducts;
#elif defined(__AVXVNNI__)
struct WordProducts {
    static constexpr int PRODUCTS = 16;
    static Register add(Register sum, Register a, Register b) {
        return _mm256_dpwssd_avx_epi32(sum, a, b);
    }
};
struct ByteProducts {
    static constexpr int PRODUCTS = 32;
    static Register add(Register sum, Register a, Register b) {
        return _mm256_dpbusd_avx_epi32(sum, a, b);
    }
};
using NibbleProducts = ByteProducts;
#elif defined(__AVX2__)
struct WordProducts {
    static constexpr int PRODUCTS = 16;
    static Register add(Register sum, Register a, Register b) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    }
};
struct NibbleProducts {
    static constexpr int PRODUCTS = 32;
    static Register add(Register sum, Register a, Register b) {
        return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
    }
};
using ByteProducts = WordProducts;
#else
using WordProducts = FloatProducts;
using ByteProducts = FloatProducts;
using NibbleProducts = FloatProducts;
#endif

// Keeps the compiler from knowing what a register holds.
inline void hide(Register& x) {
#if defined(__AVX512F__)
    asm volatile("" : "+v"(x));
#elif defined(__x86_64__)
    asm volatile("" : "+x"(x));
#else
    asm volatile("" : "+m"(x));
#endif
}

template <class Instruction>
struct Counting : Work {
    int pieces = 0;

    void run(Team& team) override {
        team.share(pieces, 1, [](int first, int last) {
            Register sums[SUMS] = {}, a = {}, b = {};
            hide(b);
            for (int i = 0; i < (last - first) * STEPS; ++i)
#pragma GCC unroll 12
                for (Register& sum : sums) {
                    hide(a);
                    sum = Instruction::add(sum, a, b);
                    hide(sum);
                }
        });
    }
};

template <class Instruction>
std::int64_t run(int pieces) {
    const auto work = std::make_shared<Counting<Instruction>>();
    work->pieces = pieces;
    Turn().run(work, 1, pool_size());
    return std::int64_t(pieces) * STEPS * SUMS * Instruction::PRODUCTS;
}

}  // namespace

const char* outrider_peak(int kind, int pieces, std::int64_t* products) {
    return guarded([&]() -> const char* {
        if (kind < PEAK_FLOAT32 || kind > PEAK_DIGITS8_CODES4 || pieces < 1 || pieces > 1 << 16)
            return "there is no such kind of products, or no such number of pieces";
        *products = kind == PEAK_FLOAT32    ? run<FloatProducts>(pieces)
                    : kind == PEAK_BFLOAT16 ? run<HalfProducts>(pieces)
                    : kind == PEAK_DIGITS16 ? run<WordProducts>(pieces)
                    : kind == PEAK_DIGITS8  ? run<ByteProducts>(pieces)
                                            : run<NibbleProducts>(pieces);
        return nullptr;
    });
}

}  // namespace outrider
