#include "pool.hpp"

#include <mutex>
#include <thread>

#if defined(__linux__)
#include <pthread.h>
#endif

namespace outrider {
namespace {

struct Pool {
    std::mutex use;   // one work at a time
    std::mutex hold;  // of `work`
    int count = 0;
    std::shared_ptr<Work> work;
    alignas(64) std::atomic<int> turn{0};
    alignas(64) std::atomic<int> busy{0};
};

// Never destroyed: workers sleep on it until the process ends.
Pool* pool = new Pool;

void serve(Pool* mine, int index) {
    int seen = 0;
    for (;;) {
        for (int spin = 0; mine->turn.load(std::memory_order_acquire) == seen; ++spin) {
            if (spin < SPINS)
                pause();
            else
                mine->turn.wait(seen, std::memory_order_acquire);
        }
        std::shared_ptr<Work> work;
        {
            std::lock_guard<std::mutex> lock(mine->hold);
            seen = mine->turn.load(std::memory_order_acquire);
            work = mine->work;
            if (work) mine->busy.fetch_add(1, std::memory_order_acq_rel);
        }
        if (!work) continue;
        if (index < work->workers) {
            Team team(*work, index);
            work->run(team);
        }
        work.reset();
        mine->busy.fetch_sub(1, std::memory_order_acq_rel);
        mine->busy.notify_all();
    }
}

// A child of fork has none of the threads, and perhaps a locked mutex: its callers work alone.
void forget() { pool = new Pool; }

}  // namespace

int start_pool(int count) {
    std::lock_guard<std::mutex> lock(pool->use);
    if (pool->count) return pool->count;
#if defined(__linux__)
    static bool watched = false;
    if (!watched) pthread_atfork(nullptr, nullptr, forget);
    watched = true;
#endif
    pool->count = count;
    for (int i = 1; i < count; ++i) std::thread(serve, pool, i).detach();
    return count;
}

int pool_size() { return pool->count ? pool->count : 1; }

void run_pool(std::shared_ptr<Work> work, int phases, int workers) {
    std::lock_guard<std::mutex> lock(pool->use);
    work->workers = workers < pool_size() ? workers : pool_size();
    if (work->workers > 1) {
        work->counters = std::vector<Counter>(std::size_t(phases) * (work->workers + 1));
        std::lock_guard<std::mutex> hold(pool->hold);
        pool->work = work;
        pool->turn.fetch_add(1, std::memory_order_release);
        pool->turn.notify_all();
    }
    Team team(*work, 0);
    work->run(team);
    if (work->workers > 1) {
        std::lock_guard<std::mutex> hold(pool->hold);
        pool->work.reset();
    }
}

void quiet_pool() {
    std::lock_guard<std::mutex> lock(pool->use);
    for (int now; (now = pool->busy.load(std::memory_order_acquire)) != 0;)
        pool->busy.wait(now, std::memory_order_acquire);
}

}  // namespace outrider
