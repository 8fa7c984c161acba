// What attention has to do, and in which order.
#pragma once

#include <algorithm>
#include <vector>

#include "cache.hpp"
#include "fetch.hpp"
#include "model.hpp"

namespace outrider {

constexpr int CHUNK_BLOCKS = 16;
constexpr int STRETCH = 4 * CHUNK_BLOCKS;  // blocks whose sums are taken apart from others'
constexpr int QUERIES = 16;                // of a tile

// Queries of one key head: those of rows first..last of one segment, or some of one row's.
struct Tile {
    int first_row, last_row;
    int first_head, heads;  // of each row, within the key head's group
};

// Blocks [first, last) that a tile sees, in chunks that start at multiples of CHUNK_BLOCKS.
struct Span {
    int first, last;
    int chunk() const { return first / CHUNK_BLOCKS * CHUNK_BLOCKS; }
    int stretch() const { return first / STRETCH; }
    int stretches() const { return (last - 1) / STRETCH - stretch() + 1; }
};

// A tile's queries of one key head, over all they see or one stretch of it.
struct Task {
    const Tile* tile;
    int head;
    Span span;
    bool fresh;  // no other tile has just read the same keys
    int part;    // where the sums of a stretch go; -1: there are no others
};

// Sums of stretches that become one.
struct Joint {
    const Tile* tile;
    int head, first, count;  // parts
};

// What rows of a layer see: `window` positions, or all with 0. Rows of blocks also see those behind
// them unless the layer is `causal`, as all layers of other models are.
struct Sight {
    int window;
    bool causal;
    auto operator<=>(const Sight&) const = default;
};

// All that attention has to do: segment after segment, and of each head after head, so that what is
// read next lies near what was read before. Stretches of a long context are tasks of their own
// where several tiles read the same, or threads would have none.
class Tasks {
public:
    // `group` query heads share each of `heads` key heads.
    Tasks(const Rows& all, int group, int heads, int page_size, Sight sight, int threads)
        : page_size_(page_size), sight_(sight) {
        const int together = std::min(group, QUERIES), rows = QUERIES / together;
        const auto& list = all.rows;
        const int count = int(list.size()) - all.given;
        std::vector<int> segments{0};  // where their tiles begin
        for (int first = 0, last; first < count; first = last) {
            // Chains, and trees behind one prefix.
            const Row& row = list[first];
            last = first + 1;
            while (last < count && last - first < rows && list[last].pages == row.pages &&
                   (list[last].num_above > 0) == (row.num_above > 0))
                ++last;
            for (int head = 0; head < group; head += together)
                tiles_.push_back({first, last, head, std::min(together, group - head)});
            if (last == count || list[last].pages != row.pages)
                segments.push_back(int(tiles_.size()));
        }
        const bool few = int(tiles_.size()) * heads < FEW * threads;
        for (std::size_t s = 0; s + 1 < segments.size(); ++s)
            add(list, segments[s], segments[s + 1], heads, few);
    }

    std::vector<Task> all;
    std::vector<Joint> joints;
    int parts = 0;

    int length_of(const Row& row) const {
        return sight_.causal ? row.position + 1 : row.prefix + row.num_above;
    }
    int first_of(const Row& row) const {
        const int window = sight_.window;
        return std::max<int>(row.first, window && row.edge > window ? row.edge - window : 0);
    }
    // Blocks are counted page after page.
    int block_of(int token) const {
        const int blocks = (page_size_ + BLOCK - 1) / BLOCK;
        return token / page_size_ * blocks + token % page_size_ / BLOCK;
    }

private:
    static constexpr int FEW = 4;          // tasks of a thread that leave none idle
    static constexpr int MOST_TILES = 16;  // of a segment in stretches: their sums take memory

    Span span_of(const std::vector<Row>& rows, const Tile& tile) const {
        int begin = 0x7fffffff, end = 0;  // tokens
        for (int r = tile.first_row; r < tile.last_row; ++r) {
            begin = std::min(begin, first_of(rows[r]));
            end = std::max(end, length_of(rows[r]));
        }
        return {block_of(begin), block_of(end - 1) + 1};
    }

    // Tasks of the tiles [first, last) of a segment.
    void add(const std::vector<Row>& rows, int first, int last, int heads, bool few) {
        const bool apart = last - first <= MOST_TILES && (few || last - first > 1);
        std::vector<Span> spans;
        int begin = 0x7fffffff, end = 0;  // stretches
        for (int t = first; t < last; ++t) {
            spans.push_back(span_of(rows, tiles_[t]));
            begin = std::min(begin, spans.back().stretch());
            end = std::max(end, spans.back().stretch() + spans.back().stretches());
        }
        for (int head = 0; head < heads; ++head) {
            std::vector<int> part;  // the first of each tile
            for (int t = first; t < last && apart; ++t) {
                const int count = spans[t - first].stretches();
                part.push_back(count > 1 ? parts : -1);
                if (count == 1) continue;
                joints.push_back({&tiles_[t], head, parts, count});
                parts += count;
            }
            for (int stretch = apart ? begin : end - 1; stretch < end; ++stretch) {
                bool fresh = true;
                for (int t = first; t < last; ++t) {
                    Span span = spans[t - first];
                    int to = -1;
                    if (apart) {
                        if (part[t - first] >= 0) to = part[t - first] + stretch - span.stretch();
                        span.first = std::max(span.first, stretch * STRETCH);
                        span.last = std::min(span.last, (stretch + 1) * STRETCH);
                        if (span.first >= span.last) continue;
                    }
                    all.push_back({&tiles_[t], head, span, fresh, to});
                    fresh = false;
                }
            }
        }
    }

    std::vector<Tile> tiles_;
    const int page_size_;
    const Sight sight_;
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
