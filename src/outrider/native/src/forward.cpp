#include <algorithm>
#include <atomic>
#include <map>

#include "attention.hpp"
#include "blend.hpp"
#include "conv.hpp"
#include "embed.hpp"
#include "experts.hpp"
#include "linear.hpp"
#include "marks.hpp"

namespace outrider {
namespace {

// Workers are called in where there is work for them: below this many products of two numbers the
// time to meet is longer.
constexpr long WORTH_SHARING = 1 << 19;

template <class T>
struct Forward : Work, Experts<T> {
    using Experts<T>::m, Experts<T>::multiply, Experts<T>::live;
    using Experts<T>::own_room, Experts<T>::grain, Experts<T>::each_part;
    Store& store_;
    const Rows& rows;
    const std::vector<int> sublayers, hidden, scored;  // `scored`: rows that want logits, in order
    float* const logits;
    float* const hidden_out;
    const std::size_t hidden_rows;
    const bool likely;
    const int columns;                             // of logits
    float *x, *qkv, *added;                        // see Scratch
    float *entering_, *rates, *mixing, *leaving_;  // of layers with states
    T *normed, *q, *attended, *gated, *paired, *mixed, *blended;
    std::uint8_t* nonfinite;
    const Config c = m.c;
    const int n = int(rows.rows.size());
    const int width = padded(c.hidden, IN_PAD);
    const int normed_stride = normed_stride_of(c);
    const int paired_stride = spread_stride(padded(2 * c.hidden, IN_PAD));
    const int inner = spread_stride(padded(c.inner, IN_PAD));
    const int turned = entering(c);
    const int first_key = (1 + (c.gated != 0)) * c.heads;  // among the heads of qkv
    const int qkv_width = padded(turned, LANES);
    const int out_width = spread_stride(padded(c.heads * c.head_dim, IN_PAD));
    const int head_pad = m.head_pad();
    const int entering_width = spread_stride(padded(
        std::max(c.convs ? entering(c, MIXER_CONV) : 0, linears(c) ? entering(c, MIXER_LINEAR) : 0),
        IN_PAD));
    const int mixing_width = spread_stride(padded(linear_channels(c), IN_PAD));
    const int mixed_width = spread_stride(padded(
        std::max(c.convs ? leaving(c, MIXER_CONV) : 0, linears(c) ? leaving(c, MIXER_LINEAR) : 0),
        IN_PAD));
    const LinearAttention linear{c};
    Blend<T> blend{c, rows, nullptr};
    const int num_walks = int(rows.walks.size());  // a worker that comes late finds no rows
    const LayerPlaces places = places_of(m);
    std::map<Sight, Tasks> tasks;
    Memory<float> parts;               // of attention
    std::vector<std::size_t> written;  // where many rows' keys go: bytes from a layer's first block

