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

template <class T>
class Memory {
public:
    Memory() = default;
    explicit Memory(std::size_t count) : Memory(count, true) {}
    // Memory that is written before it is read.
    static Memory unset(std::size_t count) { return Memory(count, false); }
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
    Memory(std::size_t count, bool zeroed) : count_(count) {
        constexpr std::size_t huge = std::size_t(1) << 21;
        const std::size_t bytes = product_of({count, sizeof(T)});
        if (!bytes) return;
        void* made = nullptr;
        if (posix_memalign(&made, bytes >= huge ? huge : 64, bytes)) throw std::bad_alloc();
        data_ = static_cast<T*>(made);
#if defined(__linux__)
        // Whole pages only: the rest of one more for every matrix would add up.
        if (bytes >= huge) madvise(made, bytes / huge * huge, MADV_HUGEPAGE);
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
