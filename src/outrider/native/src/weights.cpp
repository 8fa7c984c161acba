// Makes models: their sizes, matrices, norms, tables and ids.
#include <algorithm>
#include <functional>

#include "coded.hpp"
#include "guard.hpp"
#include "model.hpp"
#include "with.hpp"

namespace outrider {

namespace {

constexpr int MOST_LAYERS = 1 << 16;
constexpr int MOST_STATE = 1 << 24;  // elements of all heads of linear attention

// Whether layers with states have sizes that the step runs.
bool keeps_states(const Config& c) {
    if (c.input != INPUT_EMBEDDED || c.taps < 1 || c.taps > MAX_TAPS) return false;
    if (c.convs && (c.hidden % LANES || c.hidden > MOST / 3)) return false;
    if (!linears(c)) return true;
    if (c.key_heads < 1 || c.value_heads < 1 || c.value_heads % c.key_heads || c.key_dim < 1 ||
        c.key_dim % LANES || c.key_dim > MAX_KEY_DIM || c.value_dim < 1 || c.value_dim % LANES ||
        c.norm_groups < 0 || (c.norm_groups && c.value_heads % c.norm_groups))
        return false;
    const std::int64_t values = std::int64_t(c.value_heads) * c.value_dim;
    const std::int64_t keys = std::int64_t(c.key_heads) * c.key_dim;
    return c.value_dim <= MOST_STATE && values <= MOST_STATE && keys <= MOST_STATE;
}

// Whether rows of blocks are mixed by kernels of a size that the step runs.
bool blends(const Config& c) {
    if (!c.kernel_taps) return true;
    return c.input == INPUT_BLOCK && c.kernel_taps > 0 && c.kernel_taps <= MAX_TAPS &&
           c.kernel_group > 0 && c.hidden % c.kernel_group == 0 && c.hidden <= MOST / 32;
}

// Whether mixtures have sizes that the step runs: experts begin with a unit.
bool mixes(const Config& c) {
    if (c.experts == 0) return !c.shared_inner && !c.shared_gated;
    if (c.experts < 1 || c.experts > MOST / LANES || c.top_experts < 1 ||
        c.top_experts > c.experts || c.expert_inner < 1 || c.expert_inner % LANES ||
        c.hidden % LANES || c.shared_inner < 0 || c.shared_inner > MOST / 2 ||
        c.shared_gated != (c.shared_gated && c.shared_inner) || c.router < ROUTER_SOFTMAX ||
        c.router > ROUTER_SIGMOID || c.input == INPUT_HEADS || c.expert_groups < 1 ||
        c.experts % c.expert_groups || c.top_groups < 1 || c.top_groups > c.expert_groups)
        return false;
    const int size = c.experts / c.expert_groups;
    if (c.expert_groups > 1 && (size < 2 || std::int64_t(c.top_groups) * size < c.top_experts))
        return false;
    const std::int64_t widest = std::max(2 * std::int64_t(c.expert_inner), std::int64_t(c.hidden));
    return widest <= MOST / c.experts;
}

bool fits(const Config& c) {
    const bool whole =
        c.input != INPUT_HEADS || c.layers * std::int64_t(c.blocks + 1) <= MOST_LAYERS;
    const bool right =
        c.embeddings > 0 && c.embeddings <= MOST && c.input >= INPUT_EMBEDDED &&
        c.input <= INPUT_BLOCK && c.fused >= 0 && c.fused <= MOST && c.fused_norms >= 0 &&
        (!c.fused_norms || c.fused % c.fused_norms == 0) && c.blocks >= 0 && whole &&
        c.activation >= ACTIVATION_SILU && c.activation <= ACTIVATION_CLAMPED && c.far >= 0 &&
        c.heat_step >= (c.heat != 0) && !(c.attention_cap < 0) && !(c.logits_cap < 0);
    const bool above = right && c.layers > 0 && c.hidden > 0 && c.inner > 0 && c.kv_heads > 0 &&
                       c.heads > 0 && c.head_dim > 0 && c.vocabulary > 0 && c.max_length > 0;
    return above && (c.dtype == 0 || c.dtype == 1) && c.heads % c.kv_heads == 0 && c.convs >= 0 &&
           c.linears >= 0 && c.besides >= 0 && c.besides <= c.layers && c.nones >= 0 &&
           c.convs < c.layers && std::int64_t(c.convs) + c.linears + c.nones < c.layers &&
           (!stateful(c) || keeps_states(c)) && blends(c) && mixes(c) &&
           (!c.gated || c.input != INPUT_HEADS) &&
           (c.input != INPUT_JOINED ||
            (c.fused == 2 * c.hidden && (c.fused_norms == 2 || c.fused_norms == 0))) &&
           c.head_dim % 2 == 0 && c.head_dim <= 256 && c.layers <= MOST_LAYERS &&
           c.hidden <= MOST / 2 && c.inner <= MOST / 2 && c.vocabulary <= MOST &&
           c.max_length <= MOST && 3 * std::int64_t(c.heads) * c.head_dim <= MOST;
}

// The numbers, and behind them what a line of 16 may read beyond.
Memory<float> padded_copy(const float* from, std::int64_t count) {
    Memory<float> made(std::size_t(count) + IN_PAD);
    std::memcpy(made.data(), from, count * sizeof(float));
    return made;
}

// Where a matrix [out, in] belongs, or what is wrong with that.
template <class T>
const char* find_matrix(Weights<T>& m, int number, int kind, int out, int in, Weight<T>*& to) {
    const Config& c = m.c;
    const int numbers = kind < MATRIX_HEAD ? int(m.layers.size()) : int(m.drafts.size());
    const bool numbered = kind < MATRIX_HEAD || kind == MATRIX_DRAFT;
    if (kind < MATRIX_QKV || kind > MATRIX_DRAFT || (numbered && (number < 0 || number >= numbers)))
        return "there is no such matrix";
    const bool paired = c.input == INPUT_PAIRED && number == 0;
    const int last = kind == MATRIX_DRAFT && number % (c.blocks + 1) == c.blocks;
    const int mixer = kind < MATRIX_HEAD ? m.layers[number].mixer : int(MIXER_ATTENTION);
    const MlpSize mlp = mlp_size(c, kind < MATRIX_HEAD ? m.layers[number].mlp : int(MLP_DENSE));
    const int outs[] = {entering(c, mixer),
                        c.hidden,
                        mlp.up,
                        mlp.out,
                        rates_of(c),
                        entering(c),
                        c.hidden,
                        kernel_numbers(c),
                        kernel_numbers(c),
                        routed(c),
                        stacked(c) * c.shared_inner,
                        c.hidden,
                        c.vocabulary,
                        c.embeddings,
                        c.hidden,
                        last ? c.vocabulary : c.hidden};
    const int ins[] = {paired ? 2 * c.hidden : c.hidden,
                       leaving(c, mixer),
                       c.hidden,
                       mlp.in,
                       c.hidden,
                       c.hidden,
                       c.heads * c.head_dim,
                       c.hidden,
                       c.hidden,
                       c.hidden,
                       c.hidden,
                       c.shared_inner,
                       c.hidden,
                       c.hidden,
                       c.fused,
                       c.hidden};
    if (out != outs[kind] || in != ins[kind]) return "a matrix has another shape than its model";
    if (kind < MATRIX_HEAD) {
        to = &m.layers[number].matrices[kind];
    } else if (kind == MATRIX_FUSE) {
        to = &m.fuse;
    } else if (kind == MATRIX_DRAFT) {
        to = &m.drafts[number];
    } else {
        auto& own = kind == MATRIX_HEAD ? m.head : m.table;
        own = std::make_shared<Weight<T>>();  // what was there may be another model's too
        to = own.get();
    }
    return nullptr;
}

// The heads and embeddings of a model, to be compared with.
template <class T>
std::vector<std::shared_ptr<Weight<T>>> ends_of(const Weights<T>* m) {
    if (!m) return {};
    return {m->head, m->table};
}

// Gives a weight its parts in codes, or those of `beside`, if they are the same.
template <class T>
void keep_codes(Weights<T>& m, int kind, Weight<T>& weight, std::vector<Packed> parts, bool apart,
                const Weights<T>* beside) {
    m.make_room(parts);
    m.apart |= apart;
    if (kind == MATRIX_HEAD || kind == MATRIX_EMBEDDING)
        for (const auto& other : ends_of(beside))
            if (other && !other->packed.empty() && other->same(parts)) {
                (kind == MATRIX_HEAD ? m.head : m.table) = other;
                return;
            }
    weight.plain = Matrix<T>();
    weight.packed = std::move(parts);
    weight.apart = apart;
}

template <class T>
const char* set_quantized(Weights<T>& m, int number, int kind, const QuantizedData& from,
                          const float* bias, int out, int in, const Weights<T>* beside) {
    Weight<T>* weight;
    if (const char* wrong = find_matrix(m, number, kind, out, in, weight)) return wrong;
    std::vector<Packed> parts(1);
    if (const char* wrong =
            pack(parts[0], from.codes, from.scales, from.zeros, bias, out, in, from.bits,
                 from.group, from.groups, takes_turns(kind) ? stacked(m.c) : 1))
        return wrong;
    keep_codes(m, kind, *weight, std::move(parts), false, beside);
    return nullptr;
}

template <class T>
const char* set_coded(Weights<T>& m, int number, int kind, const CodedData* from, int count,
                      const float* bias, int out, int in, const Weights<T>* beside) {
    Weight<T>* weight;
    if (const char* wrong = find_matrix(m, number, kind, out, in, weight)) return wrong;
    std::int64_t rows = 0;
    for (int i = 0; i < count; ++i) {
        if (from[i].rows < 1) return "a part of a matrix has no rows";
        if (from[i].offset < 0 || from[i].offset > INT64_MAX / 2) return "a file has no such place";
        rows += from[i].rows;
    }
    if (rows != out) return "the parts of a matrix have other rows than the matrix";
    auto given = [&](int i) -> CodedRows {
        return {from[i].file, from[i].type, from[i].offset, from[i].rows, from[i].order};
    };
    const bool turns = takes_turns(kind) && stacked(m.c) == 2;
    if (takes_turns(kind) && !turns && count > 1) return "a matrix of its own is one part";
    const bool apart = turns && count == 2 && from[0].type != from[1].type;
    std::vector<Packed> parts;
    int done = 0;
    for (int i = 0; i < count;) {
        std::vector<CodedRows> same;
        int more = 0;
        for (; i < count && from[i].type == from[i - int(same.size())].type; ++i) {
            same.push_back(given(i));
            more += from[i].rows;
        }
        if (done % LANES) return "a part of a matrix does not begin with a unit";
        parts.emplace_back();
        if (const char* wrong =
                pack_coded(parts.back(), same, bias ? bias + done : nullptr, in, turns && !apart))
            return wrong;
        done += more;
    }
    if (kind == MATRIX_DOWN && m.layers[number].mlp == MLP_MIXTURE && parts.size() > 1)
        return "experts have codes of one type";
    keep_codes(m, kind, *weight, std::move(parts), apart, beside);
    return nullptr;
}

// Units of a matrix whose outputs come in `parts` that take turns, as where a gate's units and
// those of what it gates do.
template <class T>
void pack_one(T* to, const T* from, int unit, int parts, int out, int in) {
    const int rows = out / parts, first = unit / parts * LANES;
    const std::size_t start = std::size_t(unit % parts) * rows + first;
    pack_unit(to, from + start * in, in, std::min(LANES, rows - first), in);
}

// Whether `m`, of one part and without bias, is what packing `from` makes.
template <class T>
bool holds(const Matrix<T>& m, const T* from, int out, int in) {
    if (m.units != padded(out, LANES) / LANES || m.inputs != padded(in, IN_PAD) || m.bias.size())
        return false;
    Memory<T> room(m.unit_size());
    for (int unit = 0; unit < m.units; ++unit) {
        std::memset(static_cast<void*>(room.data()), 0, room.bytes());
        pack_one(room.data(), from, unit, 1, out, in);
        if (std::memcmp(room.data(), m.data.data() + unit * m.unit_size(), room.bytes()))
            return false;
    }
    return true;
}

template <class T>
const char* set_matrix(Weights<T>& m, int number, int kind, const void* data, int dtype,
                       const float* bias, int out, int in, const Weights<T>* beside) {
    Weight<T>* weight;
    if (dtype != m.c.dtype) return "a matrix has another dtype than its model";
    if (const char* wrong = find_matrix(m, number, kind, out, in, weight)) return wrong;
    const T* from = static_cast<const T*>(data);
    if ((kind == MATRIX_HEAD || kind == MATRIX_EMBEDDING) && !bias)
        for (const auto& other : ends_of(beside))
            if (other && holds(other->plain, from, out, in)) {
                (kind == MATRIX_HEAD ? m.head : m.table) = other;
                return nullptr;
            }
    Matrix<T> to;
    const int parts = takes_turns(kind) ? stacked(m.c) : 1, rows = out / parts;
    to.inputs = padded(in, IN_PAD);
    to.units = padded(rows, LANES) / LANES * parts;
    to.data = Memory<T>::of_weights(to.units * to.unit_size());
    if (bias) to.bias = Memory<float>(std::size_t(to.units) * LANES);
    for (int unit = 0; unit < to.units; ++unit) {
        pack_one(to.data.data() + unit * to.unit_size(), from, unit, parts, out, in);
        const int first = unit / parts * LANES, part = unit % parts * rows;
        for (int i = 0; bias && i < std::min(LANES, rows - first); ++i)
            to.bias.data()[unit * LANES + i] = bias[part + first + i];
    }
    weight->plain = std::move(to);
    weight->packed.clear();
    weight->apart = false;
    return nullptr;
}

template <class T>
const char* set_norm(Weights<T>& m, int number, int kind, const float* data, std::int64_t count) {
    const Config& c = m.c;
    const bool whole = kind == VECTOR_FINAL || kind >= VECTOR_STATE;
    const bool heads = kind == VECTOR_Q || kind == VECTOR_K;
    if (kind < VECTOR_INPUT || kind > VECTOR_FUSE || number < 0 ||
        number >= (whole ? 1 : int(m.layers.size())))
        return "there is no such vector";
    Layer<T>* layer = whole ? nullptr : &m.layers[number];
    Memory<float>* places[] = {whole ? nullptr : &layer->input_norm,
                               whole ? nullptr : &layer->mlp_norm,
                               whole ? nullptr : &layer->after_norm,
                               whole ? nullptr : &layer->output_norm,
                               &m.norm,
                               whole ? nullptr : &layer->q_norm,
                               whole ? nullptr : &layer->k_norm,
                               whole ? nullptr : &layer->taps,
                               whole ? nullptr : &layer->taps_bias,
                               whole ? nullptr : &layer->decay,
                               whole ? nullptr : &layer->dt_bias,
                               whole ? nullptr : &layer->gated,
                               whole ? nullptr : &layer->skip,
                               whole ? nullptr : &layer->attention_kernels,
                               whole ? nullptr : &layer->mlp_kernels,
                               whole ? nullptr : &layer->router_bias,
                               whole ? nullptr : &layer->sinks,
                               &m.state_norm,
                               &m.fuse_norm};
    const int size = heads ? c.head_dim : kind == VECTOR_FUSE ? c.fused : c.hidden;
    const int all = kind == VECTOR_Q ? c.heads : kind == VECTOR_K ? c.kv_heads : 1;
    if (kind >= VECTOR_TAPS && kind <= VECTOR_SKIP) {
        const std::int64_t width = channels(c, layer->mixer);
        const std::int64_t lengths[] = {
            c.taps * width, width, c.value_heads, c.value_heads, linear_values(c), c.value_heads};
        if (!count || count != lengths[kind - VECTOR_TAPS])
            return "a vector has another length than its model";
        *places[kind] = padded_copy(data, count);
        return nullptr;
    }
    if (kind == VECTOR_ATTENTION_KERNELS || kind == VECTOR_MLP_KERNELS) {
        if (!c.kernel_taps || count != 2 * std::int64_t(c.kernel_taps) * c.hidden)
            return "a vector has another length than its model";
        *places[kind] = padded_copy(data, count);
        return nullptr;
    }
    if (kind == VECTOR_ROUTER_BIAS || kind == VECTOR_SINKS) {
        if (!count || count != (kind == VECTOR_SINKS ? c.heads : c.experts))
            return "a vector has another length than its model";
        *places[kind] = padded_copy(data, count);
        return nullptr;
    }
    if (count != size && count != std::int64_t(all) * size)
        return "a vector has another length than its model";
    if (heads) (kind == VECTOR_Q ? layer->wide_q : layer->wide_k) = count != size;
    *places[kind] = padded_copy(data, count);
    return nullptr;
}

template <class T>
const char* set_rotary(Weights<T>& m, int table, const float* cos, const float* sin, int length,
                       int width) {
    if (table < 0 || table >= ROTARY_TABLES) return "there is no such rotary table";
    if (length < 1 || length > m.c.max_length || width != m.c.head_dim / 2)
        return "a rotary table has another shape than its model";
    const std::int64_t count = std::int64_t(length) * width;
    Memory<float> cosines = padded_copy(cos, count), sines = padded_copy(sin, count);
    Turn turn;  // nobody reads the old ones
    if (length < m.turned_to[table]) return "a rotary table gets no shorter";
    m.cos[table] = std::move(cosines);
    m.sin[table] = std::move(sines);
    m.turned_to[table] = length;
    for (int other : m.turned_to) length = other ? std::min(length, other) : length;
    m.turned = length;
    return nullptr;
}

template <class T>
std::unique_ptr<Model> make_model(const Config& config, const void* embedding) {
    auto made = std::make_unique<Weights<T>>(config);
    made->embedding = static_cast<const T*>(embedding);
    if (config.input == INPUT_HEADS)
        made->drafts.resize(std::size_t(config.layers) * (config.blocks + 1));
    else
        made->layers.resize(config.layers);
    return made;
}

template <class T>
bool ready_as(const Weights<T>& m, const std::int32_t* sublayers, int count) {
    const Config& c = m.c;
    if (c.input == INPUT_HEADS) {
        bool all = m.norm.size();
        for (std::size_t i = 0; i < m.drafts.size(); ++i) {
            const bool last = int(i % (c.blocks + 1)) == c.blocks;
            all = all && m.drafts[i].empty() == (last && m.borrows());
        }
        return all;
    }
    bool all = m.head && !m.head->empty() && (m.norm.size() || bare(c));
    if (begins_with_state(c) || c.input == INPUT_BLOCK) all = all && m.state_norm.size();
    if (c.fused) all = all && !m.fuse.empty() && (!c.fused_norms || m.fuse_norm.size());
    for (int i = 0; i < count; ++i) {
        const Layer<T>& layer = m.layers[sublayers[i] / 2];
        const bool linear = is_linear(layer.mixer), mixes = layer.mixer != MIXER_NONE;
        const bool beside = layer.mixer == MIXER_BESIDE;
        const bool blends = c.kernel_taps;
        const bool mlp = layer.mlp != MLP_NONE, mixture = layer.mlp == MLP_MIXTURE;
        const bool shared = mixture && c.shared_inner;
        const bool has[MATRIX_HEAD] = {mixes,  mixes,  mlp,    mlp,     linear, beside,
                                       beside, blends, blends, mixture, shared, shared};
        all = all && !(mixture && blends) && (!mixture || c.experts);
        for (const auto* vector : {&layer.attention_kernels, &layer.mlp_kernels})
            all = all && (vector->size() > 0) == blends;
        for (int kind = 0; kind < MATRIX_HEAD; ++kind)
            all = all && layer.matrices[kind].empty() != has[kind];
        for (const auto* vector : {&layer.decay, &layer.dt_bias, &layer.gated})
            all = all && (vector->size() > 0) == linear;
        all = all && (layer.skip.size() > 0) == (linear && c.mamba);
        const bool entered = layer.input_norm.size() || layer.after_norm.size();
        all = all && (!mixes || entered || (bare(c) && sublayers[i] / 2 == 0));
        all = all && (!mlp || layer.mlp_norm.size() || layer.output_norm.size());
        for (int t = layer.table; t >= 0 && t <= layer.table + (c.far > 0); ++t)
            all = all && m.cos[t].size() && m.sin[t].size();
        all = all && (layer.q_norm.size() > 0) == (layer.k_norm.size() > 0);
        all = all && (layer.taps.size() > 0) == (channels(c, layer.mixer) > 0);
    }
    int counts[MIXER_NONE + 1] = {};
    for (const Layer<T>& layer : m.layers) ++counts[layer.mixer];
    return all && counts[MIXER_CONV] == c.convs && counts[MIXER_LINEAR] == c.linears &&
           counts[MIXER_BESIDE] == c.besides && counts[MIXER_NONE] == c.nones;
}

}  // namespace

bool ready(const Model& model, const std::int32_t* sublayers, int count) {
    if (model.c.dtype == 0)
        return ready_as(static_cast<const Weights<float>&>(model), sublayers, count);
    return ready_as(static_cast<const Weights<bf16>&>(model), sublayers, count);
}

const char* outrider_model(const Config* config, const void* embedding, Model** made) {
    return guarded({}, [&]() -> const char* {
        Config c = *config;
        if (!c.embeddings) c.embeddings = c.vocabulary;
        if (!fits(c)) return "there is no model of these sizes";
        *made = (c.dtype == 0 ? make_model<float>(c, embedding) : make_model<bf16>(c, embedding))
                    .release();
        return nullptr;
    });
}

void outrider_model_free(const Model* model) noexcept { release(model); }

const char* outrider_matrix(Model* model, int layer, int kind, const void* data, int dtype,
                            const float* bias, int out, int in, const Model* beside) {
    return with(model, beside, [&](auto& m, const auto* other) {
        return set_matrix(m, layer, kind, data, dtype, bias, out, in, other);
    });
}

const char* outrider_quantized(Model* model, int layer, int kind, const QuantizedData* data,
                               const float* bias, int out, int in, const Model* beside) {
    return with(model, beside, [&](auto& m, const auto* other) {
        return set_quantized(m, layer, kind, *data, bias, out, in, other);
    });
}

const char* outrider_coded(Model* model, int layer, int kind, const CodedData* parts, int count,
                           const float* bias, int out, int in, const Model* beside) {
    return with(model, beside, [&](auto& m, const auto* other) {
        return set_coded(m, layer, kind, parts, count, bias, out, in, other);
    });
}

std::int64_t outrider_weights(Model* model, const Model* beside) {
    std::int64_t bytes = 0;
    with(model, beside, [&](auto& m, const auto* other) -> const char* {
        for (const auto& layer : m.layers)
            for (const auto& matrix : layer.matrices) bytes += matrix.bytes();
        for (const auto& matrix : m.drafts) bytes += matrix.bytes();
        bytes += m.fuse.bytes() + m.likely.bytes();
        const auto theirs = ends_of(other);
        for (const auto& mine : {m.head, m.table == m.head ? nullptr : m.table})
            if (mine && std::find(theirs.begin(), theirs.end(), mine) == theirs.end())
                bytes += mine->bytes();
        return nullptr;
    });
    return bytes;
}

const char* outrider_vector(Model* model, int number, int kind, const float* data,
                            std::int64_t count) {
    return with(model, [&](auto& m) { return set_norm(m, number, kind, data, count); });
}

const char* outrider_rotary(Model* model, int table, const float* cos, const float* sin, int length,
                            int width) {
    return with(model, [&](auto& m) { return set_rotary(m, table, cos, sin, length, width); });
}

const char* outrider_layer(Model* model, int layer, int mixer, int mlp, int window, int table) {
    return with(model, [&](auto& m) -> const char* {
        if (layer < 0 || layer >= int(m.layers.size())) return NO_LAYER;
        if (mixer < MIXER_ATTENTION || mixer > MIXER_NONE) return "there is no such mixer";
        if (mlp < MLP_NONE || mlp > MLP_MIXTURE) return "there is no such MLP";
        if (mixer == MIXER_NONE && !mlp) return "a layer has a mixer, an MLP or both";
        if (mlp == MLP_MIXTURE && !m.c.experts) return "a mixture has experts";
        if (window < 0) return "a layer has a window below 0";
        if (table < -1 || table + (table >= 0 && m.c.far) >= ROTARY_TABLES)
            return "there is no such rotary table";
        m.layers[layer].window = window;
        m.layers[layer].table = table;
        m.layers[layer].mixer = mixer;
        m.layers[layer].mlp = mlp;
        return nullptr;
    });
}

const char* outrider_transitions(Model* model, int top, int rank, int dtype, const void* before,
                                 int tokens, const void* behind, int vocabulary,
                                 const float* projection, int width) {
    return with(model, [&](auto& m) -> const char* {
        if (m.c.input != INPUT_BLOCK || dtype != m.c.dtype || top < 1 || rank < 1 ||
            tokens < m.c.embeddings || vocabulary != m.c.vocabulary ||
            (projection && width != m.c.hidden))
            return "transitions have another shape than their model";
        using T = std::remove_cvref_t<decltype(*m.transitions.before)>;
        m.transitions = {
            top,       rank, tokens, static_cast<const T*>(before), static_cast<const T*>(behind),
            projection};
        return nullptr;
    });
}

const char* outrider_check(const Model* model) {
    return guarded({model}, [&] { return complete(*model) ? nullptr : INCOMPLETE; });
}

const char* outrider_ids(Model* model, const std::int32_t* targets, int vocabulary,
                         const std::int32_t* inputs, int count) {
    return guarded({model}, [&]() -> const char* {
        if (vocabulary != model->c.vocabulary || count < 0)
            return "there are too few ids, or too many";
        for (int i = 0; i < count; ++i)
            if (inputs[i] < -1 || inputs[i] >= model->c.embeddings) return "an id has no embedding";
        for (int i = 0; i < vocabulary; ++i)
            if (targets[i] < -1) return "an id is below -1";
        model->targets.assign(targets, targets + vocabulary);
        const auto& all = model->targets;
        model->rising =
            !all.empty() && all[0] >= 0 &&
            std::adjacent_find(all.begin(), all.end(), std::greater_equal<>()) == all.end();
        model->inputs.assign(inputs, inputs + count);
        return nullptr;
    });
}

const char* outrider_borrow(Model* model, const Model* from) {
    return with(model, from, [&](auto& m, const auto* other) -> const char* {
        if (!other || other->c.hidden != m.c.hidden || other->c.embeddings != m.c.embeddings)
            return "the other model has other embeddings";
        if (m.c.input == INPUT_HEADS) {
            if (!other->norm.size() || !other->head) return INCOMPLETE;
            m.norm = padded_copy(other->norm.data(), m.c.hidden);
            m.head = other->head;
            m.make_room(m.head->packed);
            return nullptr;
        }
        if (m.c.input == INPUT_JOINED || (m.c.input == INPUT_BLOCK && !m.head)) {
            if (!other->head || other->c.vocabulary != m.c.vocabulary || !other->norm.size())
                return INCOMPLETE;
            if (m.c.input == INPUT_JOINED)
                m.state_norm = padded_copy(other->norm.data(), m.c.hidden);
            m.head = other->head;
            m.make_room(m.head->packed);
        }
        if (m.embedding) return nullptr;
        m.embedding = other->embedding;
        if (!m.embedding) m.table = other->table ? other->table : other->head;
        if (!m.embedding && !m.table) return INCOMPLETE;
        if (m.table) m.make_room(m.table->packed);
        return nullptr;
    });
}

}  // namespace outrider