    Forward(const Weights<T>& weights, Store& store, const Rows& rows,
            const ForwardRequest& request, std::vector<int> scored)
        : Experts<T>(weights, int(rows.rows.size()), int(rows.rows.size()) - rows.given,
                     normed_stride_of(weights.c), padded(weights.c.hidden, IN_PAD)),
          store_(store),
          rows(rows),
          sublayers(request.sublayers, request.sublayers + request.num_sublayers),
          hidden(request.hidden, request.hidden + request.num_hidden),
          scored(std::move(scored)),
          logits(request.logits),
          hidden_out(request.hidden_out),
          hidden_rows(request.hidden_rows),
          likely(request.likely),
          columns(request.likely ? int(weights.likely_ids.size()) : weights.c.vocabulary) {
        Scratch<T>& s = m.scratch;
        const std::size_t count = padded(n, LANES);
        x = s.x.reserve(count * width);
        qkv = s.qkv.reserve(count * qkv_width);
        const bool behind = std::any_of(m.layers.begin(), m.layers.end(), [](const Layer<T>& l) {
            return l.after_norm.size() || l.output_norm.size() || l.mlp_kernels.size();
        });
        added = s.added.reserve(behind ? count * width : 0);
        const std::size_t alone = std::size_t(ALONE) * pool_size();
        normed = s.normed.reserve((count > alone ? count : alone) * normed_stride);
        q = s.q.reserve(count * c.heads * head_pad);
        attended = s.attended.reserve(count * out_width);
        gated = s.gated.reserve(count * inner);
        paired = s.paired.reserve(begins_with_state(c) ? count * paired_stride : 0);
        const std::size_t linears = outrider::linears(c) ? count : 0;
        entering_ = s.entering.reserve(count * entering_width);
        mixed = s.mixed.reserve(count * mixed_width);
        mixing = s.mixing.reserve(linears * mixing_width);
        rates = s.rates.reserve(linears * 2 * c.value_heads);
        leaving_ = s.leaving.reserve(linears * linear_values(c));
        blend.own = s.kernels.reserve(count * blend.stride);
        blended = s.blended.reserve(c.kernel_taps ? count * normed_stride : 0);
        s.nonfinite.assign(n, 0);
        nonfinite = s.nonfinite.data();
        int most = 0;
        for (const int sublayer : sublayers) {
            const Sight seen = sight(m.layers[sublayer / 2]);
            const auto [made, fresh] = tasks.try_emplace(
                seen, rows, c.heads / c.kv_heads, c.kv_heads, store.page_size, seen, pool_size());
            most = std::max(most, made->second.parts);
        }
        parts = Memory<float>::unset(most * Tally::size(head_pad));
        if (n > MOST_ROWS<T>)  // beside fewer rows memory is busy with weights
            with_cache(0, [&]<class E>(const Cache<E>& cache) {
                for (const Row& row : rows.rows) {
                    const std::size_t place = cache.place(row.slot) * sizeof(E);
                    if (written.empty() || written.back() != place) written.push_back(place);
                }
            });
    }

    static int normed_stride_of(const Config& c) { return spread_stride(padded(c.hidden, IN_PAD)); }

    Sight sight(const Layer<T>& layer) const {
        const bool causal =
            c.input != INPUT_BLOCK || c.causal || (layer.window && c.causal_windows);
        return {layer.window, causal};
    }

    int phases() const {
        const int kept = int(hidden.size());
        // Of a sublayer; products have three parts at most.
        const int most = (c.besides ? 27 : c.kernel_taps ? 26 : 15) + (c.experts ? 15 : 0);
        return 12 + kept + int(sublayers.size()) * (most + kept);
    }

    int helpers() const {
        const long inner = std::max(c.inner, c.top_experts * c.expert_inner);
        const long layer = long(c.hidden) * (2L * c.heads * c.head_dim + 3L * inner);
        const long all =
            layer * n * long(sublayers.size()) / 2 + long(c.hidden) * columns * long(scored.size());
        return all < WORTH_SHARING ? 1 : pool_size();
    }

    // Writes the RMSNorm of a row of x, or the row itself.
    void normed_row(T* to, int row, const Memory<float>& norm) const {
        const float* from = x + std::size_t(row) * width;
        if (norm.size() && row < live)
            return rms_norm(to, from, norm.data(), c.hidden, width, c.norm_eps);
        for (int i = 0; i < width; i += LANES) store(to + i, load(from + i));
    }

    // The product of the RMSNorm of rows of x, or of the rows themselves where the norm has no
    // weights or they are states, `pick` saying which. Few rows every worker normalises for itself,
    // at its first chunk, rather than wait for another.
    template <class Pick>
    void norm_multiply(Team& team, const Memory<float>& norm, const Weight<T>& weight, int count,
                       Pick pick, const Epilogue& epilogue) {
        auto normalise = [&](T* to, int first, int last) {
            for (int r = first; r < last; ++r)
                normed_row(to + std::size_t(r) * normed_stride, pick(r), norm);
        };
        if (count > ALONE) {
            multiply(team, weight, normed, normed_stride, count, epilogue,
                     [&](int first, int last) { normalise(normed, first, last); });
            return;
        }
        bool normal = false;
        const auto mine = own_room(team, weight, count);
        T* own = normed + std::size_t(team.index) * ALONE * normed_stride;
        each_part(weight, epilogue, [&](const Packed* part, int units, const Epilogue& to) {
            bool ready = false;
            team.share(units, grain(units, team.count, count), [&](int first, int last) {
                if (!normal) normalise(own, 0, count);
                normal = true;
                if (!ready) this->make_ready(weight, part, own, normed_stride, count, mine);
                ready = true;
                multiply(weight, part, first, last, own, normed_stride, mine, count, to);
            });
        });
    }

