// Suffix decoding: how a text may go on, by how often the longest known tails of it went on so
// before. The rule is ArcticInference's (Oliaro et al., "SuffixDecoding", 2024).
// drafters/suffix_index.py is the reference.
#include <algorithm>
#include <queue>
#include <unordered_map>
#include <vector>

#include "guard.hpp"

namespace outrider {
namespace {

using Place = std::int64_t;
using Tokens = std::vector<std::int32_t>;

constexpr double LEAST = 0.1;       // probability of a drafted path, at least
constexpr int MOST_ROOM = 1 << 26;  // places
constexpr std::int32_t BREAK = -1;  // stands before a text, and between two
constexpr int ROOT = 0;

struct Next {
    std::int32_t token, count;
};

// Places that end in the same tokens.
struct Node {
    Place place = 0;              // the newest, so the last to leave
    int length = 0;               // of the longest context that they share
    int count = 0;                // of places
    int children = 0, mixed = 0;  // how many, and their numbers xored: of one its number
    std::vector<Next> next;       // the tokens behind the places
};

void tally(std::vector<Next>& next, std::int32_t token, int by) {
    const auto at = std::find_if(next.begin(), next.end(),
                                 [=](const Next& each) { return each.token == token; });
    if (at == next.end()) {
        next.push_back({token, by});
    } else if (!(at->count += by)) {
        *at = next.back();
        next.pop_back();
    }
}

// A node whose contexts, up to this length, are tails of a text.
struct Match {
    int node, length;
};

}  // namespace

// A trie of the contexts of a text's places, read backwards; contexts with the same places are one
// node. So a place enters and leaves by one walk, and all matches of a tail lie on one.
class SuffixIndex : public Counted {
public:
    explicit SuffixIndex(int room) : room_(room), nodes_(1), text_{BREAK} {}

    // Calls `work`. What it leaves halfway, for want of memory, is of no use any more.
    template <class Work>
    const char* change(Work work) {
        if (!sound) return "an index was left halfway";
        sound = false;
        work();
        sound = true;
        return nullptr;
    }

    void append(std::int32_t token) {
        if (token != BREAK && end() - 1 >= first_)
            for (int node : path(end() - 1)) tally(nodes_[node].next, token, 1);
        text_.push_back(token);
        if (end() - first_ > room_) drop(1);
        if (token != BREAK) insert(end() - 1);
    }

    // Forgets the oldest places; returns how many are left.
    Place drop(Place count) {
        for (; count > 0 && first_ < end(); --count, ++first_)
            if (at(first_) != BREAK) remove(first_);
        const Place unused = first_ - SUFFIX_DEPTH - base_;
        if (2 * unused > Place(text_.size())) {
            text_.erase(text_.begin(), text_.begin() + unused);
            base_ += unused;
        }
        return end() - first_;
    }

    // The last tokens up to a place: as many as a context has, or from the break on.
    Tokens context(Place place) const {
        Place from = place;
        while (at(from) != BREAK && place - from + 1 < SUFFIX_DEPTH) --from;
        return {text_.begin() + (from - base_), text_.begin() + (place - base_) + 1};
    }

    // The end of the text that can be looked up.
    Tokens tail() const {
        Tokens found = context(end() - 1);
        if (found[0] == BREAK) found.erase(found.begin());
        return found;
    }

    // The matches of a tail, shortest first.
    std::vector<Match> find(const Tokens& tail) const {
        std::vector<Match> found;
        const int most = int(tail.size());
        for (int node = ROOT, length = 0; length < most && length == nodes_[node].length;) {
            const auto below = children_.find(key(node, tail[most - 1 - length]));
            if (below == children_.end()) break;
            node = below->second;
            const Place place = nodes_[node].place;
            const int longest = std::min(most, nodes_[node].length);
            do ++length;
            while (length < longest && at(place - length) == tail[most - 1 - length]);
            found.push_back({node, length});
        }
        return found;
    }

    const Node& node(int number) const { return nodes_[number]; }

    bool sound = true;

private:
    Place end() const { return base_ + Place(text_.size()); }
    std::int32_t at(Place place) const { return text_[place - base_]; }
    static std::uint64_t key(int node, std::int32_t token) {
        return std::uint64_t(node) << 32 | std::uint32_t(token);
    }
    // Of the child that has a place.
    std::uint64_t key_at(int node, Place place) const {
        return key(node, at(place - nodes_[node].length));
    }

