// Where keys and values lie: in blocks of 16 slots, as products want their weights.
//
// A page is, head after head, blocks of keys, [head_dim / pair][16 slots][pair], and blocks of
// values, [16 slots / pair][head_dim][pair], or of both [head_dim / 32] groups of codes. Slots that
// pad a page to whole blocks are never seen.
#pragma once

#include <cstdint>

#include "memory.hpp"
#include "numbers.hpp"

namespace outrider {

constexpr int BLOCK = LANES;  // slots of a block

// Numbers of 8 bits: 32 of a slot share a scale, and the code of x is x / scale.
struct Codes {
    static constexpr int WIDTH = 32;
    std::int8_t codes[WIDTH * BLOCK];  // keys [32][16 slots], values [16 slots][32]
    bf16 scales[BLOCK];
};
// Those of one slot.
struct CodeRow {
    std::int8_t codes[Codes::WIDTH];
    bf16 scale;
};

// How many numbers an element of the cache holds.
template <class E>
constexpr int NUMBERS = 1;
template <>
inline constexpr int NUMBERS<Codes> = Codes::WIDTH * BLOCK;

// Where elements lie.
template <class E>
struct Places {
    E* base;  // of a layer
    std::size_t page_elements;
    int page_size, width;  // width: of a head, padded

    int blocks() const { return (page_size + BLOCK - 1) / BLOCK; }  // of a page
    int block_elements() const { return BLOCK * width / NUMBERS<E>; }
    std::size_t block_bytes() const { return block_elements() * sizeof(E); }
    std::size_t plane() const { return std::size_t(blocks()) * block_elements(); }

    E* keys(int page, int block, int head) const {
        return base + page * page_elements + head * 2 * plane() +
               std::size_t(block) * block_elements();
    }
    E* values(int page, int block, int head) const { return keys(page, block, head) + plane(); }

    // Elements from `base` to the block of keys of the first head that a slot is in.
    std::size_t place(int slot) const {
        return slot / page_size * page_elements +
               std::size_t(slot % page_size / BLOCK) * block_elements();
    }
    E* keys_of(int slot, int head) const { return base + place(slot) + head * 2 * plane(); }
    int lane_of(int slot) const { return slot % page_size % BLOCK; }
};

template <class T>
struct Cache : Places<T> {
    using Places<T>::width, Places<T>::plane, Places<T>::keys_of, Places<T>::lane_of;
    using Entry = T;
    int entry() const { return width; }  // of them have a key, or a value

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

template <>
struct Cache<Codes> : Places<Codes> {
    const float* centres;  // [heads, width]: what keys are less; or null
    using Entry = CodeRow;
    int entry() const { return width / Codes::WIDTH; }

    void put(int slot, int head, const CodeRow* key, const CodeRow* value) const {
        const int lane = lane_of(slot);
        Codes* k = keys_of(slot, head);
        put_at(k, k + plane(), lane, key, value);
    }
    void get(int slot, int head, CodeRow* key, CodeRow* value) const {
        const int lane = lane_of(slot);
        const Codes *k = keys_of(slot, head), *v = k + plane();
        for (int g = 0; g < entry(); ++g) {
            for (int d = 0; d < Codes::WIDTH; ++d) key[g].codes[d] = k[g].codes[d * BLOCK + lane];
            std::memcpy(value[g].codes, v[g].codes + lane * Codes::WIDTH, Codes::WIDTH);
            key[g].scale = k[g].scales[lane];
            value[g].scale = v[g].scales[lane];
        }
    }
    void copy(int slot, int head, Codes* to_keys, Codes* to_values, int to) const {
        CodeRow key[MOST_GROUPS], value[MOST_GROUPS];
        get(slot, head, key, value);
        put_at(to_keys, to_values, to, key, value);
    }

private:
    static constexpr int MOST_GROUPS = 256 / Codes::WIDTH;  // of a head

    void put_at(Codes* k, Codes* v, int lane, const CodeRow* key, const CodeRow* value) const {
        for (int g = 0; g < entry(); ++g) {
            for (int d = 0; d < Codes::WIDTH; ++d) k[g].codes[d * BLOCK + lane] = key[g].codes[d];
            std::memcpy(v[g].codes + lane * Codes::WIDTH, value[g].codes, Codes::WIDTH);
            k[g].scales[lane] = key[g].scale;
            v[g].scales[lane] = value[g].scale;
        }
    }
};

}  // namespace outrider
