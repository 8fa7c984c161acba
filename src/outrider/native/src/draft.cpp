// Processing and drawing in the forward's own call: a target's step, or all steps of a drafter.
#include <algorithm>
#include <cmath>

#include "guard.hpp"
#include "model.hpp"
#include "sampler.hpp"

namespace outrider {
namespace {

// Runs all layers; writes the logits [num_logits, vocabulary] of the rows that want them.
void run(const Model& model, Store& store, const Rows& rows, float* logits, Hidden hidden = {}) {
    const auto layers = all_layers(model);
    forward(model, store, rows,
            Wanted{layers.data(), int(layers.size()), hidden.layers, hidden.count, logits,
                   hidden.out});
}

// Processes a row of `own` logits in place, and draws from it. Before its position stand
// `committed` tokens and then the path.
Drawn decide(const Pipeline& pipeline, float* z, int own, int committed, Path path, Mask mask) {
    const int wanted = pipeline.o.vocabulary;
    if (mask) keep(z, std::min(own, wanted), mask);
    // Padded or cut to the target's vocabulary, which its options speak of.
    std::vector<float> wide;
    if (own < wanted) {
        wide.assign(wanted, -INFINITY);
        std::copy(z, z + own, wide.begin());
        z = wide.data();
    }
    pipeline.apply(z, committed - pipeline.o.prompt_length, path, false);
    const NoiseKey key = pipeline.key(committed + path.length);
    return draw(z, wanted, pipeline.o.temperature == 0 ? nullptr : &key);
}

// A row to decide: line `line` of the logits, behind a node or its segment's last token (-1).
struct Decision {
    const Pipeline* pipeline;
    const Scored* from;
    int node, line;
    float* raw;  // where its raw logits are kept, or null
};

// The ids of a node's ancestors and its own: in place for a chain, in `room` for a tree.
Path path_to(const Scored& from, int node, std::vector<std::int32_t>& room) {
    if (from.chain) return {from.nodes, node + 1};
    for (; node >= 0; node = from.parents[node]) room.push_back(from.nodes[node]);
    std::reverse(room.begin(), room.end());
    return {room.data(), int(room.size())};
}

// Whether the layers of hidden states are the model's.
bool known(const Model& model, Hidden hidden) {
    return std::all_of(hidden.layers, hidden.layers + hidden.count,
                       [&](int layer) { return layer >= -1 && layer < model.c.layers; });
}

const char* decide_all(const Model& model, Store& store, const Rows& rows,
                       const Pipeline* const* pipelines, const std::uint8_t* keeps,
                       int num_pipelines, const Mask* masks, std::int64_t mask_bytes, float* logits,
                       std::int64_t num_lines, Hidden hidden, std::int32_t* tokens, float* scores) {
    if (!complete(model)) return INCOMPLETE;
    if (int(rows.scored.size()) != num_pipelines) return "there are not as many pipelines as wanted";
    if (!known(model, hidden)) return "there is no such layer";
    const std::size_t width = model.c.vocabulary;
    std::vector<Decision> all;
    int line = 0, kept = rows.num_logits;
    for (int s = 0; s < num_pipelines; ++s) {
        const Scored& from = rows.scored[s];
        if (pipelines[s] && from.logits != 1 + from.num_nodes)
            return "not every node wants a row of logits";
        for (int node = -1; pipelines[s] && node < from.num_nodes; ++node) {
            const bool keep = keeps && keeps[s];
            const int row = line + 1 + node;
            if (keep && kept >= num_lines) return "there is no room for logits that are kept";
            if (masks && masks[row] && mask_bytes * 8 < pipelines[s]->o.vocabulary)
                return "a mask is shorter than the vocabulary";
            all.push_back({pipelines[s], &from, node, row,
                           keep ? logits + kept++ * width : nullptr});
        }
        line += from.logits;
    }
    run(model, store, rows, logits, hidden);
    each_row(int(all.size()), model.c.vocabulary, [&](int r) {
        const Decision& d = all[r];
        float* z = logits + d.line * width;
        if (d.raw) std::copy(z, z + width, d.raw);
        std::vector<std::int32_t> room;
        const Drawn drawn = decide(*d.pipeline, z, model.c.vocabulary, d.from->committed,
                                   path_to(*d.from, d.node, room), masks ? masks[d.line] : nullptr);
        tokens[d.line] = drawn.token;
        scores[d.line] = drawn.score;
    });
    return nullptr;
}

// A sequence that drafts: its first segment is run as it came, then one row a token.
struct Drafting {
    const Pipeline* pipeline;
    const Scored from;  // all of its tokens are in the cache after the first forward
    int length;         // tokens to draft
    std::int32_t* tokens;
    int drafted = 0;
};

const char* draft(const Model& model, Store& store, Rows rows, std::vector<Drafting>& all) {
    if (!complete(model)) return INCOMPLETE;
    const int own = model.c.vocabulary;
    std::vector<Drafting*> drawing;
    for (Drafting& d : all) drawing.push_back(&d);
    std::vector<std::int32_t> next;
    for (;;) {
        float* logits = store.logits.reserve(std::size_t(rows.num_logits) * own);
        run(model, store, rows, logits);
        if (drawing.empty()) return nullptr;
        each_row(int(drawing.size()), own, [&](int r) {
            Drafting& d = *drawing[r];
            const Drawn drawn = decide(*d.pipeline, logits + std::size_t(r) * own, own,
                                       d.from.committed, {d.tokens, d.drafted}, nullptr);
            // What no target could draw ends the draft; so does what the drafter cannot read.
            if (std::isfinite(drawn.score)) d.tokens[d.drafted++] = drawn.token;
            if (!std::isfinite(drawn.score) || drawn.token >= own) d.length = d.drafted;
        });
        std::vector<Drafting*> left;
        next.clear();
        for (Drafting* d : drawing) {
            if (d->drafted >= d->length) continue;
            left.push_back(d);
            const int start = d->from.committed + d->drafted - 1, pages = d->from.num_pages;
            next.insert(next.end(), {1, 0, start, pages, 1, d->tokens[d->drafted - 1]});
            next.insert(next.end(), d->from.pages, d->from.pages + pages);
        }
        if (left.empty()) return nullptr;
        drawing.swap(left);
        rows = Rows();
        if (const char* wrong = read_rows(model, store, next.data(), next.size(), rows))
            return wrong;
    }
}

}  // namespace
}  // namespace outrider