    // The nodes of a place, the shortest context first.
    std::vector<int> path(Place place) const {
        std::vector<int> found;
        for (int node = ROOT; nodes_[node].children && at(place) != BREAK; found.push_back(node))
            node = children_.at(key_at(node, place));
        return found;
    }

    int make(Place place, int length, int count) {
        if (spare_.empty()) {
            spare_.push_back(int(nodes_.size()));
            nodes_.emplace_back();
        }
        const int made = spare_.back();
        spare_.pop_back();
        nodes_[made].place = place;
        nodes_[made].length = length;
        nodes_[made].count = count;
        return made;
    }

    void unmake(int node) {
        nodes_[node] = Node();
        spare_.push_back(node);
    }

    void put(int parent, int node) {
        children_[key_at(parent, nodes_[node].place)] = node;
        ++nodes_[parent].children;
        nodes_[parent].mixed ^= node;
    }

    void take(int parent, int node) {
        children_.erase(key_at(parent, nodes_[node].place));
        --nodes_[parent].children;
        nodes_[parent].mixed ^= node;
    }

    // Contexts end with a break or at their full length, so that none is the beginning of another.
    void insert(Place place) {
        const Tokens whole = context(place);
        int above = ROOT;
        for (auto [node, length] : find(whole)) {
            if (length < nodes_[node].length) {
                const int upper = make(nodes_[node].place, length, nodes_[node].count);
                nodes_[upper].next = nodes_[node].next;
                take(above, node);
                put(above, upper);
                put(upper, node);
                node = upper;
            }
            ++nodes_[node].count;
            nodes_[node].place = place;
            above = node;
        }
        if (nodes_[above].length < int(whole.size())) put(above, make(place, int(whole.size()), 1));
    }

    // Of the oldest place.
    void remove(Place place) {
        const std::vector<int> nodes = path(place);
        const std::int32_t token = place + 1 < end() ? at(place + 1) : BREAK;
        for (int node : nodes) {
            --nodes_[node].count;
            if (token != BREAK) tally(nodes_[node].next, token, -1);
        }
        const int leaf = nodes.back();
        if (nodes_[leaf].count) return;
        const int parent = nodes.size() > 1 ? nodes.end()[-2] : ROOT;
        take(parent, leaf);
        unmake(leaf);
        if (parent == ROOT || nodes_[parent].children > 1) return;
        const int only = nodes_[parent].mixed, above = nodes.size() > 2 ? nodes.end()[-3] : ROOT;
        take(above, parent);
        take(parent, only);
        put(above, only);
        unmake(parent);
    }

    const int room_;
    std::vector<Node> nodes_;
    std::vector<int> spare_;
    std::unordered_map<std::uint64_t, int> children_;  // by node and token
    Tokens text_;
    Place base_ = 0, first_ = 1;  // where the kept text begins, and the oldest place in the trie
};

namespace {

// A token of a draft, and how often it and others stood there.
struct Guess {
    std::int32_t token, count, rest;
    int parent, tail, depth, number;
    double p;  // of the path to it

    bool operator<(const Guess& other) const {  // the likelier goes first, of equals the older
        return p != other.p ? p < other.p : number > other.number;
    }
};

struct Guesses {
    std::vector<Guess> nodes;
    double score = 0;  // tokens that stand, if the probabilities are right
};

// Drafts behind a tail by one index: chains of the most frequent tokens, or trees of the likeliest
// where there may be more nodes than levels.
class Drafting {
public:
    Drafting(const SuffixIndex& index, const Tokens& tail, int depth, int most)
        : index_(index), depth_(depth), most_(most), tails_{{tail, index.find(tail), {}}} {}

    // Puts the draft of the best match in the place of one with a lower score.
    void improve(Guesses& best) {
        const std::vector<Match> matches = tails_[0].matches;
        for (auto match = matches.rbegin(); match != matches.rend(); ++match) {
            // A match drafts no more tokens than it has.
            if (std::min(most_, match->length) <= best.score) return;
            Guesses found = draft(match->length);
            if (found.score > best.score) best = std::move(found);
        }
    }

private:
    // A tail with drafted tokens, its matches, and those that are a token longer.
    struct Tail {
        Tokens tokens;
        std::vector<Match> matches;
        std::vector<std::pair<std::int32_t, int>> longer;
    };

