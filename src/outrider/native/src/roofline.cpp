// What bounds a step. Of few rows: how fast the pool's threads read memory. Of many: how many
// products the cores can do, in registers alone, by the fastest instruction of the set for each
// kind of numbers.
#include <atomic>

#include "guard.hpp"
#include "pool.hpp"
#include "sums.hpp"

namespace outrider {
namespace {

constexpr int PIECE = 1 << 15;  // floats; 128 KiB

struct Reading : Work {
    const float* data;
    int pieces;
    std::atomic<float> sum{0};

    void run(Team& team) override {
        F32x16 sums[4] = {splat(0), splat(0), splat(0), splat(0)};
        team.share(pieces, 8, [&](int first, int last) {
            const float* p = data + std::size_t(first) * PIECE;
            const float* end = data + std::size_t(last) * PIECE;
            for (; p < end; p += 4 * LANES) {
                for (int i = 0; i < 4; ++i) __builtin_prefetch(p + PIECE / 2 + i * LANES, 0, 2);
                for (int i = 0; i < 4; ++i) sums[i] = sums[i] + load(p + i * LANES);
            }
        });
        float out[LANES];
        store(out, (sums[0] + sums[1]) + (sums[2] + sums[3]));
        sum.store(out[0], std::memory_order_relaxed);  // so that no read is left out
    }
};

constexpr int STEPS = 1 << 14;  // in a piece
constexpr int SUMS = 12;        // that do not wait for each other

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

const char* outrider_read(const void* data, std::int64_t bytes) {
    return guarded({}, [&]() -> const char* {
        constexpr std::int64_t size = PIECE * sizeof(float);
        if (bytes < 0 || bytes % size || bytes / size > 1 << 30)
            return "memory is read in pieces of 128 KiB";
        const auto work = std::make_shared<Reading>();
        work->data = static_cast<const float*>(data);
        work->pieces = int(bytes / size);
        Turn().run(work, 1, pool_size());
        quiet_pool();  // what is read is the caller's
        return nullptr;
    });
}

const char* outrider_peak(int kind, int pieces, std::int64_t* products) {
    return guarded({}, [&]() -> const char* {
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
