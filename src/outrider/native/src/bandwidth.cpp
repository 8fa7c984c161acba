// How fast the pool's threads read memory: what bounds a step over weights that no cache holds.
#include <atomic>

#include "guard.hpp"
#include "isa.hpp"
#include "pool.hpp"

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

}  // namespace

const char* outrider_read(const void* data, std::int64_t bytes) {
    return guarded([&]() -> const char* {
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

}  // namespace outrider
