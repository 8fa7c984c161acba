// The processing of a target's logits and the drawing of its tokens, in the forward's own call.
#include "guard.hpp"
#include "planted.hpp"
#include "process.hpp"

namespace outrider {
namespace {

// A row to decide: line `line` of the logits, behind a node, its segment's last token (-1) or one
// before that. Without a pipeline its logits are planted and left.
struct Decision {
    const Pipeline* pipeline;
    const Planted* planted;  // or null
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
                       const Pipeline* const* pipelines, const Planted* planted,
                       const std::uint8_t* keeps, int num_pipelines, const Mask* masks,
                       std::int64_t mask_bytes, float* logits, std::int64_t num_lines,
                       Hidden hidden, std::int32_t* tokens, float* scores) {
    if (!complete(model)) return INCOMPLETE;
    if (model.c.input != INPUT_EMBEDDED) return UNSTATED;
    if (int(rows.scored.size()) != num_pipelines)
        return "there are not as many pipelines as wanted";
    if (!known(model, hidden)) return NO_LAYER;
    const std::size_t width = model.c.vocabulary;
    std::vector<Decision> all;
    int line = 0, kept = rows.num_logits;
    for (int s = 0; s < num_pipelines; ++s) {
        const Scored& from = rows.scored[s];
        if (pipelines[s] && from.logits != 1 + from.num_nodes)
            return "not every node wants a row of logits";
        for (int row = line; (pipelines[s] || planted) && row < line + from.logits; ++row) {
            const bool keep = pipelines[s] && keeps && keeps[s];
            if (keep && kept >= num_lines) return "there is no room for logits that are kept";
            if (pipelines[s] && masks && masks[row] && mask_bytes * 8 < pipelines[s]->o.vocabulary)
                return "a mask is shorter than the vocabulary";
            all.push_back({pipelines[s], planted ? planted + s : nullptr, &from,
                           row - line - from.logits + from.num_nodes, row,
                           keep ? logits + kept++ * width : nullptr});
        }
        line += from.logits;
    }
    run(model, store, rows, all_sublayers(model), logits, hidden);
    each_row(int(all.size()), model.c.vocabulary, [&](int r) {
        const Decision& d = all[r];
        float* z = logits + d.line * width;
        std::vector<std::int32_t> room;
        std::vector<float> wide;
        const Path path = path_to(*d.from, d.node, room);
        const int committed = d.from->committed;
        plant(d.planted, committed + path.length + std::min(0, d.node + 1), z, model.c.vocabulary);
        if (!d.pipeline) return;
        if (d.raw) std::copy(z, z + width, d.raw);
        z = process(*d.pipeline, z, model.c.vocabulary, model.targets, committed, path,
                    masks ? masks[d.line] : nullptr, false, wide);
        const NoiseOf noise(*d.pipeline, committed + path.length);
        const Drawn drawn = draw(z, d.pipeline->o.vocabulary, noise.get());
        tokens[d.line] = drawn.token;
        scores[d.line] = drawn.score;
    });
    return nullptr;
}

}  // namespace
const char* outrider_decide(const Model* model, Store* store, const DecideSizes* sizes,
                            const std::int32_t* words, const Pipeline* const* pipelines,
                            const Planted* planted, const std::uint8_t* keeps, const Mask* masks,
                            float* logits, const std::int32_t* hidden, float* hidden_out,
                            std::int32_t* tokens, float* scores) {
    return guarded({model, store}, [&]() -> const char* {
        const DecideSizes& n = *sizes;
        if (store->model != model) return "the cache is another model's";
        if (n.vocabulary != model->c.vocabulary || (n.hidden && n.width != model->c.hidden))
            return "the room for results has another shape than its model";
        const std::vector<Using> kept(pipelines, pipelines + n.pipelines);
        Rows rows;
        if (const char* wrong = read_rows(*model, *store, words, n.words, rows)) return wrong;
        if (rows.num_logits != n.rows || n.lines < n.rows ||
            (n.hidden && (n.hidden_first < 0 ||
                          n.hidden_rows - n.hidden_first < std::int64_t(rows.rows.size()))))
            return "the rows are not as many as announced";
        if (n.hidden) hidden_out += n.hidden_first * n.width;
        return decide_all(*model, *store, rows, pipelines, planted, keeps, int(n.pipelines), masks,
                          n.mask_bytes, logits, n.lines,
                          {hidden, int(n.hidden), hidden_out, std::size_t(n.hidden_rows)}, tokens,
                          scores);
    });
}

}  // namespace outrider
