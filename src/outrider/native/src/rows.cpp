#include <algorithm>

#include "model.hpp"

namespace outrider {
namespace {

constexpr const char* TOO_LONG = "a position is past the longest sequence";

struct Reader {
    const std::int32_t* at;
    const std::int32_t* end;

    bool has(std::int64_t count) const { return count >= 0 && end - at >= count; }
    const std::int32_t* take(int count) {
        const std::int32_t* from = at;
        at += count;
        return from;
    }
};

// Adds the walk of a segment whose model has layers with states.
const char* add_walk(Store& store, int number, int start, int tokens, int nodes, Rows& out) {
    if (number < 0 || number >= MOST_SLOTS) return NO_SLOT;
    Slot* slot = &slot_of(store, number);
    for (const Walk& other : out.walks)
        if (other.slot == slot) return "two sequences have one slot";
    const int accepted = start ? start - slot->position : 0;
    if (start && (slot->position < 0 || accepted < 0 || accepted > slot->drafted))
        return "a sequence goes on elsewhere than behind its states";
    if (!tokens && accepted) return "accepted rows are taken in before a committed one";
    const int first = int(out.rows.size());
    // At the end of the last page that is full behind these rows, unless it was full before.
    const int end = (start + tokens) / store.page_size * store.page_size;
    const int kept = std::max(0, end - (start - accepted));
    out.walks.push_back({slot, first, tokens, nodes, start, accepted, slot->drafted, kept});
    return nullptr;
}

// Adds a segment's rows; those of a block that are states go to `states`.
const char* read_segment(const Model& model, Store& store, Reader& in, Rows& out,
                         std::vector<Row>& states) {
    if (!in.has(8)) return "a segment is cut short";
    const std::int32_t* head = in.take(8);
    const int tokens = head[0], nodes = head[1], start = head[2], pages = head[3], logits = head[4];
    const int first = head[5], prompt = head[6];
    const bool block = model.c.input == INPUT_BLOCK;
    const int least = nodes > 0 && !block ? 0 : 1;
    if (tokens < least || nodes < 0 || start < 0 || pages < 1 || first < 0 || first > start ||
        prompt < 0)
        return "a segment has a bad size";
    if (!in.has(std::int64_t(tokens) + 2 * std::int64_t(nodes) + pages))
        return "a segment is cut short";
    const std::int64_t committed = std::int64_t(start) + tokens;
    const int longest = std::min<int>(model.c.max_length, model.turned);
    if (committed > longest) return TOO_LONG;
    if (logits < 0 || logits - tokens > nodes) return "more logits are wanted than there are rows";
    if (committed + nodes > std::int64_t(pages) * store.page_size)
        return "a segment's pages do not cover its rows";
    const std::int32_t* ids = in.take(tokens);
    const std::int32_t* drafted = in.take(nodes);
    const std::int32_t* parents = in.take(nodes);
    const std::int32_t* table = in.take(pages);
    for (int i = 0; i < pages; ++i)
        if (table[i] < 0 || table[i] >= store.pages) return "a page is not of this store";
    int straight = 0;  // nodes that lie where a chain would have them, as do all before them
    for (int j = 0; j < nodes; ++j) {
        if (parents[j] < -1 || parents[j] >= j) return "a node stands before its parent";
        straight += straight == j && parents[j] == j - 1;
    }
    if (stateful(model.c)) {
        if (straight < nodes) return "a draft branches in a model whose layers have states";
        if (const char* wrong = add_walk(store, head[7], start, tokens, nodes, out)) return wrong;
    } else if (head[7]) {
        return "a model whose layers have no states has no slots";
    }
    const int anchor = tokens - (logits > 0);  // the first of a block; before it are states
    if (block && (logits ? logits < nodes || logits > nodes + 1 || straight < nodes : nodes > 0))
        return "a block is no chain whose nodes want logits";
    if (logits) {
        const int last = tokens ? ids[tokens - 1] : -1;
        Slot* slot = stateful(model.c) ? out.walks.back().slot : nullptr;
        out.scored.push_back({drafted, parents, table, nodes, pages, int(committed), logits, first,
                              last, prompt, straight == nodes, slot});
    }
    const int first_page = int(out.pages.size());
    out.pages.insert(out.pages.end(), table, table + pages);
    auto slot = [&](std::int64_t place) {
        return std::int32_t(table[place / store.page_size] * store.page_size +
                            place % store.page_size);
    };
    const std::size_t first_row = out.rows.size();
    for (int i = 0; i < tokens + nodes; ++i) {
        Row row{};
        const int node = i - tokens;
        row.token = node < 0 ? ids[i] : drafted[node];
        if (row.token < 0 || row.token >= model.c.embeddings) return "a token id has no embedding";
        row.slot = slot(start + i);
        row.first = first;
        row.pages = first_page;
        row.above = int(out.above.size());
        row.logits = i < tokens + nodes - logits ? -1 : out.num_logits++;
        if (node < straight) {
            row.position = start + i;
            row.prefix = start + i + 1;
        } else {
            // A parent's list, and the node itself.
            row.prefix = int(committed);
            const int parent = parents[node];
            for (int k = 0; k <= parent && parent < straight; ++k)
                out.above.push_back(slot(committed + k));
            if (parent >= straight) {
                const Row& from = out.rows[first_row + tokens + parent];
                for (int k = 0; k < from.num_above; ++k)
                    out.above.push_back(std::int32_t(out.above[from.above + k]));
            }
            out.above.push_back(row.slot);
            if (std::int64_t(out.above.size()) > MOST) return "a draft's tree is too deep";
            row.num_above = int(out.above.size()) - row.above;
            row.position = int(committed) + row.num_above - 1;
        }
        if (row.position >= longest) return TOO_LONG;
        row.far = is_far(model.c, prompt, row.position);
        row.edge = row.position + 1;
        if (block && i >= anchor) {
            row.prefix = int(committed) + nodes;
            row.edge = start + anchor;
        } else if (block) {  // which sees nothing
            row.first = row.prefix = row.position;
            states.push_back(row);
            continue;
        }
        out.rows.push_back(row);
    }
    return nullptr;
}

}  // namespace

const char* read_rows(const Model& model, Store& store, const std::int32_t* words,
                      std::int64_t count, Rows& rows) {
    Reader in{words, words + count};
    std::vector<Row> states;
    while (in.at < in.end)
        if (const char* wrong = read_segment(model, store, in, rows, states)) return wrong;
    rows.given = int(states.size());
    rows.rows.insert(rows.rows.end(), states.begin(), states.end());
    if (std::int64_t(rows.rows.size()) * model.c.heads > MOST) return "there are too many rows";
    return rows.rows.empty() ? "there are no rows" : nullptr;
}

}  // namespace outrider
