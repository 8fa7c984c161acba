// A drafter's steps in one call: forward, law and draw, token by token.
#include <cmath>
#include <limits>

#include "guard.hpp"
#include "model.hpp"
#include "sampler.hpp"

namespace outrider {
namespace {

// A sequence that drafts: its first segment is run as it came, then one row a token.
struct Drafting {
    const Law* law;
    const std::int32_t* pages;
    int num_pages;
    int committed;  // tokens before the draft, all of which are in the cache after the first forward
    int length;     // tokens to draft
    std::int32_t* tokens;
    int drafted = 0;
};

const char* draft(const Model& model, Store& store, const std::int32_t* words, std::int64_t count,
                  std::vector<Drafting>& all) {
    std::vector<std::int32_t> layers(model.c.layers);
    for (int i = 0; i < model.c.layers; ++i) layers[i] = i;
    if (!ready(model, layers.data(), model.c.layers)) return INCOMPLETE;
    const int own = model.c.vocabulary;
    std::vector<Drafting*> drawing;
    for (Drafting& d : all) drawing.push_back(&d);
    std::vector<float> logits;
    std::vector<std::int32_t> next;
    for (;;) {
        Rows rows;
        if (const char* wrong = read_rows(model, store, words, count, rows)) return wrong;
        if (rows.num_logits != int(drawing.size())) return "not every draft wants one row of logits";
        logits.resize(std::size_t(rows.num_logits) * own);
        forward(model, store, rows,
                Wanted{layers.data(), int(layers.size()), nullptr, 0, logits.data(), nullptr});
        if (drawing.empty()) return nullptr;
        each_row(int(drawing.size()), own, [&](int r) {
            Drafting& d = *drawing[r];
            const int wanted = d.law->o.vocabulary;
            float* z = logits.data() + std::size_t(r) * own;
            // Padded or cut to the target's vocabulary, which its options speak of.
            std::vector<float> wide;
            if (own < wanted) {
                wide.assign(wanted, -INFINITY);
                std::copy(z, z + own, wide.begin());
                z = wide.data();
            }
            const Path path{d.tokens, d.drafted};
            d.law->apply(z, d.committed - d.law->o.prompt_length, path, false);
            const NoiseKey key = d.law->key(d.committed + d.drafted);
            const Drawn drawn = draw(z, wanted, d.law->o.temperature == 0 ? nullptr : &key);
            // What no target could draw ends the draft; so does what the drafter cannot read.
            if (std::isfinite(drawn.score)) d.tokens[d.drafted++] = drawn.token;
            if (!std::isfinite(drawn.score) || drawn.token >= own) d.length = d.drafted;
        });
        std::vector<Drafting*> left;
        next.clear();
        for (Drafting* d : drawing) {
            if (d->drafted >= d->length) continue;
            left.push_back(d);
            const int start = d->committed + d->drafted - 1;
            next.insert(next.end(), {1, 0, start, d->num_pages, 1, d->tokens[d->drafted - 1]});
            next.insert(next.end(), d->pages, d->pages + d->num_pages);
        }
        if (left.empty()) return nullptr;
        drawing.swap(left);
        words = next.data();
        count = std::int64_t(next.size());
    }
}

}  // namespace
}  // namespace outrider

using namespace outrider;

// `words` are segments as outrider_forward's; those that want a row of logits draft. `numbers`
// are of each of these: tokens before the draft, its length, how many pages; then come the page
// tables, which reach to the end of the draft. `tokens` [drafts, longest] and `drafted` are written.
API const char* outrider_draft(const Model* model, Store* store, const std::int32_t* words,
                               std::int64_t count, const Law* const* laws,
                               const std::int32_t* numbers, std::int64_t size, int drafts,
                               int longest, std::int32_t* tokens, std::int32_t* drafted) {
    return guarded([&]() -> const char* {
        if (store->model != model) return "the cache is another model's";
        if (drafts < 0 || 3 * std::int64_t(drafts) > size) return "a draft is cut short";
        std::vector<Drafting> all;
        const std::int32_t* pages = numbers + 3 * drafts;
        for (int i = 0; i < drafts; ++i) {
            const std::int32_t* n = numbers + 3 * i;
            if (n[0] < 1 || n[1] < 1 || n[1] > longest || n[2] < 1 ||
                n[2] > numbers + size - pages)
                return "a draft has a bad size";
            all.push_back({laws[i], pages, n[2], n[0], n[1], tokens + std::size_t(i) * longest});
            pages += n[2];
        }
        const char* wrong = draft(*model, *store, words, count, all);
        for (int i = 0; i < drafts; ++i) drafted[i] = all[i].drafted;
        return wrong;
    });
}
