// Memory: zeroed at once, on cache-line borders and in large pages, or when first used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <utility>

#include <sys/mman.h>

namespace outrider {

// The largest count of anything: what is padded, or taken twice, still fits 32 bits.
constexpr std::int64_t MOST = 1 << 30;

inline int padded(int count, int multiple) { return (count + multiple - 1) / multiple * multiple; }

// The product of sizes. Throws bad_alloc where it is more than memory can be.
inline std::size_t product_of(std::initializer_list<std::size_t> sizes) {
    std::size_t all = 1;
    for (std::size_t size : sizes)
        if (__builtin_mul_overflow(all, size, &all)) throw std::bad_alloc();
    if (all > PTRDIFF_MAX) throw std::bad_alloc();
    return all;
}

constexpr std::size_t LARGE_PAGE = std::size_t(1) << 21;

// Zeroed pages of the process's own, on the border of a large one.
class Pages {
public:
    Pages(std::size_t bytes, int access) : bytes(bytes) {
        constexpr int kind = MAP_PRIVATE | MAP_ANONYMOUS;
        if (bytes > PTRDIFF_MAX) throw std::bad_alloc();
        void* room = mmap(nullptr, bytes + LARGE_PAGE, access, kind, -1, 0);
        if (room == MAP_FAILED) throw std::bad_alloc();
        char* const first = static_cast<char*>(room);
        data = first + (LARGE_PAGE - reinterpret_cast<std::uintptr_t>(first) % LARGE_PAGE);
        munmap(first, std::size_t(data - first));
        char* const end = data + (bytes + 4095) / 4096 * 4096;
        if (end < first + bytes + LARGE_PAGE)
            munmap(end, std::size_t(first + bytes + LARGE_PAGE - end));
    }
    Pages(const Pages&) = delete;
    ~Pages() { munmap(data, bytes); }

    char* data;
    const std::size_t bytes;
};

// Zeroed memory for weights. Arrays share large pages, since those of a narrow model are smaller
// than one. Returns the array, and what it lies in.
inline std::pair<void*, std::shared_ptr<void>> room_for_weights(std::size_t bytes) {
    constexpr std::size_t block = 16 * LARGE_PAGE;
    thread_local std::weak_ptr<Pages> latest;  // of a thread alone: a fork finds no lock taken
    thread_local std::size_t used = 0;
    const auto make = [](std::size_t bytes) {
        const auto pages = std::make_shared<Pages>(bytes, PROT_READ | PROT_WRITE);
#if defined(__linux__)
        madvise(pages->data, bytes, MADV_HUGEPAGE);
#endif
        return pages;
    };
    if (bytes > block / 2) {
        const auto own = make(bytes);
        return {own->data, own};
    }
    std::shared_ptr<Pages> pages = latest.lock();
    if (!pages || block - used < bytes) {
        latest = pages = make(block);
        used = 0;
    }
    char* const room = pages->data + used;
    used += (bytes + 63) / 64 * 64;
    return {room, std::move(pages)};
}

template <class T>
class Memory {
public:
    Memory() = default;
    explicit Memory(std::size_t count) : Memory(count, true) {}
    // Memory that is written before it is read.
    static Memory unset(std::size_t count) { return Memory(count, false); }
    // Zeroed memory that is read in every step.
    static Memory of_weights(std::size_t count) {
        const std::size_t bytes = product_of({count, sizeof(T)});
        if (bytes < SMALL) return Memory(count);
        auto [data, owner] = room_for_weights(bytes);
        return Memory(static_cast<T*>(data), count, std::move(owner));
    }
    // What lies in memory of another owner, who keeps it for as long.
    Memory(T* data, std::size_t count, std::shared_ptr<void> owner)
        : data_(data), count_(count), owner_(std::move(owner)) {}
    Memory(Memory&& other) noexcept { *this = std::move(other); }
    Memory& operator=(Memory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        std::swap(owner_, other.owner_);
        return *this;
    }
    ~Memory() {
        if (!owner_) std::free(data_);
    }

    T* data() const { return data_; }
    std::size_t size() const { return count_; }
    // Room for `count`, zeroed anew when it has to grow.
    T* reserve(std::size_t count) {
        if (count > count_) *this = Memory(count + count / 2);
        return data_;
    }

    std::size_t bytes() const { return count_ * sizeof(T); }
    bool same(const Memory& other) const {
        return count_ == other.count_ && (!count_ || !std::memcmp(data_, other.data_, bytes()));
    }

private:
    static constexpr std::size_t SMALL = 1 << 16;  // bytes that no large page is worth

    Memory(std::size_t count, bool zeroed) : count_(count) {
        const std::size_t bytes = product_of({count, sizeof(T)});
        if (!bytes) return;
        void* made = nullptr;
        if (posix_memalign(&made, bytes >= LARGE_PAGE ? LARGE_PAGE : 64, bytes))
            throw std::bad_alloc();
        data_ = static_cast<T*>(made);
#if defined(__linux__)
        // Whole pages only: the rest of one more for every matrix would add up.
        if (bytes >= LARGE_PAGE) madvise(made, bytes / LARGE_PAGE * LARGE_PAGE, MADV_HUGEPAGE);
#endif
        if (zeroed) std::memset(made, 0, bytes);
    }
    T* data_ = nullptr;
    std::size_t count_ = 0;
    std::shared_ptr<void> owner_;  // null: it is its own
};

// Zeroed memory whose pages the system gives when they are first written to.
class LazyMemory {
public:
    LazyMemory() = default;
    explicit LazyMemory(std::size_t bytes) : bytes_(bytes) {
        if (!bytes) return;
        constexpr int access = PROT_READ | PROT_WRITE;
        // What no page is written to is promised to nobody.
        constexpr int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* made = mmap(nullptr, bytes, access, kind, -1, 0);
        if (made == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<char*>(made);
#if defined(__linux__)
        // The first token of a sequence would take a large page in every layer: 60 MB with 30
        // layers.
        madvise(made, bytes, MADV_NOHUGEPAGE);
#endif
    }
    LazyMemory(LazyMemory&& other) noexcept { *this = std::move(other); }
    LazyMemory& operator=(LazyMemory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~LazyMemory() {
        if (data_) munmap(data_, bytes_);
    }

    char* data() const { return data_; }

private:
    char* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace outrider
