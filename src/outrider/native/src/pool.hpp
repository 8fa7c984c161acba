// Pools of threads: the process's, and those of threads with one of their own. The caller is one of
// the workers.
//
// Work is dealt out in chunks, phase by phase. Nobody waits for a worker that holds no chunk: one
// that sleeps, or whose core is busy with another process, is simply not there.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace outrider {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // `yield` takes no time
#endif
}

// Spins of about 100 us in all: the wait for a chunk, and the pause between two forwards of a step.
constexpr int SPINS = 4000;

struct alignas(64) Counter {
    std::atomic<int> value{0};
};

class Team;

// What a pool runs: every worker calls `run`, which shares out the same phases in the same order.
// A worker may still be in `run` after Turn::run returned, with no chunk left to take: what `run`
// reads outside chunks must be the work's own, or outlive quiet_pool().
struct Work {
    virtual ~Work() = default;
    virtual void run(Team& team) = 0;

    // Keeps the first exception; chunks that come after it are counted, but not run.
    void fail(std::exception_ptr what) {
        if (!failed.exchange(true, std::memory_order_relaxed)) error = std::move(what);
    }

    int workers = 1;
    std::vector<Counter> counters;  // a phase: chunks done, then chunks taken of each worker's part
    std::atomic<bool> failed{false};
    std::exception_ptr error;
};

class Team {
public:
    Team(Work& work, int index) : index(index), count(work.workers), work_(work) {}
    const int index, count;

    // Shares [0, total) out in multiples of `grain`, each worker's own part first, and returns when
    // all is done: what any worker wrote in it is seen after. body(first, last).
    template <class Body>
    void share(int total, int grain, Body body) {
        if (count == 1) {
            if (total > 0) body(0, total);
            return;
        }
        const int chunks = (total + grain - 1) / grain;
        Counter* phase = work_.counters.data() + std::size_t(at_++) * (count + 1);
        std::atomic<int>& done = phase->value;
        int mine = 0;
        for (int i = 0; i < count && done.load(std::memory_order_acquire) < chunks; ++i) {
            const int owner = (index + i) % count;
            const int begin = int(long(chunks) * owner / count);
            const int end = int(long(chunks) * (owner + 1) / count);
            std::atomic<int>& taken = phase[1 + owner].value;
            while (taken.load(std::memory_order_relaxed) < end - begin) {
                const int chunk = begin + taken.fetch_add(1, std::memory_order_relaxed);
                if (chunk >= end) break;
                const int first = chunk * grain;
                run_chunk(body, first, grain < total - first ? first + grain : total);
                ++mine;
            }
        }
        if (mine) {
            done.fetch_add(mine, std::memory_order_acq_rel);
            done.notify_all();
        }
        for (int spin = 0;; ++spin) {
            const int now = done.load(std::memory_order_acquire);
            if (now >= chunks) return;
            if (spin < SPINS)
                pause();
            else
                done.wait(now, std::memory_order_acquire);
        }
    }

private:
    // An exception must not leave a chunk: the others would wait for it for ever.
    template <class Body>
    void run_chunk(Body& body, int first, int last) {
        if (work_.failed.load(std::memory_order_relaxed)) return;
        try {
            body(first, last);
        } catch (...) {
            work_.fail(std::current_exception());
        }
    }

    Work& work_;
    int at_ = 0;
};

// Starts `count` workers, the caller among them; at the first call only. Returns how many there
// are: fewer where the system starts no more threads.
int start_pool(int count);
// The same of a pool for the calls of this thread alone; its workers run where this thread may now.
int start_own_pool(int count);
// That of the caller's pool.
int pool_size();

struct Pool;

// The caller's turn with its pool: nobody else's work runs on it meanwhile, and no fork happens.
class Turn {
public:
    Turn();
    // Runs `work`, of at most `phases` phases, on `workers` workers at most. Throws what a worker
    // threw; none of them looks at the work any more then.
    void run(const std::shared_ptr<Work>& work, int phases, int workers);

private:
    Pool& pool_;
    std::unique_lock<std::mutex> lock_;
};

// Returns when no worker of any pool looks at any work.
void quiet_pool();

}  // namespace outrider
