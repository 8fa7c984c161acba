// All steps of a drafter, level by level, in one call.
#include "guard.hpp"
#include "planted.hpp"
#include "process.hpp"
#include "transitions.hpp"

namespace outrider {

namespace {

constexpr float MARGINS[RATE_BINS - 1] = {RATE_MARGINS};

// The number of a node's child of that rank among the limits' choices, below 0 where it may not be;
// the root has -1.
std::int32_t choice_of(const std::int32_t* choices, std::int32_t parent, std::int32_t rank) {
    if (!choices) return 0;
    for (std::int32_t n = 0; n < choices[0]; ++n)
        if (choices[1 + 2 * n] == parent && choices[2 + 2 * n] == rank) return n;
    return -1;
}

// A token that may be drafted. `survival` is the chance that it and all before it are accepted.
struct Node {
    std::int32_t token, parent;  // the parent's number, -1 for the sequence's last token
    int depth;
    float survival, margin;
    int line;  // of the forward that it was drawn from
    int run;   // its place among the rows that were run behind the committed tokens, -1 where not
    bool straight;        // it was run where a chain would have it, as were all before it
    std::int32_t choice;  // its number among the limits' choices
};

// A sequence that drafts. Its first segment is run as it came; after that, level by level, the rows
// of the likeliest nodes. Where a model drafts in one pass, the first forward has the logits of all
// levels.
struct Drafting {
    const Pipeline* pipeline;
    const Planted* planted;  // or null
    const Scored from;       // all of its tokens are in the cache after the first forward
    const int before;        // tokens of the sequence: the position that is drafted first
    const DraftLimits limits;
    const bool constrained;   // a mask goes before its pipeline
    int room;                 // rows that its pages hold behind the committed tokens
    std::vector<Node> nodes;  // parents before their children
    std::vector<int> open;    // numbers of the nodes whose rows run now
    int ran = 0;
    int levels = 0;  // of which logits are known, if a model drafts in one pass
    int line = 0;    // that of the first

    float rate(int depth, int rank, float margin) const {
        if (!limits.rates) return 1;
        int bin = 0;
        while (bin < RATE_BINS - 1 && margin >= MARGINS[bin]) ++bin;
        const int d = std::min(depth, RATE_DEPTHS) - 1, r = std::min(rank, RATE_RANKS - 1);
        return limits.rates[(d * RATE_RANKS + r) * RATE_BINS + bin];
    }

    // The ids from the committed tokens to a node.
    std::vector<std::int32_t> path(int node) const {
        std::vector<std::int32_t> ids;
        for (; node >= 0; node = nodes[node].parent) ids.push_back(nodes[node].token);
        std::reverse(ids.begin(), ids.end());
        return ids;
    }

    // How many of the highest draws tell the children and their margins; a bare chain needs no
    // margin.
    int draws() const {
        const bool bare = !limits.rates && limits.branches == 1;
        return std::min(limits.branches + !bare, pipeline->o.vocabulary);
    }

    // Takes in the highest draws behind a node.
    void branch(int parent, int line, const Drawn* drawn) {
        const int count = draws();
        const int depth = parent < 0 ? 1 : nodes[parent].depth + 1;
        const float before = parent < 0 ? 1 : nodes[parent].survival;
        const std::int32_t above = parent < 0 ? -1 : nodes[parent].choice;
        for (int r = 0; r < std::min(count, limits.branches); ++r) {
            // What no target could draw is no node.
            if (!std::isfinite(drawn[r].score)) return;
            const std::int32_t choice = choice_of(limits.choices, above, r);
            if (choice < 0) continue;
            const float next = r + 1 < count ? drawn[r + 1].score : -INFINITY;
            const float margin = drawn[r].score - next;
            const float survival = before * rate(depth, r, margin);
            nodes.push_back(
                {drawn[r].token, parent, depth, survival, margin, line, -1, false, choice});
        }
    }

    // Numbers of nodes, the likeliest first, of which no child comes before its parent.
    std::vector<int> ranked(int first) const {
        std::vector<int> order(nodes.size() - first);
        std::iota(order.begin(), order.end(), first);
        std::stable_sort(order.begin(), order.end(),
                         [&](int a, int b) { return nodes[a].survival > nodes[b].survival; });
        return order;
    }

