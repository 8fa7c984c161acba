#include "pipeline.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

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

// e^x, as `exp` has it.
float mass_of(float x) {
    float lanes[LANES];
    store(lanes, exp(splat(x)));
    return lanes[0];
}

void cut_below(float* z, int count, float least) {
    for (int i = 0; i < count; ++i) z[i] = z[i] < least ? NEVER : z[i];
}

// What rows are looked through in first; the largest element of each.
constexpr int BLOCK = 64;
std::vector<float> tops_of(const float* z, int count) {
    std::vector<float> tops;
    tops.reserve(count / BLOCK + 1);
    for (int i = 0; i < count; i += BLOCK)
        tops.push_back(highest_of(z + i, std::min(BLOCK, count - i)));
    return tops;
}

// body(i) for every element that is at least `least`, which is above -inf, in order.
template <class Body>
void each_above(const float* z, int count, const std::vector<float>& tops, float least, Body body) {
    for (int block = 0; block < int(tops.size()); ++block) {
        if (!(tops[block] >= least)) continue;
        const int first = block * BLOCK, last = std::min(first + BLOCK, count);
        for (int i = first; i < last; ++i)
            if (z[i] >= least) body(i);
    }
}

constexpr float LOWEST = std::numeric_limits<float>::lowest();

// The k-th largest element, 0 < k < count.
float kth(const float* z, int count, int k) {
    const std::vector<float> tops = tops_of(z, count);
    // k blocks reach the k-th largest of their maxima, and so do k elements at least.
    float least = LOWEST;
    std::vector<float> some;
    if (k <= int(tops.size())) {
        some = tops;
        std::nth_element(some.begin(), some.begin() + k - 1, some.end(), std::greater<>());
        least = std::max(least, some[k - 1]);
        some.clear();
    }
    each_above(z, count, tops, least, [&](int i) { some.push_back(z[i]); });
    if (int(some.size()) < k) return NEVER;  // others are -inf or NaN
    std::nth_element(some.begin(), some.begin() + k - 1, some.end(), std::greater<>());
    return some[k - 1];
}

// Leaves the fewest of the likeliest tokens whose mass reaches `share` of all.
void cut_mass(float* z, int count, float share) {
    const std::vector<float> tops = tops_of(z, count);
    const float top = highest_of(tops.data(), int(tops.size()));
    if (!std::isfinite(top)) return;
    double whole = 0;
    int i = 0;
    for (; i + LANES <= count; i += LANES) whole += total(exp(load(z + i) - splat(top)));
    for (; i < count; ++i) whole += mass_of(z[i] - top);
    if (std::isnan(whole)) return;
    const double wanted = double(share) * whole;
    struct Token {
        float z, mass;
        std::int32_t id;
    };
    std::vector<Token> likely;
    // Most mass is near the top: only where that does not reach are all elements looked at.
    for (float least : {top - 12, LOWEST}) {
        double mass = 0;
        likely.clear();
        each_above(z, count, tops, least, [&](int id) {
            likely.push_back({z[id], mass_of(z[id] - top), id});
            mass += likely.back().mass;
        });
        if (mass >= wanted) break;
    }
    const auto order = [](const Token& a, const Token& b) {
        return a.z > b.z || (a.z == b.z && a.id < b.id);
    };
    // The first `kept` are in; those of [kept, end) stay in question, and are halved.
    auto kept = likely.begin(), end = likely.end();
    double before = 0;
    while (end - kept > 32) {
        const auto middle = kept + (end - kept) / 2;
        std::nth_element(kept, middle, end, order);
        double mass = 0;
        for (auto at = kept; at < middle; ++at) mass += at->mass;
        if (before + mass >= wanted) {
            end = middle;
        } else {
            before += mass;
            kept = middle;
        }
    }
    std::sort(kept, end, order);
    for (; kept < end && before < wanted; ++kept) before += kept->mass;
    std::fill(z, z + count, NEVER);
    for (auto at = likely.begin(); at < kept; ++at) z[at->id] = at->z;
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
    for (; i < vocabulary; ++i) mass += mass_of(z[i] - top);
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

// A row's largest elements by block, and its largest of all; NaN where an element is.
struct Peaks {
    std::vector<float> of;  // by NOISE_BLOCK
    int likeliest = 0;
    float top = NEVER;

    Peaks(const float* z, int vocabulary) {
        of.reserve(vocabulary / NOISE_BLOCK + 1);
        for (int first = 0; first < vocabulary; first += NOISE_BLOCK) {
            const int count = std::min(NOISE_BLOCK, vocabulary - first);
            if (any_nan(z + first, count)) {
                likeliest = 0;
                top = NAN;
                return;
            }
            of.push_back(highest_of(z + first, count));
            if (of.back() > top) {
                top = of.back();
                likeliest = first + index_of(z + first, count, top);
            }
        }
    }

    // look(first, highest) for every block of a row, that of the likeliest token before all others,
    // since it sets the bar high.
    template <class Look>
    void each_block(Look look) const {
        const int start = likeliest / NOISE_BLOCK;
        look(start * NOISE_BLOCK, of[start]);
        for (int block = 0; block < int(of.size()); ++block)
            if (block != start) look(block * NOISE_BLOCK, of[block]);
    }
};

}  // namespace

Drawn draw(const float* z, int vocabulary, const NoiseKey* key) {
    const Peaks peaks(z, vocabulary);
    if (!key || !std::isfinite(peaks.top)) return {peaks.likeliest, peaks.top};
    Drawn best{peaks.likeliest, NEVER};
    peaks.each_block([&](int first, float highest) {
        // No noise lifts what lies further below; adding rounds upwards no more than the best.
        if (highest + MOST_NOISE < best.score) return;
        const NoiseWords words(*key, std::uint32_t(first));
        if (highest + words.most() < best.score) return;
        const int count = std::min(NOISE_BLOCK, vocabulary - first);
        float scores[NOISE_BLOCK];
        words.write(scores);
        for (int i = 0; i < count; ++i) scores[i] += z[first + i];
        const float here = highest_of(scores, count);
        if (here < best.score) return;
        const int token = first + index_of(scores, count, here);
        if (here > best.score || token < best.token) best = {token, here};
    });
    return best;
}

void draw_some(const float* z, int vocabulary, const NoiseKey* key, int count, Drawn* out) {
    if (count == 1) {
        *out = draw(z, vocabulary, key);
        return;
    }
    const Peaks peaks(z, vocabulary);
    if (std::isnan(peaks.top)) {
        std::fill(out, out + count, Drawn{0, NAN});
        return;
    }
    std::fill(out, out + count, Drawn{vocabulary, NEVER});
    peaks.each_block([&](int first, float highest) {
        if (highest + (key ? MOST_NOISE : 0) < out[count - 1].score) return;
        float scores[NOISE_BLOCK] = {};
        if (key) {
            const NoiseWords words(*key, std::uint32_t(first));
            if (highest + words.most() < out[count - 1].score) return;
            words.write(scores);
        }
        const int here = std::min(NOISE_BLOCK, vocabulary - first);
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
        NoiseWords(key, std::uint32_t(first)).write(g);
        for (int i = 0; i < NOISE_BLOCK && first + i < count; ++i) out[first + i] = g[i];
    }
}

}  // namespace outrider
