// What every function of the C interface does with exceptions.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <new>

#define API extern "C" __attribute__((visibility("default")))

namespace outrider {

// Nanoseconds spent in guarded calls: what a step takes beyond them is the caller's own.
inline std::atomic<std::int64_t> spent{0};

struct Timed {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    ~Timed() { spent += std::chrono::nanoseconds(Clock::now() - start).count(); }
};

// A sentence, or null where all went well.
template <class Work>
const char* guarded(Work work) {
    const Timed timed;
    try {
        return work();
    } catch (const std::bad_alloc&) {
        return "there is not enough memory";
    } catch (const std::exception&) {
        return "an unexpected error";
    }
}

}  // namespace outrider