    void embed(int first, int last) {
        std::vector<T> room(c.hidden);
        for (int r = first; r < last; ++r) {
            float* to = x + std::size_t(r) * width;
            for (int i = c.hidden; i < width; ++i) to[i] = 0;
            if (r < live)
                embed_token(m, rows.rows[r].token, room.data(), to);
            else
                std::memcpy(to, rows.states + std::size_t(r - live) * c.hidden,
                            c.hidden * sizeof(float));
        }
    }

    void pair(int first, int last) {
        std::vector<T> room(c.hidden);
        for (int r = first; r < last; ++r)
            pair_with_state(m, rows.rows[r].token, rows.states + std::size_t(r) * c.hidden,
                            room.data(), width, x + std::size_t(r) * width,
                            paired + std::size_t(r) * paired_stride, paired_stride);
    }

    // A head's numbers up to head_pad, zeros behind its last: in place, or in `room`.
    const float* whole(const float* head, float* room) const {
        if (c.head_dim == head_pad) return head;
        std::memcpy(room, head, c.head_dim * sizeof(float));
        std::memset(room + c.head_dim, 0, (head_pad - c.head_dim) * sizeof(float));
        return room;
    }

    // Writes one head, normalised and turned (not where `cos` is null), as N; lines of 16 may reach
    // into the next half.
    template <class N>
    void turn(N* to, const float* from, const float* norm, const float* cos, const float* sin) {
        alignas(64) float room[MAX_HEAD_DIM + LANES];
        const int half = c.head_dim / 2;
        const float* head = whole(from, room);
        if (norm) {
            rms_norm(room, head, norm, c.head_dim, head_pad, c.norm_eps);
            head = room;
        }
        const float* other = head + half;
        for (int i = 0; cos && i < half; i += LANES)
            store(to + i, load(head + i) * load(cos + i) - load(other + i) * load(sin + i));
        for (int i = 0; cos && i < half; i += LANES)
            store(to + half + i, load(other + i) * load(cos + i) + load(head + i) * load(sin + i));
        for (int i = 0; !cos && i < head_pad; i += LANES) store(to + i, load(head + i));
        std::fill(to + c.head_dim, to + head_pad, N());
    }

    // body(the cache of a layer of attention)
    template <class Body>
    auto with_cache(int place, Body body) const {
        return c.coded_cache ? body(cache_of<Codes>(store_, place))
                             : body(cache_of<T>(store_, place));
    }

    void put(const Cache<T>& to, const Row& row, int head, const T* key, const T* value, int) {
        to.put(row.slot, head, key, value);
    }
    void put(const Cache<Codes>& to, const Row& row, int head, float* key, const float* value,
             int number) {
        constexpr int MOST = MAX_HEAD_DIM / Codes::WIDTH;
        CodeRow coded[2][MOST];
        const float* centre = to.centres + std::size_t(head) * head_pad;
        for (int d = 0; to.centres && d < head_pad; ++d) key[d] -= centre[d];
        encode(coded[1], value, head_pad);
        if (!encode(coded[0], key, head_pad)) note(number);
        to.put(row.slot, head, coded[0], coded[1]);
    }

    // Notes that a row is not finite.
    void note(int row) {
        std::atomic_ref<std::uint8_t>(nonfinite[row]).store(1, std::memory_order_relaxed);
    }

