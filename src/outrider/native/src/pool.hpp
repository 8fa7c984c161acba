// The process's pool of threads: the caller is one of the workers.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

namespace outrider {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Waits until `word` is no longer `seen`: spins for a bounded while, then sleeps.
inline void wait_past(const std::atomic<int>& word, int seen, int spins) {
    for (int i = 0; i < spins; ++i) {
        if (word.load(std::memory_order_acquire) != seen) return;
        pause();
    }
    while (word.load(std::memory_order_acquire) == seen) word.wait(seen);
}

// One share of a job: who of how many, and where they all meet.
struct Team {
    int index, count;
    std::atomic<int>* arrived;
    std::atomic<int>* phase;

    // Returns when all have come; what they wrote before is seen after.
    void meet() const;

    // This worker's part of [0, total), in whole multiples of `grain`.
    void part(int total, int grain, int& first, int& last) const {
        int blocks = (total + grain - 1) / grain;
        first = int(long(blocks) * index / count) * grain;
        last = int(long(blocks) * (index + 1) / count) * grain;
        if (last > total) last = total;
    }
};

using Job = void (*)(void* context, const Team& team);

// Starts `count` workers, the caller among them; at the first call only. Returns how many there are.
int start_pool(int count);
int pool_size();
// Runs `job` on every worker and returns when all are done; callers wait for one another.
void run_pool(Job job, void* context);

}  // namespace outrider
