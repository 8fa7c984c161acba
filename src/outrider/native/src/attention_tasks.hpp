// What attention has to do, and in which order.
#pragma once

#include <algorithm>
#include <vector>

#include "cache.hpp"
#include "fetch.hpp"
#include "model.hpp"

namespace outrider {

constexpr int CHUNK_BLOCKS = 16;
constexpr int QUERIES = 16;  // of a tile

// Queries of one key head: those of rows first..last of one segment, or some of one row's.
struct Tile {
    int first_row, last_row;
    int first_head, heads;  // of each row, within the key head's group
    int start, of_segment;  // the segment's first tile, and how many it has
};

// A tile's queries of one key head.
struct Task {
    const Tile* tile;
    int head;
    bool fresh;  // no other tile has just read the same keys
};

// All that attention has to do: segment after segment, and of each head after head, so that what is
// read next lies near what was read before.
class Tasks {
public:
    // `group` query heads share each of `heads` key heads.
    Tasks(const Rows& all, int group, int heads) : heads_(heads) {
        const int together = std::min(group, QUERIES), rows = QUERIES / together;
        const auto& list = all.rows;
        int start = 0;
        for (int first = 0, last; first < int(list.size()); first = last) {
            // Chains, and trees behind one prefix.
            const Row& row = list[first];
            last = first + 1;
            while (last < int(list.size()) && last - first < rows &&
                   list[last].pages == row.pages &&
                   (list[last].num_above > 0) == (row.num_above > 0))
                ++last;
            for (int head = 0; head < group; head += together)
                tiles_.push_back({first, last, head, std::min(together, group - head), start, 0});
            if (last < int(list.size()) && list[last].pages == row.pages) continue;
            for (int i = start; i < int(tiles_.size()); ++i)
                tiles_[i].of_segment = int(tiles_.size()) - start;
            start = int(tiles_.size());
        }
    }
    int count() const { return int(tiles_.size()) * heads_; }
    Task operator[](int number) const {
        const Tile& first = tiles_[tiles_[number / heads_].start];
        const int place = number - first.start * heads_, tile = place % first.of_segment;
        return {&first + tile, place / first.of_segment, tile == 0};
    }

private:
    std::vector<Tile> tiles_;
    const int heads_;
};

// Blocks [first, last) that a tile sees, in chunks that start at multiples of CHUNK_BLOCKS.
struct Span {
    int first, last;
    int chunk() const { return first / CHUNK_BLOCKS * CHUNK_BLOCKS; }
};

// What is asked of memory: keys and values chunk by chunk, in the order in which they will be read,
// a chunk of keys ahead. Each chunk that is worked on asks for as much as it reads.
struct Ahead {
    int task = -1, chunk = 0;  // being asked for
    bool values = false;       // of the chunk; else its keys
    Span span{0, 0};
    Fetch<CHUNK_BLOCKS> blocks;
    int owed = 0;       // lines
    int expected = -1;  // the task that is worked on next
};

}  // namespace outrider
