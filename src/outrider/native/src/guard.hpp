// The border of the C interface: no exception crosses it, and no object goes while a call is in it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <new>

#include "outrider.h"
#include "pool.hpp"

namespace outrider {

// Nanoseconds spent in guarded calls: what a step takes beyond them is the caller's own.
inline std::atomic<std::int64_t> spent{0};
// Those of them that rows of logits took, see each_row.
inline std::atomic<std::int64_t> sampled{0};

struct Timed {
    using Clock = std::chrono::steady_clock;
    explicit Timed(std::atomic<std::int64_t>& to) : to(to) {}
    ~Timed() { to += std::chrono::nanoseconds(Clock::now() - start).count(); }
    std::atomic<std::int64_t>& to;
    const Clock::time_point start = Clock::now();
};

// An object of the C interface. Its owner and every call that works on it are its users; the last
// one to leave deletes it.
class Counted {
public:
    Counted() = default;
    Counted(const Counted&) = delete;
    virtual ~Counted() = default;

    void enter() const { users_.fetch_add(1, std::memory_order_relaxed); }
    void leave() const {
        if (users_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        quiet_pool();
        delete this;
    }

private:
    mutable std::atomic<int> users_{1};
};

// Keeps an object for as long as it is in scope; null keeps nothing.
class Using {
public:
    explicit Using(const Counted* object) : object_(object) {
        if (object_) object_->enter();
    }
    Using(Using&& other) noexcept : object_(other.object_) { other.object_ = nullptr; }
    Using& operator=(Using&&) = delete;
    ~Using() {
        if (object_) object_->leave();
    }

private:
    const Counted* object_;
};

// Keeps the `objects` (or null) of a call while `work` runs, which returns a sentence that says
// what is wrong, or null.
template <class Work>
const char* guarded(std::initializer_list<const Counted*> objects, Work work) noexcept {
    struct Users {
        explicit Users(std::initializer_list<const Counted*> all) : all(all) {
            for (const Counted* object : all)
                if (object) object->enter();
        }
        ~Users() {
            for (const Counted* object : all)
                if (object) object->leave();
        }
        const std::initializer_list<const Counted*> all;
    };
    const Timed timed(spent);
    const Users users(objects);
    try {
        return work();
    } catch (const std::bad_alloc&) {
        return "there is not enough memory";
    } catch (...) {
        return "an unexpected error";
    }
}

// Gives an owner's object back.
inline void release(const Counted* object) noexcept {
    if (object) object->leave();
}

}  // namespace outrider