    // Writes a value as N. One that is no number would reach even those who give it no weight: it
    // is noted instead.
    template <class N>
    void put_value(N* to, const float* from, int row) {
        alignas(64) float room[MAX_HEAD_DIM];
        const float* value = whole(from, room);
        F32x16 zero = splat(0.0f);  // stays so unless an element is no number
        for (int i = 0; i < head_pad; i += LANES) {
            store(to + i, load(value + i));
            zero = fma(load(to + i), splat(0.0f), zero);
        }
        if (total(zero) == 0) return;
        std::memset(to, 0, head_pad * sizeof(N));
        note(row);
    }

    // Queries to s.q, keys and values to their slots.
    template <class E>
    void turn_all(int first, int last, const Cache<E>& to, const Layer<T>& layer) {
        const int group = c.heads / c.kv_heads, half = c.head_dim / 2, d = c.head_dim;
        const float* q_norm = layer.wide_q ? nullptr : layer.q_norm.data();
        const float* k_norm = layer.wide_k ? nullptr : layer.k_norm.data();
        using Number = std::conditional_t<std::is_same_v<E, Codes>, float, E>;
        alignas(64) Number key[MAX_HEAD_DIM + LANES], value[MAX_HEAD_DIM];
        for (int task = first; task < last; ++task) {
            const int r = task / c.kv_heads, h = task % c.kv_heads;
            const Row& row = rows.rows[r];
            float* from = qkv + std::size_t(r) * qkv_width;
            const float *cos = nullptr, *sin = nullptr;
            if (layer.table >= 0) {
                const int table = layer.table + row.far;
                cos = m.cos[table].data() + std::size_t(row.position) * half;
                sin = m.sin[table].data() + std::size_t(row.position) * half;
            }
            if (c.heat != 0 && row.position >= c.heat_step) {
                const float by = 1 + c.heat * std::log(1 + float(row.position / c.heat_step));
                for (int i = h * group * d; i < (h + 1) * group * d; ++i) from[i] *= by;
            }
            T* queries = q + std::size_t(r) * c.heads * head_pad;
            for (int g = h * group; r < live && g < (h + 1) * group; ++g)
                turn(queries + g * head_pad, from + g * d, q_norm, cos, sin);
            turn(key, from + (first_key + h) * d, k_norm, cos, sin);
            put_value(value, from + (first_key + c.kv_heads + h) * d, r);
            put(to, row, h, key, value, r);
        }
    }

    // A worker's part of the blocks that new keys and values go to. A key touches every line of its
    // block, and attention reads both blocks next.
    Upcoming upcoming(const Team& team, int number) const {
        const std::size_t* all = written.data();
        const std::size_t count = written.size();
        return with_cache(places.attention[number], [&]<class E>(const Cache<E>& to) -> Upcoming {
            return {to.base,
                    all + count * team.index / team.count,
                    all + count * (team.index + 1) / team.count,
                    2 * c.kv_heads,
                    to.plane() * sizeof(E),
                    padded(int(to.block_bytes()), 256)};
        });
    }

    template <class E>
    void attention(Team& team, const Cache<E>& from, const Layer<T>& layer) {
        const int group = c.heads / c.kv_heads;
        const Tasks& tasks = this->tasks.at(sight(layer));
        const Attention<T, E> work(from, rows, tasks, c, layer.sinks.data());
        AttentionScratch<E> bench;
        team.share(int(tasks.all.size()), 1, [&](int first, int last) {
            for (int i = first; i < last; ++i) {
                const std::size_t head = std::size_t(tasks.all[i].head) * group;
                work.run(bench, i, q + head * head_pad, std::size_t(c.heads) * head_pad,
                         attended + head * c.head_dim, out_width, parts.data());
            }
        });
        team.share(int(tasks.joints.size()), 1, [&](int first, int last) {
            for (int i = first; i < last; ++i) {
                const std::size_t head = std::size_t(tasks.joints[i].head) * group;
                work.unite(bench, tasks.joints[i], parts.data(), attended + head * c.head_dim,
                           out_width);
            }
        });
        Products<E>::done(bench);
    }

