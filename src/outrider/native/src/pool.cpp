#include "pool.hpp"

#include <new>
#include <thread>

#if defined(__linux__)
#include <pthread.h>
#endif

namespace outrider {

struct Pool {
    std::mutex use;   // one work at a time
    std::mutex hold;  // of `work`
    int count = 0;
    std::shared_ptr<Work> work;
    Pool* next = nullptr;
    alignas(64) std::atomic<int> turn{0};
    alignas(64) std::atomic<int> busy{0};
};

namespace {

// The process's pool, and behind it those of threads that have their own. They are never destroyed:
// workers sleep on them until the process ends.
Pool* const common = new Pool;
std::mutex& chain = *new std::mutex;  // of the pools behind it; taken before any of their `use`
thread_local Pool* own = nullptr;

Pool& current() { return own ? *own : *common; }

void serve(Pool* mine, int index) {
    own = mine;
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
// A fork waits for the calls that run, so that a child finds all it shares with calls whole. The
// child has none of the threads: its callers work alone, until they start pools anew.
void before_fork() {
    chain.lock();
    for (Pool* pool = common; pool; pool = pool->next) pool->use.lock();
}
void after_fork() {
    for (Pool* pool = common; pool; pool = pool->next) pool->use.unlock();
    chain.unlock();
}
void in_child() {
    for (Pool* pool = common; pool;) {
        Pool* const next = pool->next;
        new (pool) Pool;
        pool->next = next;
        pool = next;
    }
    new (&chain) std::mutex;
}
#endif

void wait_for_workers(Pool& pool) {
    for (int now; (now = pool.busy.load(std::memory_order_acquire)) != 0;)
        pool.busy.wait(now, std::memory_order_acquire);
}

int start(Pool& pool, int count) {
    constexpr int most = 1024;
    std::lock_guard<std::mutex> lock(pool.use);
    if (pool.count) return pool.count;
#if defined(__linux__)
    static const int watched = pthread_atfork(before_fork, after_fork, in_child);
    if (watched != 0) return 1;  // without threads a fork is safe
#endif
    int started = 1;
    try {
        for (; started < count && started < most; ++started)
            std::thread(serve, &pool, started).detach();
    } catch (...) {  // no memory for another, or the system has enough of them
    }
    return pool.count = started;
}

}  // namespace

int start_pool(int count) { return start(*common, count); }

int start_own_pool(int count) {
    if (!own) {
        Pool* const made = new Pool;
        std::lock_guard<std::mutex> lock(chain);
        made->next = common->next;
        common->next = own = made;
    }
    return start(*own, count);
}

int pool_size() { return current().count ? current().count : 1; }

Turn::Turn() : pool_(current()), lock_(pool_.use) {}

void Turn::run(const std::shared_ptr<Work>& work, int phases, int workers) {
    work->workers = workers < pool_size() ? workers : pool_size();
    if (work->workers > 1) {
        work->counters = std::vector<Counter>(std::size_t(phases) * (work->workers + 1));
        std::lock_guard<std::mutex> hold(pool_.hold);
        pool_.work = work;
        pool_.turn.fetch_add(1, std::memory_order_release);
        pool_.turn.notify_all();
    }
    try {
        Team team(*work, 0);
        work->run(team);
    } catch (...) {
        work->fail(std::current_exception());
    }
    if (work->workers > 1) {
        std::lock_guard<std::mutex> hold(pool_.hold);
        pool_.work.reset();
    }
    if (!work->failed.load(std::memory_order_acquire)) return;
    wait_for_workers(pool_);  // chunks may stand in what the caller is about to leave
    std::rethrow_exception(work->error);
}

void quiet_pool() {
    std::lock_guard<std::mutex> all(chain);
    for (Pool* pool = common; pool; pool = pool->next) {
        std::lock_guard<std::mutex> lock(pool->use);
        wait_for_workers(*pool);
    }
}

}  // namespace outrider
