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
    F32x16 best = splat(NEVER), other = best;  // a maximum waits for the one before
    int i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        best = max(load(z + i), best);
        other = max(load(z + i + LANES), other);
    }
    for (; i + LANES <= count; i += LANES) best = max(load(z + i), best);
    float found = highest(max(best, other));
    for (; i < count; ++i) found = z[i] > found ? z[i] : found;
    return found;
}

void cut_below(float* z, int count, float least) {
    for (int i = 0; i < count; ++i) z[i] = z[i] < least ? NEVER : z[i];
}

// What rows are looked through in first; the largest element of each.
constexpr int BLOCK = 64;
static_assert(BLOCK % LANES == 0);
std::vector<float> tops_of(const float* z, int count) {
    std::vector<float> tops;
    tops.reserve(count / BLOCK + 1);
    for (int i = 0; i < count; i += BLOCK)
        tops.push_back(highest_of(z + i, std::min(BLOCK, count - i)));
    return tops;
}

// body(i) for every element that is at least `least`, in order.
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

// e^(z - top) of a block's elements, zeros behind the last of them.
struct Masses {
    float of[BLOCK] = {};

    Masses(const float* z, int count, float top) {
        int i = 0;
        for (; i + LANES <= count; i += LANES) store(of + i, exp(load(z + i) - splat(top)));
        if (i == count) return;
        float rest[LANES];
        std::fill(rest, rest + LANES, NEVER);
        std::copy(z + i, z + count, rest);
        store(of + i, exp(load(rest) - splat(top)));
    }
    float sum() const {
        F32x16 all = load(of);
        for (int i = LANES; i < BLOCK; i += LANES) all = all + load(of + i);
        return total(all);
    }
};

// The sum of e^(z - top).
double mass_of(const float* z, int count, float top) {
    double whole = 0;
    for (int i = 0; i < count; i += BLOCK)
        whole += Masses(z + i, std::min(BLOCK, count - i), top).sum();
    return whole;
}