    void keep_hidden(Team& team, int layer) {
        const bool normed = layer == c.layers && c.output_normed;
        for (std::size_t i = 0; i < hidden.size(); ++i) {
            if (hidden[i] != layer) continue;
            team.share(live, 4, [&](int first, int last) {
                std::vector<float> room(normed ? width : 0);
                for (int r = first; r < last; ++r) {
                    const float* from = x + std::size_t(r) * width;
                    if (normed) {
                        rms_norm(room.data(), from, m.norm.data(), c.hidden, width, c.norm_eps);
                        from = room.data();
                    }
                    std::memcpy(hidden_out + (i * hidden_rows + r) * c.hidden, from,
                                c.hidden * sizeof(float));
                }
            });
        }
    }

    static int same(int r) { return r; }

    // What sublayers add to the residual stream, multiplied by a number of their kind.
    Epilogue residual(float by) const {
        return {.kind = Epilogue::add,
                .y = x,
                .stride = std::size_t(width),
                .columns = width,
                .scale = c.residual_scale * by};
    }

    // The product that ends a sublayer: to the residual stream, normalised where `norm` has
    // weights, blended where there are `kernels`.
    void end(Team& team, const Weight<T>& weight, const T* from, int stride,
             const Memory<float>& norm, const Memory<float>& kernels, float by) {
        if (!norm.size() && !kernels.size()) {
            multiply(team, weight, from, stride, live, residual(by));
            return;
        }
        Epilogue apart = residual(by);
        apart.kind = Epilogue::put;
        apart.scale = 1;
        apart.y = added;
        multiply(team, weight, from, stride, live, apart);
        if (!kernels.size()) return add_behind(team, norm, c.residual_scale * by);
        team.share(live, 1, [&](int first, int last) {
            for (int r = first; r < last; ++r)
                blend.leave(r, x + std::size_t(r) * width, added, width, kernels.data(),
                            c.residual_scale * by);
        });
    }

    // Adds what stands in `added`, behind a norm.
    void add_behind(Team& team, const Memory<float>& norm, float by) {
        team.share(live, 1, [&](int first, int last) {
            for (std::size_t r = first; r < std::size_t(last); ++r)
                add_normed(x + r * width, added + r * width, norm.data(), c.hidden, width,
                           c.norm_eps, by);
        });
    }

    // Makes `blended` of what enters a sublayer of blocks; states enter as they are.
    void blend_entering(Team& team, const Memory<float>& norm, const Weight<T>& weight,
                        const Memory<float>& all, int count) {
        team.share(count, 1, [&](int first, int last) {
            for (int r = first; r < last; ++r) {
                T* row = (r < live ? normed : blended) + std::size_t(r) * normed_stride;
                const float* from = x + std::size_t(r) * width;
                for (int i = 0; r >= live && i < width; i += LANES) store(row + i, load(from + i));
                if (r < live) rms_norm(row, from, norm.data(), c.hidden, width, c.norm_eps);
            }
        });
        multiply(team, weight, normed, normed_stride, live,
                 {.kind = Epilogue::put,
                  .y = blend.own,
                  .stride = std::size_t(blend.stride),
                  .columns = kernel_numbers(c)});
        team.share(live, 1, [&](int first, int last) {
            for (int r = first; r < last; ++r)
                blend.enter(r, blended + std::size_t(r) * normed_stride, normed, normed_stride,
                            all.data());
        });
    }

    void end_attention(Team& team, const Layer<T>& layer) {
        const bool beside = layer.mixer == MIXER_BESIDE;
        end(team, layer.matrices[beside ? MATRIX_BESIDE_OUTPUT : MATRIX_OUTPUT], attended,
            out_width, layer.after_norm, layer.attention_kernels, c.attention_out);
    }
    void end_mixed(Team& team, const Layer<T>& layer, float by) {
        end(team, layer.matrices[MATRIX_OUTPUT], mixed, mixed_width, layer.after_norm,
            layer.attention_kernels, by);
    }

