// Mixtures of experts: each row goes to the experts whose scores are highest.
//
// A step's rows are put side by side by expert, so that an expert's weights are read once for all
// of them. What a row's experts give is added in the order of their scores: its bits depend neither
// on the rows beside it nor on where these go.
#pragma once

#include <cmath>
#include <vector>

#include "multiply.hpp"

namespace outrider {

// Where the rows of a layer go. Experts that have rows are groups, and a row has a seat in the
// group of each of its experts.
struct Routing {
    std::vector<int> chosen;     // [rows][top]: experts of a row, the best first
    std::vector<float> weights;  // [rows][top]
    std::vector<int> seats;      // [rows][top]
    std::vector<int> rows;       // of seats
    std::vector<int> experts;    // of groups
    std::vector<int> first;      // seats of groups; behind the last group, how many there are

    int groups() const { return int(experts.size()); }
    int count(int group) const { return first[group + 1] - first[group]; }
};

// Returns which groups of experts a row may go to, by what `value` gives for an expert: those whose
// two best values add up to most, of equals the first (DeepSeek-V3, arXiv 2412.19437,
// section 2.1.2).
template <class Value>
std::vector<char> open_groups(const Config& c, Value value) {
    const int size = c.experts / c.expert_groups;
    std::vector<float> sums(c.expert_groups);
    for (int g = 0; g < c.expert_groups; ++g) {
        float best = value(g * size), second = -INFINITY;
        for (int e = g * size + 1; e < (g + 1) * size; ++e) {
            const float other = value(e);
            second = std::max(second, std::min(best, other));
            best = std::max(best, other);
        }
        sums[g] = best + second;
    }
    std::vector<char> open(c.expert_groups);
    for (int g = 0; g < c.expert_groups; ++g) {
        int before = 0;
        for (int h = 0; h < c.expert_groups; ++h)
            before += sums[h] > sums[g] || (sums[h] == sums[g] && h < g);
        open[g] = before < c.top_groups;
    }
    return open;
}

// Writes the experts of a row, the best first and of equals the first, and their weights, by its
// scores [experts] and, for the choice alone, `bias` [experts] or null.
inline void choose(const Config& c, const float* scores, const float* bias, int* chosen,
                   float* weights) {
    const int count = c.experts, top = c.top_experts;
    const bool sigmoids = c.router == ROUTER_SIGMOID;
    auto chance = [&](int e) { return 1 / (1 + std::exp(-scores[e])); };
    auto value_of = [&](int e) {
        return (sigmoids ? chance(e) : scores[e]) + (bias ? bias[e] : 0);
    };
    const bool grouped = c.expert_groups > 1;
    const std::vector<char> open = grouped ? open_groups(c, value_of) : std::vector<char>();
    int found = 0;
    for (int e = 0; e < count; ++e) {
        if (grouped && !open[e / (count / c.expert_groups)]) continue;
        const float value = value_of(e);
        int at = found;
        while (at > 0 && value > weights[at - 1]) --at;
        if (at == top) continue;
        found = std::min(found + 1, top);
        for (int i = found - 1; i > at; --i) {
            weights[i] = weights[i - 1];
            chosen[i] = chosen[i - 1];
        }
        weights[at] = value;
        chosen[at] = e;
    }
    // Sigmoids may all be 0; transformers adds as much, too.
    float most = scores[chosen[0]], all = sigmoids ? 1e-20f : 0;
    for (int i = 0; i < top; ++i)
        weights[i] = sigmoids ? chance(chosen[i]) : std::exp(scores[chosen[i]] - most);
    const bool selected = c.router == ROUTER_SELECTED || c.renormalised;
    if (selected)
        for (int i = 0; i < top; ++i) all += weights[i];
    else if (!sigmoids)
        for (int e = 0; e < count; ++e) all += std::exp(scores[e] - most);
    const float by = c.routed_scale / (selected || !sigmoids ? all : 1);
    for (int i = 0; i < top; ++i) weights[i] *= by;
}

template <class T>
struct Experts : Multiplier<T> {
    using Multiplier<T>::m, Multiplier<T>::multiply;
    // Room behind a group's digits, whose last bundle of rows may not be whole.
    static constexpr int SPARE = 8;
    const Config& c = m.c;
    const int live;  // rows that go through layers
    const int inner_stride = spread_stride(padded(c.expert_inner, IN_PAD));
    const int shared_stride = spread_stride(padded(c.shared_inner, IN_PAD));
    const int score_stride = padded(routed(c), LANES);  // scores of a row
    float *scores = nullptr, *made = nullptr, *shared = nullptr;
    T *seated = nullptr, *gated_seats = nullptr, *shared_inner = nullptr;
    std::vector<Routing> routings;  // of layers: who comes late still reads an earlier one's

    // Seats of `rows` rows, and room for their digits.
    static std::size_t seats(const Config& c, int rows) {
        return std::size_t(rows) * c.top_experts;
    }
    static std::size_t room(const Config& c, int rows) {
        const std::size_t all = seats(c, rows);
        return all + SPARE * std::min(all, std::size_t(c.experts));
    }

