// Memory that is read next, asked for a little at a time beside other work: asked for at once, the
// requests would wait for each other, and the work for them.
#pragma once

#include <cstddef>

namespace outrider {

// Stretches of the same length, at most MOST. They are asked for side by side: memory answers
// several streams faster than one after the other, if these are a few kilobytes long.
template <int MOST>
class Fetch {
public:
    // `lines` (of 64 bytes) of each stretch, a multiple of 4.
    explicit Fetch(int lines = 0) : bytes_(lines * 64) {}
    void add(const void* from) { from_[count_++] = static_cast<const char*>(from); }
    // All that is asked for.
    int lines() const { return count_ * bytes_ / 64; }
    // Asks for the next `lines`, four by four; returns how many more there would have to be.
    int operator()(int lines) {
        for (; lines > 0 && at_ < bytes_ && count_; lines -= 4) {
            const char* from = from_[turn_] + at_;
            for (int i = 0; i < 256; i += 64) __builtin_prefetch(from + i, 0, 2);
            if (++turn_ == count_) {
                turn_ = 0;
                at_ += 256;
            }
        }
        return lines;
    }

private:
    const char* from_[MOST];
    int bytes_, count_ = 0, turn_ = 0, at_ = 0;
};

// Lines of what is upcoming that are asked for beside 32 inputs of a tile of rows in bf16 or few
// bits. In fp32 it is twice as many, since blocks of the cache are twice as large.
constexpr int ASKED = 4;

// Memory that the next work touches. From each place, in bytes behind `base`, there are `count`
// stretches of `bytes`, a multiple of 256, whose beginnings are `distance` bytes from each other.
class Upcoming {
public:
    Upcoming(const void* base, const std::size_t* first, const std::size_t* last, int count,
             std::size_t distance, int bytes)
        : base_(static_cast<const char*>(base)),
          place_(first),
          last_(last),
          count_(count),
          distance_(distance),
          bytes_(bytes) {}
    // Asks for the next `lines` (of 64 bytes), four by four.
    void operator()(int lines) {
        for (; lines > 0 && place_ != last_; lines -= 4) {
            const char* from = base_ + *place_ + turn_ * distance_ + at_;
            for (int i = 0; i < 256; i += 64) __builtin_prefetch(from + i, 0, 2);
            if ((at_ += 256) < bytes_) continue;
            at_ = 0;
            if (++turn_ < count_) continue;
            turn_ = 0;
            ++place_;
        }
    }

private:
    const char* const base_;
    const std::size_t* place_;
    const std::size_t* const last_;
    const int count_;
    const std::size_t distance_;
    const int bytes_;
    int turn_ = 0, at_ = 0;
};

}  // namespace outrider