    // Makes `attended` of a layer's rows.
    void attend(Team& team, int number) {
        const Layer<T>& layer = m.layers[number];
        const Weight<T>& heads =
            layer.matrices[layer.mixer == MIXER_BESIDE ? MATRIX_BESIDE_QKV : MATRIX_QKV];
        Upcoming upcoming = this->upcoming(team, number);
        const Epilogue epilogue{.kind = Epilogue::put,
                                .y = qkv,
                                .stride = std::size_t(qkv_width),
                                .columns = qkv_width,
                                .upcoming = written.empty() ? nullptr : &upcoming};
        if (c.kernel_taps && live)
            blend_entering(team, layer.input_norm, layer.matrices[MATRIX_ATTENTION_KERNELS],
                           layer.attention_kernels, n);
        if (number == 0 && c.input == INPUT_PAIRED)
            multiply(team, heads, paired, paired_stride, n, epilogue);
        else if (c.kernel_taps && live)
            multiply(team, heads, blended, normed_stride, n, epilogue);
        else
            norm_multiply(team, layer.input_norm, heads, n, same, epilogue);
        if (layer.wide_q || layer.wide_k)
            team.share(n, 1, [&](int first, int last) {
                const int queries = c.heads * c.head_dim, keys = c.kv_heads * c.head_dim;
                for (int r = first; r < last; ++r) {
                    float* row = qkv + std::size_t(r) * qkv_width;
                    if (layer.wide_q) normalise(row, layer.q_norm.data(), queries, c.norm_eps);
                    if (layer.wide_k)
                        normalise(row + first_key * c.head_dim, layer.k_norm.data(), keys,
                                  c.norm_eps);
                }
            });
        with_cache(places.attention[number], [&]<class E>(const Cache<E>& cache) {
            team.share(n * c.kv_heads, 4,
                       [&](int first, int last) { turn_all(first, last, cache, layer); });
            attention(team, cache, layer);
        });
        if (!c.gated) return;
        team.share(live, 4, [&](int first, int last) {
            const int size = c.heads * c.head_dim;
            for (int r = first; r < last; ++r)
                gate_heads(attended + std::size_t(r) * out_width,
                           qkv + std::size_t(r) * qkv_width + size, size);
        });
    }

    // Walks the convolution of a layer: put(row, channel, sum) gets what comes out.
    template <class Take, class Put>
    void convolve(Team& team, int number, Take take, Put put) {
        const Layer<T>& layer = m.layers[number];
        const int width = channels(c, layer.mixer);
        const float* bias = layer.taps_bias.size() ? layer.taps_bias.data() : nullptr;
        const Conv conv{layer.taps.data(), bias, c.taps, width};
        const int groups = conv.groups();
        team.share(num_walks * groups, 1, [&](int first, int last) {
            for (int i = first; i < last; ++i) {
                const Walk& walk = rows.walks[i / groups];
                const LayerWalk part = part_of(c, walk, layer.mixer, places.states[number]);
                conv.walk(walk, part, i % groups, take, put);
            }
        });
    }

    // The product that a layer with states begins with.
    void enter(Team& team, const Layer<T>& layer) {
        norm_multiply(team, layer.input_norm, layer.matrices[MATRIX_QKV], n, same,
                      {.kind = Epilogue::put,
                       .y = entering_,
                       .stride = std::size_t(entering_width),
                       .columns = entering_width});
    }
    const float* entered(int row) const { return entering_ + std::size_t(row) * entering_width; }

    // Makes `mixed` of a layer's rows, by a short convolution.
    void mix_by_conv(Team& team, int number) {
        const Layer<T>& layer = m.layers[number];
        enter(team, layer);
        convolve(
            team, number,
            [&](int r, int at) {
                return load(entered(r) + at) * load(entered(r) + 2 * c.hidden + at);
            },
            [&](int r, int at, F32x16 sum) {
                store(mixed + std::size_t(r) * mixed_width + at,
                      sum * load(entered(r) + c.hidden + at));
            });
    }

