// Where keys and values lie: in blocks of 16 slots, as products want their weights.
//
// A page is, head after head, blocks of keys, [head_dim / pair][16 slots][pair], and blocks of
// values, [16 slots / pair][head_dim][pair]. Slots that pad a page to whole blocks are never seen.
#pragma once

#include <cstdint>

#include "memory.hpp"
#include "numbers.hpp"

namespace outrider {

constexpr int BLOCK = LANES;  // slots of a block

template <class T>
struct Cache {
    T* base;  // of a layer
    std::size_t page_elements;
    int page_size, width;  // width: of a head, padded

    int blocks() const { return (page_size + BLOCK - 1) / BLOCK; }  // of a page
    std::size_t plane() const { return std::size_t(blocks()) * BLOCK * width; }

    T* keys(int page, int block, int head) const {
        return base + page * page_elements + head * 2 * plane() +
               std::size_t(block) * BLOCK * width;
    }
    T* values(int page, int block, int head) const { return keys(page, block, head) + plane(); }

    // Elements from `base` to the block of keys of the first head that a slot is in.
    std::size_t place(int slot) const {
        return slot / page_size * page_elements +
               std::size_t(slot % page_size / BLOCK) * BLOCK * width;
    }
    T* keys_of(int slot, int head) const { return base + place(slot) + head * 2 * plane(); }
    int lane_of(int slot) const { return slot % page_size % BLOCK; }

    static constexpr int pair = PER_LANE<T>;
    static T& key_at(T* block, int lane, int d) {
        return block[std::size_t(d / pair) * BLOCK * pair + lane * pair + d % pair];
    }
    T& value_at(T* block, int lane, int d) const {
        return block[std::size_t(lane / pair) * width * pair + d * pair + lane % pair];
    }

    void put(int slot, int head, const T* key, const T* value) const {
        const int lane = lane_of(slot);
        T* k = keys_of(slot, head);
        T* v = k + plane();
        for (int d = 0; d < width; d += pair)
            std::memcpy(&key_at(k, lane, d), key + d, pair * sizeof(T));
        for (int d = 0; d < width; ++d) value_at(v, lane, d) = value[d];
    }
    void get(int slot, int head, T* key, T* value) const {
        const int lane = lane_of(slot);
        T* k = keys_of(slot, head);
        T* v = k + plane();
        for (int d = 0; d < width; ++d) key[d] = key_at(k, lane, d);
        for (int d = 0; d < width; ++d) value[d] = value_at(v, lane, d);
    }
    // Copies the entry of a slot to a lane of a block elsewhere.
    void copy(int slot, int head, T* to_keys, T* to_values, int to) const {
        const int lane = lane_of(slot);
        T* k = keys_of(slot, head);
        T* v = k + plane();
        for (int d = 0; d < width; d += pair)
            std::memcpy(&key_at(to_keys, to, d), &key_at(k, lane, d), pair * sizeof(T));
        for (int d = 0; d < width; ++d) value_at(to_values, to, d) = value_at(v, lane, d);
    }
};

}  // namespace outrider