// The k-th largest element, 0 < k < count.
float kth(const float* z, int count, const std::vector<float>& tops, int k) {
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

// Tokens in the order of their ids.
struct Tokens {
    std::vector<float> z;
    std::vector<std::int32_t> ids;
};

// The likeliest first; equal ones stay in the order of their ids.
void sort(Tokens& tokens) {
    if (std::is_sorted(tokens.z.begin(), tokens.z.end(), std::greater<>())) return;
    std::vector<std::pair<float, std::int32_t>> pairs;
    for (std::size_t i = 0; i < tokens.z.size(); ++i)
        pairs.push_back({-tokens.z[i], tokens.ids[i]});
    std::sort(pairs.begin(), pairs.end());
    for (std::size_t i = 0; i < pairs.size(); ++i) {
        tokens.z[i] = -pairs[i].first;
        tokens.ids[i] = pairs[i].second;
    }
}

// Bins of equal width for elements up to `high`, larger ones first; the last has no lower end.
struct Bins {
    static constexpr int LAST = 1023;
    const float high, per_unit;

    Bins(float low, float high) : high(high), per_unit(LAST / (high - low)) {}
    // Writes the bins of z, the last where the product is NaN.
    void find(const float* z, int count, std::int32_t* bins) const {
        for (int i = 0; i < count; ++i) {
            const float at = (high - z[i]) * per_unit;
            bins[i] = std::int32_t(at < LAST ? at : LAST);
        }
    }
};

// Of tokens, those in the bin where the mass of all from the first bin on reaches `wanted`, or in
// the last; `before` grows by what earlier bins hold. Without `ids` they are the tokens' places.
Tokens in_question(const float* z, const std::int32_t* ids, int count, float top, Bins bins,
                   double wanted, double& before) {
    const std::vector<float> tops = tops_of(z, count);
    std::vector<std::int32_t> least(tops.size());
    bins.find(tops.data(), int(tops.size()), least.data());
    const auto each_block = [&](int most, auto body) {  // that reaches the bin `most`
        std::int32_t found[BLOCK];
        for (int block = 0; block < int(tops.size()); ++block) {
            if (least[block] > most) continue;
            const int first = block * BLOCK, here = std::min(BLOCK, count - first);
            bins.find(z + first, here, found);
            body(first, here, found);
        }
    };
    double held[2][Bins::LAST + 1] = {};  // two sums each: one would wait for itself
    each_block(Bins::LAST - 1, [&](int first, int here, const std::int32_t* bin) {
        const Masses masses(z + first, here, top);
        for (int i = 0; i < here; ++i) held[i % 2][bin[i]] += masses.of[i];
    });
    int edge = 0;
    for (; edge < Bins::LAST; ++edge) {
        const double here = held[0][edge] + held[1][edge];
        if (before + here >= wanted) break;
        before += here;
    }
    Tokens found;
    each_block(edge, [&](int first, int here, const std::int32_t* bin) {
        for (int i = 0; i < here; ++i) {
            if (bin[i] != edge || z[first + i] == NEVER) continue;
            found.z.push_back(z[first + i]);
            found.ids.push_back(ids ? ids[first + i] : first + i);
        }
    });
    return found;
}

// Leaves the fewest of the likeliest tokens whose mass reaches `share` of all.
void cut_mass(float* z, int count, float share) {
    constexpr std::size_t FEW = 256;
    const float top = highest_of(z, count);
    if (!std::isfinite(top)) return;
    const double whole = mass_of(z, count, top);
    if (std::isnan(whole)) return;
    const double wanted = double(share) * whole;
    double before = 0;  // the mass of tokens above those in question
    Tokens some = in_question(z, nullptr, count, top, Bins(top - 12, top), wanted, before);
    if (some.ids.empty()) return;  // all are needed
    for (int round = 0; round < 2 && some.ids.size() > FEW; ++round) {
        const auto [low, high] = std::minmax_element(some.z.begin(), some.z.end());
        const float least = std::max(*low, top - 87);  // no mass lies below
        if (!(least < *high)) break;
        double above = before;
        Tokens fewer = in_question(some.z.data(), some.ids.data(), int(some.z.size()), top,
                                   Bins(least, *high), wanted, above);
        if (fewer.ids.empty()) break;
        some = std::move(fewer);
        before = above;
    }
    sort(some);
    float least = NEVER;  // of the last that is kept
    std::int32_t last = 0;
    for (int first = 0, all = int(some.z.size()); first < all && before < wanted; first += BLOCK) {
        const int here = std::min(BLOCK, all - first);
        const Masses masses(some.z.data() + first, here, top);
        for (int i = 0; i < here && before < wanted; ++i) {
            least = some.z[first + i];
            last = some.ids[first + i];
            before += masses.of[i];
        }
    }
    for (int i = 0; i < count; ++i)
        z[i] = z[i] > least || (z[i] == least && i <= last) ? z[i] : NEVER;
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
    sharpen(z, count);
}

void Pipeline::sharpen(float* z, int count) const {
    if (o.temperature == 0) return;
    if (o.temperature != 1)
        for (int i = 0; i < count; ++i) z[i] = z[i] / o.temperature;
    if (o.min_p <= 0) cut_below(z, count, highest_of(z, count) + o.min_p);
    if (o.top_k > 0 && o.top_k < count)
        cut_below(z, count, kth(z, count, tops_of(z, count), o.top_k));
    if (o.top_p < 1) cut_mass(z, count, o.top_p);
}

bool Pipeline::only_sharpens(int output, Path path) const {
    return !banned_ && std::int64_t(output) + path.length >= o.min_tokens && bias.empty() &&
           !o.penalises;
}

Logprobs logprobs(const float* z, int vocabulary, int token, int count, std::int32_t* ids,
                  float* values) {
    const std::vector<float> tops = tops_of(z, vocabulary);
    const float top = highest_of(tops.data(), int(tops.size()));
    int rank = 1;
    for (int block = 0; block < int(tops.size()); ++block) {
        if (!(tops[block] > z[token])) continue;
        const int first = block * BLOCK, last = std::min(first + BLOCK, vocabulary);
        for (int i = first; i < last; ++i) rank += z[i] > z[token];
    }
    const float whole = float(double(top) + std::log(mass_of(z, vocabulary, top)));
    std::vector<std::int32_t> best;
    if (count > 0) {
        const float least = count < vocabulary ? kth(z, vocabulary, tops, count) : NEVER;
        each_above(z, vocabulary, tops, least, [&](int i) { best.push_back(i); });
    }
    std::stable_sort(best.begin(), best.end(), [&](int a, int b) { return z[a] > z[b]; });
    const int found = std::min(count, int(best.size()));  // fewer where a row has NaNs
    for (int i = 0; i < count; ++i) {
        ids[i] = i < found ? best[i] : i;
        values[i] = z[ids[i]] - whole;
    }
    return {z[token] - whole, rank};
}

namespace {

// Takes in elements, of which it knows whether any is NaN.
class NanWatch {
public:
    // Returns the largest of them.
    float highest_of(const float* z, int count) {
        F32x16 best = splat(NEVER), other = best;  // a maximum waits for the one before
        Ints also = largest_;
        int i = 0;
        for (; i + 2 * LANES <= count; i += 2 * LANES) {
            const F32x16 a = load(z + i), b = load(z + i + LANES);
            best = max(a, best);
            other = max(b, other);
            largest_ = max(magnitude(a), largest_);
            also = max(magnitude(b), also);
        }
        largest_ = max(also, largest_);
        float found = highest(max(best, other));
        for (; i < count; ++i) {
            any_ |= z[i] != z[i];
            found = z[i] > found ? z[i] : found;
        }
        return found;
    }
    bool any() const { return any_ || highest(largest_) > INFINITE; }

private:
    static constexpr std::int32_t INFINITE = 0x7f800000;
    Ints largest_ = ints(0);  // of the bits of magnitudes
    bool any_ = false;
};

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
        NanWatch watch;
        int block = 0;  // of the likeliest
        for (int first = 0; first < vocabulary; first += NOISE_BLOCK) {
            of.push_back(watch.highest_of(z + first, std::min(NOISE_BLOCK, vocabulary - first)));
            if (!(of.back() > top)) continue;
            top = of.back();
            block = first;
        }
        if (watch.any()) {
            top = NAN;
            return;
        }
        likeliest = block + index_of(z + block, std::min(NOISE_BLOCK, vocabulary - block), top);
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

// The highest draws so far, the lower id first on a tie.
struct Highest {
    const int count;
    Drawn* const out;

    Highest(int count, Drawn* out) : count(count), out(out) {
        std::fill(out, out + count, Drawn{std::numeric_limits<std::int32_t>::max(), NEVER});
    }
    // Below it none of them is.
    float least() const { return out[count - 1].score; }
    void add(Drawn drawn) {
        const auto before = [&](const Drawn& other) {
            return drawn.score > other.score ||
                   (drawn.score == other.score && drawn.token < other.token);
        };
        if (!before(out[count - 1])) return;
        int place = count - 1;
        for (; place > 0 && before(out[place - 1]); --place) out[place] = out[place - 1];
        out[place] = drawn;
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
    Highest best(count, out);
    peaks.each_block([&](int first, float highest) {
        if (highest + (key ? MOST_NOISE : 0) < best.least()) return;
        float scores[NOISE_BLOCK] = {};
        if (key) {
            const NoiseWords words(*key, std::uint32_t(first));
            if (highest + words.most() < best.least()) return;
            words.write(scores);
        }
        const int here = std::min(NOISE_BLOCK, vocabulary - first);
        for (int i = 0; i < here; ++i)
            best.add({first + i, key ? scores[i] + z[first + i] : z[first + i]});
    });
}

void draw_some_of(const float* z, const std::int32_t* ids, int own, const NoiseKey* key, int count,
                  Drawn* out) {
    if (!key) {
        draw_some(z, own, nullptr, count, out);
        for (int i = 0; i < count; ++i)
            if (out[i].token < own) out[i].token = ids[out[i].token];
        return;
    }
    NanWatch watch;
    const float top = watch.highest_of(z, own);
    if (watch.any()) {
        std::fill(out, out + count, Drawn{ids[0], NAN});
        return;
    }
    Highest best(count, out);
    const auto look = [&](int first, int last) {
        const float highest = highest_of(z + first, last - first);
        if (highest + MOST_NOISE < best.least()) return;
        const NoiseWords words(*key, std::uint32_t(ids[first] / NOISE_BLOCK * NOISE_BLOCK));
        if (highest + words.most() < best.least()) return;
        float noise[NOISE_BLOCK];
        words.write(noise);
        for (int i = first; i < last; ++i) best.add({ids[i], noise[ids[i] % NOISE_BLOCK] + z[i]});
    };
    const auto end_of = [&](int first) {
        int last = first + 1;
        while (last < own && ids[last] / NOISE_BLOCK == ids[first] / NOISE_BLOCK) ++last;
        return last;
    };
    // The block of the likeliest token sets the bar high.
    const int likeliest = index_of(z, own, top);
    int start = likeliest;
    while (start > 0 && ids[start - 1] / NOISE_BLOCK == ids[likeliest] / NOISE_BLOCK) --start;
    look(start, end_of(start));
    for (int first = 0, last = 0; first < own; first = last) {
        last = end_of(first);
        if (first != start) look(first, last);
    }
}

void write_noise(const NoiseKey& key, std::int64_t count, float* out) {
    for (std::int64_t first = 0; first < count; first += NOISE_BLOCK) {
        float g[NOISE_BLOCK];
        NoiseWords(key, std::uint32_t(first)).write(g);
        for (int i = 0; i < NOISE_BLOCK && first + i < count; ++i) out[first + i] = g[i];
    }
}

}  // namespace outrider