    // Makes `mixed` of a layer's rows, by linear attention.
    void mix_by_linear(Team& team, int number) {
        const Layer<T>& layer = m.layers[number];
        const int width = linear_channels(c), values = linear_values(c), each = 2 * c.value_heads;
        const int made = rates_of(c);  // the last of each row
        enter(team, layer);
        norm_multiply(team, layer.input_norm, layer.matrices[MATRIX_RATES], n, same,
                      {.kind = Epilogue::put,
                       .y = rates + each - made,
                       .stride = std::size_t(each),
                       .columns = made});
        convolve(
            team, number, [&](int r, int at) { return load(entered(r) + at); },
            [&](int r, int at, F32x16 sum) {
                store(mixing + std::size_t(r) * mixing_width + at, silu(sum));
            });
        team.share(n, 1, [&](int first, int last) {
            for (int r = first; r < last; ++r)
                linear.prepare(mixing + std::size_t(r) * mixing_width,
                               rates + std::size_t(r) * each, layer.decay.data(),
                               layer.dt_bias.data());
        });
        const int columns = linear.together() * LANES, parts = values / columns;
        team.share(num_walks * parts, 1, [&](int first, int last) {
            const LinearRows to{mixing, std::size_t(mixing_width), rates, leaving_};
            for (int i = first; i < last; ++i) {
                const Walk& walk = rows.walks[i / parts];
                const LayerWalk all = part_of(c, walk, layer.mixer, places.states[number]);
                const int at = i % parts * columns, head = at / c.value_dim;
                const float skip = c.mamba ? layer.skip.data()[head] : 0;
                linear.walk(walk, linear.behind(all, walk), head, at % c.value_dim, skip, to);
            }
        });
        team.share(n, 1, [&](int first, int last) {
            for (int r = first; r < last; ++r)
                linear.gate(mixed + std::size_t(r) * mixed_width,
                            leaving_ + std::size_t(r) * values, entered(r) + width,
                            layer.gated.data());
        });
    }

    // Mixers beside each other see the same rows: both are through before either changes them.
    void run_mixer(Team& team, int number) {
        const Layer<T>& layer = m.layers[number];
        if (attends(layer.mixer)) attend(team, number);
        if (is_linear(layer.mixer)) mix_by_linear(team, number);
        if (layer.mixer == MIXER_CONV) mix_by_conv(team, number);
        if (attends(layer.mixer) && live) end_attention(team, layer);
        if (is_linear(layer.mixer)) end_mixed(team, layer, c.linear_out);
        if (layer.mixer == MIXER_CONV) end_mixed(team, layer, 1);
    }

    void run_mlp(Team& team, int number) {
        const Layer<T>& layer = m.layers[number];
        if (layer.mlp == MLP_MIXTURE) return run_mixture(team, number);
        const Weight<T>& up = layer.matrices[MATRIX_GATE_UP];
        const Epilogue gates = gate_of(gated, inner);
        if (c.kernel_taps) {
            blend_entering(team, layer.mlp_norm, layer.matrices[MATRIX_MLP_KERNELS],
                           layer.mlp_kernels, live);
            multiply(team, up, blended, normed_stride, live, gates);
        } else {
            norm_multiply(team, layer.mlp_norm, up, live, same, gates);
        }
        end(team, layer.matrices[MATRIX_DOWN], gated, inner, layer.output_norm, layer.mlp_kernels,
            c.mlp_out);
    }

    // What becomes of gates and what they gate.
    Epilogue gate_of(T* to, int stride) const {
        constexpr Epilogue::Kind kinds[] = {Epilogue::gate, Epilogue::gelu_gate, Epilogue::squared,
                                            Epilogue::clamped_gate};
        return {.kind = kinds[c.activation],
                .scale = c.mlp_gate,
                .gated = to,
                .gated_stride = std::size_t(stride),
                .narrow = sizeof(T) == 2};
    }

