#include "pipeline.hpp"

#include <algorithm>
#include <cmath>

#include "noise.hpp"

namespace outrider {
namespace {

constexpr float NEVER = -INFINITY;

// The largest element; NaNs are passed over.
float highest_of(const float* z, int count) {
    F32x16 best = splat(NEVER);
    int i = 0;
    for (; i + LANES <= count; i += LANES) best = max(load(z + i), best);
    float found = highest(best);
    for (; i < count; ++i) found = z[i] > found ? z[i] : found;
    return found;
}

void cut_below(float* z, int count, float least) {
    for (int i = 0; i < count; ++i) z[i] = z[i] < least ? NEVER : z[i];
}

// The k-th largest element, 0 < k < count.
float kth(const float* z, int count, int k) {
    // k blocks reach the k-th largest of their maxima, and so do k elements at least.
    constexpr int block = 64;
    std::vector<float> some;
    float least = NEVER;
    if (k <= count / block) {
        for (int i = 0; i + block <= count; i += block) some.push_back(highest_of(z + i, block));
        std::nth_element(some.begin(), some.begin() + k - 1, some.end(), std::greater<>());
        least = some[k - 1];
        some.clear();
    }
    for (int i = 0; i < count; ++i)
        if (z[i] >= least) some.push_back(z[i]);
    if (int(some.size()) < k) return NEVER;  // NaNs
    std::nth_element(some.begin(), some.begin() + k - 1, some.end(), std::greater<>());
    return some[k - 1];
}

// Leaves the fewest of the likeliest tokens whose mass reaches `share` of all.
void cut_mass(float* z, int count, float share) {
    const float top = highest_of(z, count);
    if (!std::isfinite(top)) return;
    // Masses by how far z lies below the largest, so that only one bin has to be sorted.
    constexpr int bins = 1024;
    constexpr float fine = 16;
    std::vector<float> mass(count);
    double in_bin[bins] = {};
    double whole = 0;
    auto bin_of = [&](float x) {
        const float down = (top - x) * fine;
        return down < bins - 1 ? int(down) : bins - 1;
    };
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(&mass[i], exp(load(z + i) - splat(top)));
    for (; i < count; ++i) {
        float one[LANES];
        store(one, exp(splat(z[i] - top)));
        mass[i] = one[0];
    }
    for (i = 0; i < count; ++i)
        if (z[i] > NEVER) in_bin[bin_of(z[i])] += mass[i];
    for (double m : in_bin) whole += m;
    const double wanted = double(share) * whole;
    double before = 0;
    int edge = 0;
    while (edge < bins - 1 && before + in_bin[edge] < wanted) before += in_bin[edge++];
    std::vector<std::int32_t> sorted;
    for (i = 0; i < count; ++i) {
        if (!(z[i] > NEVER)) continue;
        const int bin = bin_of(z[i]);
        if (bin == edge) sorted.push_back(i);
        if (bin > edge) z[i] = NEVER;
    }
    std::stable_sort(sorted.begin(), sorted.end(), [&](int a, int b) { return z[a] > z[b]; });
    for (std::int32_t id : sorted) {
        const float m = mass[id];
        if (before >= wanted) z[id] = NEVER;
        before += m;
    }
}

}  // namespace

void keep(float* z, int count, Mask mask) {
    for (int first = 0; first < count; first += 8) {
        const unsigned bits = mask[first / 8];
        if (bits == 0xff) continue;
        const int last = std::min(first + 8, count);
        for (int i = first; i < last; ++i) z[i] = bits >> (i - first) & 1 ? z[i] : NEVER;
    }
}

Pipeline::Seen& Pipeline::seen(std::int32_t id) {
    // Room comes first: once the map has the token, nothing may fail.
    if (seen_.size() == seen_.capacity()) seen_.reserve(2 * seen_.size() + 16);
    const auto [at, fresh] = slots_.emplace(id, int(seen_.size()));
    if (fresh) seen_.push_back({id, 0});
    return seen_[at->second];
}

void Pipeline::count_prompt(const std::int32_t* ids, int count) {
    for (int i = 0; i < count; ++i) seen(ids[i]);
}

void Pipeline::count_output(const std::int32_t* ids, int count) {
    for (int i = 0; i < count; ++i) ++seen(ids[i]).times;
}

// Of a token that occurs, in the output so many times.
float Pipeline::penalised(float z, int times) const {
    if (o.repetition != 1) z = z > 0 ? z / o.repetition : z * o.repetition;
    // Rounded as NumPy rounds it in sampling/history.py.
    const double off = double(o.frequency * float(times)) + (times > 0 ? o.presence : 0.0);
    return z - float(off);
}

void Pipeline::penalise(float* z, Path path) const {
    std::vector<std::int32_t> sorted(path.ids, path.ids + path.length);
    std::sort(sorted.begin(), sorted.end());
    std::vector<std::pair<std::int32_t, float>> ahead;  // tokens of the path, as they will be
    for (auto first = sorted.begin(), last = first; first != sorted.end(); first = last) {
        const std::int32_t id = *first;
        last = std::find_if(first, sorted.end(), [&](std::int32_t other) { return other != id; });
        const auto at = slots_.find(id);
        const int before = at == slots_.end() ? 0 : seen_[at->second].times;
        ahead.emplace_back(id, penalised(z[id], before + int(last - first)));
    }
    for (const Seen& token : seen_) z[token.id] = penalised(z[token.id], token.times);
    for (const auto& [id, value] : ahead) z[id] = value;
}

void Pipeline::apply(float* z, int output, Path path, bool late_only) const {
    const int count = o.vocabulary;
    if (!late_only) {
        if (banned_)
            for (int i = 0; i < count; ++i) z[i] = banned_[i] ? NEVER : z[i];
        if (std::int64_t(output) + path.length < o.min_tokens)
            for (std::int32_t id : ends) z[id] = NEVER;
        for (std::size_t i = 0; i < bias.size(); ++i) z[bias_ids[i]] += bias[i];
    }
    if (o.penalises) penalise(z, path);
    if (o.temperature == 0) return;
    if (o.temperature != 1)
        for (int i = 0; i < count; ++i) z[i] = z[i] / o.temperature;
    if (o.min_p <= 0) cut_below(z, count, highest_of(z, count) + o.min_p);
    if (o.top_k > 0 && o.top_k < count) cut_below(z, count, kth(z, count, o.top_k));
    if (o.top_p < 1) cut_mass(z, count, o.top_p);
}

Logprobs logprobs(const float* z, int vocabulary, int token, int count, std::int32_t* ids,
                  float* values) {
    const float top = highest_of(z, vocabulary);
    double mass = 0;
    int rank = 1, i = 0;
    for (; i + LANES <= vocabulary; i += LANES) mass += total(exp(load(z + i) - splat(top)));
    for (; i < vocabulary; ++i) {
        float one[LANES];
        store(one, exp(splat(z[i] - top)));
        mass += one[0];
    }
    for (i = 0; i < vocabulary; ++i) rank += z[i] > z[token];
    const float whole = float(double(top) + std::log(mass));
    std::vector<std::int32_t> best;
    if (count > 0) {
        const float least = count < vocabulary ? kth(z, vocabulary, count) : NEVER;
        for (i = 0; i < vocabulary; ++i)
            if (z[i] >= least) best.push_back(i);
    }
    std::stable_sort(best.begin(), best.end(), [&](int a, int b) { return z[a] > z[b]; });
    const int found = std::min(count, int(best.size()));  // fewer where a row has NaNs
    for (i = 0; i < count; ++i) {
        ids[i] = i < found ? best[i] : i;
        values[i] = z[ids[i]] - whole;
    }
    return {z[token] - whole, rank};
}

namespace {

bool any_nan(const float* z, int count) {
    bool any = false;
    for (int i = 0; i < count; ++i) any |= z[i] != z[i];
    return any;
}

int index_of(const float* z, int count, float value) {
    int at = 0;
    while (at < count - 1 && z[at] != value) ++at;
    return at;
}

// look(first) for every block of a row, that of the likeliest token before all others, since it
// sets the bar high.
template <class Look>
void each_block(int vocabulary, int likeliest, Look look) {
    const int start = likeliest / NOISE_BLOCK * NOISE_BLOCK;
    look(start);
    for (int first = 0; first < vocabulary; first += NOISE_BLOCK)
        if (first != start) look(first);
}

}  // namespace

Drawn draw(const float* z, int vocabulary, const NoiseKey* key) {
    if (any_nan(z, vocabulary)) return {0, NAN};
    const float top = highest_of(z, vocabulary);
    const int likeliest = index_of(z, vocabulary, top);
    if (!key || !std::isfinite(top)) return {likeliest, top};
    Drawn best{likeliest, NEVER};
    each_block(vocabulary, likeliest, [&](int first) {
        const int count = std::min(NOISE_BLOCK, vocabulary - first);
        // No noise lifts what lies further below; adding rounds upwards no more than the best.
        if (highest_of(z + first, count) + MOST_NOISE < best.score) return;
        float scores[NOISE_BLOCK];
        gumbel_block(*key, std::uint32_t(first), scores);
        for (int i = 0; i < count; ++i) scores[i] += z[first + i];
        const float here = highest_of(scores, count);
        if (here < best.score) return;
        const int token = first + index_of(scores, count, here);
        if (here > best.score || token < best.token) best = {token, here};
    });
    return best;
}

void draw_some(const float* z, int vocabulary, const NoiseKey* key, int count, Drawn* out) {
    if (count == 1 || any_nan(z, vocabulary)) {
        std::fill(out, out + count, draw(z, vocabulary, key));
        return;
    }
    std::fill(out, out + count, Drawn{vocabulary, NEVER});
    const float lift = key ? MOST_NOISE : 0;
    each_block(vocabulary, index_of(z, vocabulary, highest_of(z, vocabulary)), [&](int first) {
        const int here = std::min(NOISE_BLOCK, vocabulary - first);
        if (highest_of(z + first, here) + lift < out[count - 1].score) return;
        float scores[NOISE_BLOCK] = {};
        if (key) gumbel_block(*key, std::uint32_t(first), scores);
        for (int i = 0; i < here; ++i) {
            const Drawn drawn{first + i, key ? scores[i] + z[first + i] : z[first + i]};
            auto before = [&](const Drawn& other) {
                return drawn.score > other.score ||
                       (drawn.score == other.score && drawn.token < other.token);
            };
            if (!before(out[count - 1])) continue;
            int place = count - 1;
            for (; place > 0 && before(out[place - 1]); --place) out[place] = out[place - 1];
            out[place] = drawn;
        }
    });
}

void write_noise(const NoiseKey& key, std::int64_t count, float* out) {
    for (std::int64_t first = 0; first < count; first += NOISE_BLOCK) {
        float g[NOISE_BLOCK];
        gumbel_block(key, std::uint32_t(first), g);
        for (int i = 0; i < NOISE_BLOCK && first + i < count; ++i) out[first + i] = g[i];
    }
}

}  // namespace outrider
