#include "pool.hpp"

#include <mutex>

#if defined(__linux__)
#include <pthread.h>
#endif

namespace outrider {
namespace {

// About 100 us each: the pause between two forwards of one step, and that between two layers when
// the other core is at work for somebody else.
constexpr int IDLE_SPINS = 4000;
constexpr int MEETING_SPINS = 4000;

struct Pool {
    std::mutex use;
    int count = 0;
    Job job = nullptr;
    void* context = nullptr;
    alignas(64) std::atomic<int> turn{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> phase{0};
};

// Never destroyed: workers sleep on it until the process ends.
Pool* pool = new Pool;

void work(int index) {
    int seen = 0;
    for (;;) {
        wait_past(pool->turn, seen, IDLE_SPINS);
        seen = pool->turn.load(std::memory_order_acquire);
        Team team{index, pool->count, &pool->arrived, &pool->phase};
        pool->job(pool->context, team);
        team.meet();
    }
}

// A child of fork has none of the threads, and perhaps a locked mutex: it starts over.
void forget() { pool = new Pool; }

}  // namespace

void Team::meet() const {
    if (count == 1) return;
    int now = phase->load(std::memory_order_relaxed);
    if (arrived->fetch_add(1, std::memory_order_acq_rel) == count - 1) {
        arrived->store(0, std::memory_order_relaxed);
        phase->store(now + 1, std::memory_order_release);
        phase->notify_all();
    } else {
        wait_past(*phase, now, MEETING_SPINS);
    }
}

int start_pool(int count) {
    std::lock_guard<std::mutex> hold(pool->use);
    if (pool->count) return pool->count;
#if defined(__linux__)
    static bool watched = false;
    if (!watched) pthread_atfork(nullptr, nullptr, forget);
    watched = true;
#endif
    pool->count = count;
    for (int i = 1; i < count; ++i) std::thread(work, i).detach();
    return count;
}

int pool_size() { return pool->count ? pool->count : 1; }

void run_pool(Job job, void* context) {
    std::lock_guard<std::mutex> hold(pool->use);
    int count = pool->count ? pool->count : 1;
    Team team{0, count, &pool->arrived, &pool->phase};
    if (count > 1) {
        pool->job = job;
        pool->context = context;
        pool->turn.fetch_add(1, std::memory_order_release);
        pool->turn.notify_all();
    }
    job(context, team);
    team.meet();
}

}  // namespace outrider