    void run_mixture(Team& team, int number) {
        const Layer<T>& layer = m.layers[number];
        norm_multiply(team, layer.mlp_norm, layer.matrices[MATRIX_ROUTER], live, same,
                      {.kind = Epilogue::put,
                       .y = this->scores,
                       .stride = std::size_t(this->score_stride),
                       .columns = routed(c)});
        if (c.shared_inner) {
            norm_multiply(team, layer.mlp_norm, layer.matrices[MATRIX_SHARED_GATE_UP], live, same,
                          gate_of(this->shared_inner, this->shared_stride));
            multiply(team, layer.matrices[MATRIX_SHARED_DOWN], this->shared_inner,
                     this->shared_stride, live,
                     {.kind = Epilogue::put,
                      .y = this->shared,
                      .stride = std::size_t(width),
                      .columns = c.hidden});
        }
        const bool behind = layer.output_norm.size();
        const F32x16 by = splat(c.residual_scale * c.mlp_out);
        this->mix(
            team, number, normed_stride, width, gate_of(this->gated_seats, 0),
            [&](T* to, int row) { normed_row(to, row, layer.mlp_norm); },
            [&](int row, int at, F32x16 sum) {
                const std::size_t place = std::size_t(row) * width + at;
                store((behind ? added : x) + place, behind ? sum : fma(sum, by, load(x + place)));
            });
        if (behind) add_behind(team, layer.output_norm, c.residual_scale * c.mlp_out);
    }

    void run(Team& team) override {
        team.share(n, 4, [&](int first, int last) {
            begins_with_state(c) ? pair(first, last) : embed(first, last);
        });
        if (c.input == INPUT_JOINED)
            multiply(
                team, m.fuse, paired, paired_stride, n,
                {.kind = Epilogue::put, .y = x, .stride = std::size_t(width), .columns = c.hidden});
        keep_hidden(team, -1);
        for (int sublayer : sublayers) {
            const int number = sublayer / 2;
            if (sublayer % 2 == ATTENTION) {
                run_mixer(team, number);
            } else {
                if (m.layers[number].mlp && live) run_mlp(team, number);
                keep_hidden(team, number);
            }
        }
        keep_hidden(team, c.layers);
        team.share(n, 4, [&](int first, int last) {
            for (int r = first; r < last; ++r) {
                F32x16 zero = splat(0.0f);  // stays so unless an element is no number
                for (int i = 0; i < width; i += LANES)
                    zero = fma(load(x + std::size_t(r) * width + i), splat(0.0f), zero);
                nonfinite[r] |= !(total(zero) == 0);
            }
        });
        if (scored.empty()) return;
        norm_multiply(team, m.norm, likely ? m.likely : *m.head, int(scored.size()),
                      [&](int r) { return scored[r]; },
                      {.kind = Epilogue::put,
                       .y = logits,
                       .stride = std::size_t(columns),
                       .columns = columns,
                       .scale = 1.0f / c.logits_scale});
        if (!(c.logits_cap > 0)) return;
        const int lines = padded(columns, LANES) / LANES;
        team.share(int(scored.size()) * lines, 64, [&](int first, int last) {
            for (int i = first; i < last; ++i) {
                const int at = i % lines * LANES, count = std::min(LANES, columns - at);
                float* to = logits + std::size_t(i / lines) * columns + at;
                alignas(64) float some[LANES] = {};
                std::copy(to, to + count, some);
                store(some, capped(load(some), c.logits_cap));
                std::copy(some, some + count, to);
            }
        });
    }
};

template <class T>
void forward_as(const Weights<T>& m, Store& store, const Rows& rows,
                const ForwardRequest& request) {
    Turn turn;
    std::vector<int> scored(rows.num_logits);
    for (std::size_t r = 0; r < rows.rows.size(); ++r)
        if (rows.rows[r].logits >= 0) scored[rows.rows[r].logits] = int(r);
    auto work = std::make_shared<Forward<T>>(m, store, rows, request, std::move(scored));
    for (const Walk& walk : rows.walks) begin(walk, state_size(m.c));
    turn.run(work, work->phases(), work->helpers());
    for (const Walk& walk : rows.walks) finish(walk);
    for (const Routing& routing : work->routings) store.experts += routing.groups();
    mark(store, rows, m.scratch.nonfinite, request, work->columns, reach_of(m));
}

}  // namespace

void forward(const Model& model, Store& store, const Rows& rows, const ForwardRequest& request) {
    if (model.c.dtype == 0)
        forward_as(static_cast<const Weights<float>&>(model), store, rows, request);
    else
        forward_as(static_cast<const Weights<bf16>&>(model), store, rows, request);
}

}  // namespace outrider
