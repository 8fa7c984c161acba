#include "pool.hpp"

#include <new>
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
            try {
                Team team(*work, index);
                work->run(team);
            } catch (...) {  // it holds no chunk here, and the others do the rest
            }
        }
        work.reset();
        mine->busy.fetch_sub(1, std::memory_order_acq_rel);
        mine->busy.notify_all();
    }
}

#if defined(__linux__)
// A fork waits for the call that runs, so that a child finds all it shares with calls whole. The
// child has none of the threads: its callers work alone, with a pool of their own.
void before_fork() { pool->use.lock(); }
void after_fork() { pool->use.unlock(); }
void in_child() { new (pool) Pool; }
#endif

void wait_for_workers() {
    for (int now; (now = pool->busy.load(std::memory_order_acquire)) != 0;)
        pool->busy.wait(now, std::memory_order_acquire);
}

}  // namespace

int start_pool(int count) {
    constexpr int most = 1024;
    std::lock_guard<std::mutex> lock(pool->use);
    if (pool->count) return pool->count;
#if defined(__linux__)
    static const int watched = pthread_atfork(before_fork, after_fork, in_child);
    if (watched != 0) return 1;  // without threads a fork is safe
#endif
    int started = 1;
    try {
        for (; started < count && started < most; ++started)
            std::thread(serve, pool, started).detach();
    } catch (...) {  // no memory for another, or the system has enough of them
    }
    return pool->count = started;
}

int pool_size() { return pool->count ? pool->count : 1; }

Turn::Turn() : lock_(pool->use) {}

void Turn::run(const std::shared_ptr<Work>& work, int phases, int workers) {
    work->workers = workers < pool_size() ? workers : pool_size();
    if (work->workers > 1) {
        work->counters = std::vector<Counter>(std::size_t(phases) * (work->workers + 1));
        std::lock_guard<std::mutex> hold(pool->hold);
        pool->work = work;
        pool->turn.fetch_add(1, std::memory_order_release);
        pool->turn.notify_all();
    }
    try {
        Team team(*work, 0);
        work->run(team);
    } catch (...) {
        work->fail(std::current_exception());
    }
    if (work->workers > 1) {
        std::lock_guard<std::mutex> hold(pool->hold);
        pool->work.reset();
    }
    if (!work->failed.load(std::memory_order_acquire)) return;
    wait_for_workers();  // chunks may stand in what the caller is about to leave
    std::rethrow_exception(work->error);
}

void quiet_pool() {
    std::lock_guard<std::mutex> lock(pool->use);
    wait_for_workers();
}

}  // namespace outrider