    // `rows` are those of a forward, of which `live` go through layers.
    Experts(const Weights<T>& weights, int rows, int live, int stride, int width)
        : Multiplier<T>(weights, std::max(std::size_t(padded(rows, LANES)), room(weights.c, live))),
          live(live) {
        if (!c.experts) return;
        Scratch<T>& s = m.scratch;
        const std::size_t all = seats(c, live), count = padded(live, LANES);
        scores = s.scores.reserve(count * score_stride);
        made = s.made.reserve(all * width);
        seated = s.seated.reserve(all * stride);
        gated_seats = s.inner.reserve(all * inner_stride);
        shared = s.shared.reserve(c.shared_inner ? count * width : 0);
        shared_inner = s.shared_inner.reserve(c.shared_inner ? count * shared_stride : 0);
        routings.resize(m.layers.size());
        for (std::size_t i = 0; i < m.layers.size(); ++i) {
            if (m.layers[i].mlp != MLP_MIXTURE) continue;
            routings[i].chosen.resize(all);
            routings[i].weights.resize(all);
            routings[i].seats.resize(all);
            routings[i].rows.resize(all);
            routings[i].experts.reserve(std::min(all, std::size_t(c.experts)));
        }
    }

    // Chooses the experts of all rows by their `scores`, and gives them their seats.
    void route(Team& team, const Layer<T>& layer, Routing& to) {
        const float* bias = layer.router_bias.size() ? layer.router_bias.data() : nullptr;
        team.share(live, 8, [&](int first, int last) {
            for (int r = first; r < last; ++r)
                choose(c, scores + std::size_t(r) * score_stride, bias,
                       to.chosen.data() + seats(c, r), to.weights.data() + seats(c, r));
        });
        team.share(1, 1, [&](int, int) {
            std::vector<int> next(c.experts);
            for (int expert : to.chosen) ++next[expert];
            int seat = 0;
            for (int e = 0; e < c.experts; ++e) {
                const int count = next[e];
                next[e] = seat;
                if (!count) continue;
                to.experts.push_back(e);
                to.first.push_back(seat);
                seat += count;
            }
            to.first.push_back(seat);
            for (std::size_t i = 0; i < to.chosen.size(); ++i) {
                to.seats[i] = next[to.chosen[i]]++;
                to.rows[to.seats[i]] = int(i) / c.top_experts;
            }
        });
    }

    // The product of the rows of each group, at their seats in x, with the `width` outputs of its
    // expert. `prepare` makes a group's rows.
    template <class Prepare>
    void each_product(Team& team, const Weight<T>& weight, const Routing& by, const T* x,
                      int stride, int width, const Epilogue& epilogue, Prepare prepare) {
        bool prepared = false;
        auto body = [&](const Packed* part, int units, const Epilogue& to) {
            auto place = [&](int group) {
                return this->room_at(by.first[group] + std::size_t(SPARE) * group, weight,
                                     by.count(group));
            };
            team.share(by.groups(), 1, [&](int first, int last) {
                for (int group = first; group < last; ++group) {
                    if (!prepared) prepare(group);
                    this->make_ready(weight, part, x + std::size_t(by.first[group]) * stride,
                                     stride, by.count(group), place(group));
                }
            });
            prepared = true;
            const int each = units / c.experts, all = by.groups() * each;
            team.share(all, this->grain(all, team.count, ALONE), [&](int first, int last) {
                while (first < last) {
                    const int group = first / each, stop = std::min(last, (group + 1) * each);
                    const int unit = by.experts[group] * each + first % each;
                    const std::size_t seat = by.first[group];
                    multiply(weight, part, unit, unit + stop - first, x + seat * stride, stride,
                             place(group), by.count(group),
                             to.at_row(seat).without(by.experts[group] * std::ptrdiff_t(width)));
                    first = stop;
                }
            });
        };
        this->each_part(weight, epilogue, body, width);
    }

    // Makes of every row what its experts and the shared one give: put(row, sum) gets each line of
    // LANES. `normalise` writes a row as it enters, at a place.
    template <class Normalise, class Put>
    void mix(Team& team, int number, int stride, int width, const Epilogue& gates,
             Normalise normalise, Put put) {
        const Layer<T>& layer = m.layers[number];
        Routing& routing = routings[number];
        route(team, layer, routing);
        Epilogue inside = gates;
        inside.gated = gated_seats;
        inside.gated_stride = std::size_t(inner_stride);
        each_product(team, layer.matrices[MATRIX_GATE_UP], routing, seated, stride, c.expert_inner,
                     inside, [&](int group) {
                         for (int s = routing.first[group]; s < routing.first[group + 1]; ++s)
                             normalise(seated + std::size_t(s) * stride, routing.rows[s]);
                     });
        each_product(
            team, layer.matrices[MATRIX_DOWN], routing, gated_seats, inner_stride, c.hidden,
            {.kind = Epilogue::put, .y = made, .stride = std::size_t(width), .columns = c.hidden},
            [](int) {});
        team.share(live, 4, [&](int first, int last) {
            for (int r = first; r < last; ++r) {
                const int* seats = routing.seats.data() + this->seats(c, r);
                const float* weights = routing.weights.data() + this->seats(c, r);
                const float* own = scores + std::size_t(r) * score_stride;
                const float gate = c.shared_gated ? 1 / (1 + std::exp(-own[c.experts])) : 1;
                for (int i = 0; i < c.hidden; i += LANES) {
                    F32x16 sum = splat(0.0f);
                    for (int k = 0; k < c.top_experts; ++k)
                        sum = fma(load(made + std::size_t(seats[k]) * width + i), splat(weights[k]),
                                  sum);
                    if (c.shared_inner)
                        sum = fma(load(shared + std::size_t(r) * width + i), splat(gate), sum);
                    put(r, i, sum);
                }
            }
        });
    }
};

}  // namespace outrider