    // Chooses the rows of the next forward from the nodes of `first` on, which are the last
    // level's.
    void open_next(int first, const Model& model) {
        open.clear();
        const std::vector<int> all = ranked(0);
        const int last = std::min<int>(all.size(), limits.nodes);
        for (int i = 0; i < last && int(open.size()) < limits.width; ++i) {
            Node& node = nodes[all[i]];
            if (all[i] < first || node.depth >= limits.depth || node.survival < limits.least)
                continue;
            if (levels) {
                if (node.depth < levels) open.push_back(all[i]);
                continue;
            }
            // The drafter may have no embedding for what it drew.
            if (ran == room || model.input_of(node.token) < 0) continue;
            node.run = ran++;
            node.straight =
                node.run == node.depth - 1 && (node.parent < 0 || nodes[node.parent].straight);
            open.push_back(all[i]);
        }
    }

    std::int32_t slot(int place, int page_size) const {
        place += from.committed;
        return from.pages[place / page_size] * page_size + place % page_size;
    }

    // A node's row, whose place in its chain is that of its run if it is `straight`.
    Row row_of(const Node& node, const Rows& rows, const Model& model, int page_size,
               int pages) const {
        Row row{};
        row.token = model.input_of(node.token);
        row.position = from.committed + node.depth - 1;
        row.edge = row.position + 1;
        row.slot = slot(node.run, page_size);
        row.pages = pages;
        row.first = from.first;
        row.far = is_far(model.c, from.prompt, row.position);
        row.above = int(rows.above.size());
        row.logits = -1;
        row.prefix = node.straight ? row.position + 1 : from.committed;
        return row;
    }

    // The rows of a chain before its last node's: what was drafted is in no state.
    void append_chain(Rows& rows, const Model& model, int page_size, int pages, int last) const {
        const int first = int(rows.rows.size());
        rows.walks.push_back(
            {from.slot, first, 0, last + 1, from.committed, 0, from.slot->drafted, 0});
        for (int number = 0; number < last; ++number)
            rows.rows.push_back(row_of(nodes[number], rows, model, page_size, pages));
    }

    // The rows of open nodes, and the states that they begin with: those that `ended` lines end
    // with.
    void append_rows(Rows& rows, const Model& model, int page_size, const float* ended,
                     std::vector<float>& states) const {
        const int pages = int(rows.pages.size());
        if (!open.empty())
            rows.pages.insert(rows.pages.end(), from.pages, from.pages + from.num_pages);
        for (int number : open) {
            const Node& node = nodes[number];
            if (from.slot) append_chain(rows, model, page_size, pages, number);
            Row row = row_of(node, rows, model, page_size, pages);
            row.logits = rows.num_logits++;
            if (!node.straight) {
                for (int n = number; n >= 0; n = nodes[n].parent)
                    rows.above.push_back(slot(nodes[n].run, page_size));
                std::reverse(rows.above.begin() + row.above, rows.above.end());
                row.num_above = node.depth;
            }
            rows.rows.push_back(row);
            if (ended) {
                const float* state = ended + std::size_t(node.line) * model.c.hidden;
                states.insert(states.end(), state, state + model.c.hidden);
            }
        }
    }