using namespace outrider;

// Sizes of a call of outrider_decide; the layout is that of Library.decide.
struct DecideSizes {
    std::int64_t words, pipelines, rows, lines, vocabulary, hidden, hidden_rows, width, mask_bytes;
};

// A forward over `words` (see outrider_forward) into `logits` [lines, vocabulary], whose first `rows`
// lines are those of the rows that want logits. A segment with a pipeline wants them of its last token
// and of all nodes: these rows are decided, with a mask a row, of `mask_bytes` or more, unless `masks` is null, and their
// `tokens` and `scores` [rows] are written. Where `keeps` is set for it, its logits are copied before
// that to the next lines behind the others. A segment without a pipeline (null) keeps its logits as they
// are. `hidden` are layers, and `hidden_out` is as outrider_forward's.
API const char* outrider_decide(const Model* model, Store* store, const DecideSizes* sizes,
                                const std::int32_t* words, const Pipeline* const* pipelines,
                                const std::uint8_t* keeps, const Mask* masks, float* logits,
                                const std::int32_t* hidden, float* hidden_out,
                                std::int32_t* tokens, float* scores) {
    return guarded([&]() -> const char* {
        const DecideSizes& n = *sizes;
        if (store->model != model) return "the cache is another model's";
        if (n.vocabulary != model->c.vocabulary || (n.hidden && n.width != model->c.hidden))
            return "the room for results has another shape than its model";
        const std::vector<Using> kept(pipelines, pipelines + n.pipelines);
        Rows rows;
        if (const char* wrong = read_rows(*model, *store, words, n.words, rows)) return wrong;
        if (rows.num_logits != n.rows || n.lines < n.rows ||
            (n.hidden && n.hidden_rows != std::int64_t(rows.rows.size())))
            return "the rows are not as many as announced";
        return decide_all(*model, *store, rows, pipelines, keeps, int(n.pipelines), masks,
                          n.mask_bytes, logits, n.lines, {hidden, int(n.hidden), hidden_out},
                          tokens, scores);
    }, model, store);
}

// A forward over `words`; segments that want a row of logits, one each, go on for as many tokens as
// `lengths` says, by a pipeline each. Their page tables reach to the end of the draft. `tokens` [drafts,
// longest] and `drafted` are written.
API const char* outrider_draft(const Model* model, Store* store, const std::int32_t* words,
                               std::int64_t count, const Pipeline* const* pipelines,
                               const std::int32_t* lengths, int drafts, int longest,
                               std::int32_t* tokens, std::int32_t* drafted) {
    return guarded([&]() -> const char* {
        if (store->model != model) return "the cache is another model's";
        const std::vector<Using> kept(pipelines, pipelines + drafts);
        Rows rows;
        if (const char* wrong = read_rows(*model, *store, words, count, rows)) return wrong;
        if (int(rows.scored.size()) != drafts) return "there are not as many drafts as wanted";
        std::vector<Drafting> all;
        for (int i = 0; i < drafts; ++i) {
            const Scored& from = rows.scored[i];
            if (from.logits != 1 || from.num_nodes) return "a draft begins with one row of logits";
            if (lengths[i] < 1 || lengths[i] > longest) return "a draft has a bad size";
            all.push_back({pipelines[i], from, lengths[i], tokens + std::size_t(i) * longest});
        }
        const char* wrong = draft(*model, *store, std::move(rows), all);
        for (int i = 0; i < drafts; ++i) drafted[i] = all[i].drafted;
        return wrong;
    }, model, store);
}