    Guesses draft(int length) {
        Guesses found;
        std::priority_queue<Guess> open;
        int number = 0;
        add_children(open, number, length, {0, 0, 0, -1, 0, 0, 0, 1});
        while (!open.empty() && int(found.nodes.size()) < std::min(most_, length)) {
            Guess guess = open.top();
            open.pop();
            found.nodes.push_back(guess);
            found.score += guess.p;
            if (guess.depth == depth_) continue;
            guess.parent = int(found.nodes.size()) - 1;
            guess.tail = longer(guess.tail, guess.token);
            add_children(open, number, length, guess);
        }
        return found;
    }

    // `above` has its own number in the draft as its parent.
    void add_children(std::priority_queue<Guess>& open, int& number, int length,
                      const Guess& above) const {
        const auto& matches = tails_[above.tail].matches;
        const auto match = std::lower_bound(
            matches.begin(), matches.end(), std::min(length + above.depth, SUFFIX_DEPTH),
            [](const Match& each, int least) { return each.length < least; });
        if (match == matches.end()) return;
        const Node& node = index_.node(match->node);
        int all = 0;
        std::vector<Next> likely;
        for (const Next& each : node.next) {
            all += each.count;
            if (above.p * each.count / node.count >= LEAST) likely.push_back(each);
        }
        std::sort(likely.begin(), likely.end(), [](const Next& a, const Next& b) {
            return a.count != b.count ? a.count > b.count : a.token < b.token;
        });
        for (const Next& each : likely) {
            open.push({each.token, each.count, all - each.count, above.parent, above.tail,
                       above.depth + 1, number++, above.p * each.count / node.count});
            if (most_ <= depth_) break;
        }
    }

    int longer(int tail, std::int32_t token) {
        for (const auto& [behind, made] : tails_[tail].longer)
            if (behind == token) return made;
        const int made = int(tails_.size());
        tails_[tail].longer.emplace_back(token, made);
        Tokens tokens = tails_[tail].tokens;
        if (int(tokens.size()) == SUFFIX_DEPTH) tokens.erase(tokens.begin());
        tokens.push_back(token);
        std::vector<Match> matches = index_.find(tokens);
        tails_.push_back({std::move(tokens), std::move(matches), {}});
        return made;
    }

    const SuffixIndex& index_;
    const int depth_, most_;
    std::vector<Tail> tails_;
};

}  // namespace
const char* outrider_suffix(int room, SuffixIndex** made) {
    return guarded({}, [&]() -> const char* {
        if (room < 1 || room > MOST_ROOM) return "an index has 1 to 67108864 places";
        *made = new SuffixIndex(room);
        return nullptr;
    });
}

void outrider_suffix_free(const SuffixIndex* index) noexcept { release(index); }

const char* outrider_suffix_extend(SuffixIndex* index, const std::int32_t* tokens, int count,
                                   int ends) {
    return guarded({index}, [&]() -> const char* {
        for (int i = 0; i < count; ++i)
            if (tokens[i] < 0) return "a token id is below 0";
        return index->change([&] {
            for (int i = 0; i < count; ++i) index->append(tokens[i]);
            if (ends) index->append(BREAK);
        });
    });
}

const char* outrider_suffix_drop(SuffixIndex* index, std::int64_t count, std::int64_t* left) {
    return guarded({index}, [&] { return index->change([&] { *left = index->drop(count); }); });
}

const char* outrider_suffix_draft(const SuffixIndex* index, const SuffixIndex* store, int depth,
                                  int nodes, std::int32_t* out, std::int64_t* drafted) {
    return guarded({index, store}, [&]() -> const char* {
        if (depth < 1 || nodes < 1) return "a draft has a bad size";
        if (!index->sound || (store && !store->sound)) return "an index was left halfway";
        const Tokens tail = index->tail();
        Guesses best;
        for (const SuffixIndex* each : {index, store})
            if (each) Drafting(*each, tail, depth, nodes).improve(best);
        *drafted = std::int64_t(best.nodes.size());
        for (std::size_t i = 0; i < best.nodes.size(); ++i) {
            const Guess& guess = best.nodes[i];
            const std::int32_t values[] = {guess.token, guess.parent, guess.count, guess.rest};
            for (int row = 0; row < 4; ++row) out[row * SUFFIX_DEPTH + i] = values[row];
        }
        return nullptr;
    });
}

}  // namespace outrider