    // Writes the likeliest nodes, each behind its parent and before its siblings' children.
    int write(std::int32_t* tokens, std::int32_t* parents, std::int32_t* runs, float* margins,
              float* survivals) const {
        std::vector<int> kept = ranked(0);
        kept.resize(std::min<std::size_t>(kept.size(), limits.nodes));
        // No child is likelier than its parent, so those that stay hang together.
        std::erase_if(kept, [&](int number) { return nodes[number].survival < limits.worth; });
        std::vector<std::vector<int>> children(nodes.size() + 1);  // of the root at 0
        std::sort(kept.begin(), kept.end());
        for (int number : kept) children[nodes[number].parent + 1].push_back(number);
        std::vector<std::pair<int, int>> stack;  // a node, and where its parent was written
        auto push = [&](int parent, int place) {
            const auto& below = children[parent + 1];
            for (auto child = below.rbegin(); child != below.rend(); ++child)
                stack.emplace_back(*child, place);
        };
        int count = 0;
        for (push(-1, -1); !stack.empty(); ++count) {
            const auto [number, parent] = stack.back();
            stack.pop_back();
            tokens[count] = nodes[number].token;
            parents[count] = parent;
            runs[count] = nodes[number].run;
            margins[count] = nodes[number].margin;
            survivals[count] = nodes[number].survival;
            push(number, count);
        }
        return count;
    }
};

// A row of logits: whose, and behind which node.
struct Line {
    int draft, node, raw;            // `raw`: which of the forward's
    std::vector<std::int32_t> path;  // the ids from the committed tokens to the node
    Mask mask = nullptr;
};

// Runs a level's rows; returns the state that each line of logits ends with, null where none are
// wanted.
const float* run_level(const Model& model, Store& store, const Rows& rows,
                       const std::vector<std::int32_t>& sublayers, float* logits, bool likely) {
    const Config& c = model.c;
    if (c.input == INPUT_HEADS) {
        run_heads(model, rows.states, int(rows.scored.size()), logits);
        return nullptr;
    }
    if (c.input == INPUT_EMBEDDED) {
        run(model, store, rows, sublayers, logits, {}, likely);
        return nullptr;
    }
    const std::size_t width = c.hidden;
    float* all = store.states[0].reserve(rows.rows.size() * width);
    float* ended = store.states[1].reserve(rows.num_logits * width);
    run(model, store, rows, sublayers, logits, {&c.layers, 1, all, rows.rows.size()}, likely);
    for (std::size_t r = 0; r < rows.rows.size(); ++r)
        if (rows.rows[r].logits >= 0)
            std::copy(all + r * width, all + (r + 1) * width, ended + rows.rows[r].logits * width);
    return ended;
}

void draft(const Model& model, Store& store, Rows rows, std::vector<Drafting>& all, AskMask ask,
           const std::vector<std::int32_t>& sublayers, bool likely) {
    const std::vector<std::int32_t>& targets = likely ? model.likely_ids : model.targets;
    const int own = likely ? int(targets.size()) : model.c.vocabulary;
    const bool at_once = all.size() && all[0].levels, transitions = has_transitions(model);
    const bool few = model.rising && !likely && !transitions;
    for (Drafting& d : all) d.open = {-1};
    std::vector<Line> lines;
    std::vector<Drawn> drawn;
    std::vector<float> states;
    float* logits = nullptr;
    const float* ended = nullptr;
    for (int level = 0;; ++level) {
        if (!rows.rows.empty()) {
            logits = store.logits.reserve(std::size_t(rows.num_logits) * own);
            ended = run_level(model, store, rows, sublayers, logits, likely);
        }
        lines.clear();
        for (int i = 0; i < int(all.size()); ++i)
            for (int node : all[i].open) {
                const int raw = at_once ? all[i].line + level : int(lines.size());
                lines.push_back({i, node, raw, all[i].path(node)});
            }
        if (lines.empty()) return;
        for (Line& line : lines)
            if (all[line.draft].constrained)
                line.mask = ask(line.draft, line.path.data(), int(line.path.size()));
        constexpr int each = MAX_BRANCHES + 1;
        drawn.assign(lines.size() * each, Drawn{0, -INFINITY});
        each_row(int(lines.size()), own, [&](int r) {
            const Line& line = lines[r];
            const Drafting& d = all[line.draft];
            const int before = d.before, length = int(line.path.size());
            float* raw = logits + std::size_t(line.raw) * own;
            if (!at_once) plant(d.planted, before + length, raw, own);
            std::vector<float> wide;
            const Path path{line.path.data(), length};
            const int output = before - d.pipeline->o.prompt_length;
            Drawn* const found = &drawn[r * each];
            const NoiseOf noise(*d.pipeline, before + length);
            // Few ids need no row of all, unless options speak of others.
            if (few && !line.mask && d.pipeline->only_sharpens(output, path) &&
                targets.back() < d.pipeline->o.vocabulary) {
                wide.assign(raw, raw + own);
                d.pipeline->sharpen(wide.data(), own);
                draw_some_of(wide.data(), targets.data(), own, noise.get(),
                             std::min(d.draws(), own), found);
                return;
            }
            const float* z;
            if (transitions) {
                const int last = length ? line.path.back() : d.from.last;
                const float* state = ended + std::size_t(line.raw) * model.c.hidden;
                score_transitions(model, raw, own, targets, last, state, line.mask, wide,
                                  d.pipeline->o.vocabulary);
                d.pipeline->apply(wide.data(), output, path, false);
                z = wide.data();
            } else {
                z = process(*d.pipeline, raw, own, targets, before, path, line.mask, at_once, wide);
            }
            draw_some(z, d.pipeline->o.vocabulary, noise.get(), d.draws(), found);
        });
        std::vector<int> first;
        for (Drafting& d : all) first.push_back(int(d.nodes.size()));
        for (std::size_t r = 0; r < lines.size(); ++r)
            all[lines[r].draft].branch(lines[r].node, lines[r].raw, &drawn[r * each]);
        rows = Rows();
        states.clear();
        for (std::size_t i = 0; i < all.size(); ++i) {
            all[i].open_next(first[i], model);
            if (!at_once) all[i].append_rows(rows, model, store.page_size, ended, states);
        }
        if (!at_once && rows.rows.empty()) return;
        rows.states = states.empty() ? nullptr : states.data();
    }
}

}  // namespace
const char* outrider_draft(const Model* model, Store* store, const DraftSizes* sizes,
                           const std::int32_t* words, const Pipeline* const* pipelines,
                           const Planted* planted, const DraftLimits* limits,
                           const std::int32_t* before, const float* states,
                           const std::int32_t* sublayers, const std::uint8_t* constrained,
                           AskMask ask, std::int32_t* ints, float* floats) {
    return guarded({model, store}, [&]() -> const char* {
        const DraftSizes& n = *sizes;
        if (store->model != model) return "the cache is another model's";
        if (!complete(*model)) return INCOMPLETE;
        std::vector<std::int32_t> parts = all_sublayers(*model);
        if (sublayers) parts.assign(sublayers, sublayers + n.sublayers);
        if (!known_sublayers(*model, parts.data(), int(parts.size()))) return NO_LAYER;
        const std::vector<Using> kept(pipelines, pipelines + n.drafts);
        Rows rows;
        if (const char* wrong = read_rows(*model, *store, words, n.words, rows)) return wrong;
        if (int(rows.scored.size()) != n.drafts) return "there are not as many drafts as wanted";
        const bool heads = model->c.input == INPUT_HEADS;
        const bool likely = is_likely(*model, n.vocabulary);
        if (n.vocabulary != model->c.vocabulary && !likely)
            return "drafts come from other logits than their model's";
        const bool whole = model->c.input == INPUT_PAIRED || heads;
        if (likely && (planted || whole)) return "planted logits and heads go by all ids";
        if (states && n.width != model->c.hidden)
            return "states have another width than their model";
        if (const char* wrong = check_states(model->c, rows, states, n.states)) return wrong;
        rows.states = states;
        const int longest = std::min<int>(model->c.max_length, model->turned);
        const bool block = model->c.input == INPUT_BLOCK;
        bool at_once = heads || block;
        for (const Scored& from : rows.scored) at_once |= from.num_nodes > 0;
        std::vector<Drafting> all;
        int lines = 0;
        for (int i = 0; i < n.drafts; ++i) {
            const Scored& from = rows.scored[i];
            const DraftLimits& l = limits[i];
            if ((from.logits != 1 + from.num_nodes && !block) || !from.chain)
                return "a draft begins with one row of logits, or with one for each level";
            if (heads && from.logits != model->c.layers)
                return "there are not as many heads as levels";
            if (l.depth < 1 || l.nodes < l.depth || l.nodes > n.room || l.width < 1 ||
                l.branches < 1 || l.branches > MAX_BRANCHES)
                return "a draft has a bad size";
            if (from.slot && (l.width > 1 || l.branches > 1))
                return "a model whose layers have states drafts chains";
            if (!at_once && from.committed + std::int64_t(l.depth) - 1 > longest)
                return "a position is past the longest sequence";
            if (before && (before[i] < 0 || before[i] > MOST)) return "a position is out of range";
            const std::int64_t room =
                std::int64_t(from.num_pages) * store->page_size - from.committed;
            if (!at_once && room < l.depth - 1) return "a segment's pages do not cover its rows";
            if (constrained && constrained[i] && n.mask_bytes * 8 < pipelines[i]->o.vocabulary)
                return "a mask is shorter than the vocabulary";
            all.push_back({pipelines[i],
                           planted ? planted + i : nullptr,
                           from,
                           before ? before[i] : from.committed,
                           l,
                           constrained && constrained[i],
                           int(std::min<std::int64_t>(room, l.nodes)),
                           {},
                           {}});
            all.back().levels = at_once ? from.logits : 0;
            all.back().line = lines;
            lines += from.logits;
        }
        draft(*model, *store, std::move(rows), all, ask, parts, likely);
        const std::size_t size = std::size_t(n.drafts) * n.room;
        for (int i = 0; i < n.drafts; ++i) {
            std::int32_t* to = ints + std::size_t(i) * n.room;
            float* chances = floats + std::size_t(i) * n.room;
            ints[3 * size + i] =
                all[i].write(to, to + size, to + 2 * size, chances, chances + size);
        }
        return nullptr;
    });
}

}  // namespace outrider
