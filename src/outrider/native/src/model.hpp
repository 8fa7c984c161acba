// A model's weights, its cache, and the rows of one forward.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
#include <type_traits>
#include <vector>

#include "cache.hpp"
#include "guard.hpp"
#include "matrix.hpp"
#include "memory.hpp"
#include "packed.hpp"
#include "states.hpp"

namespace outrider {

// What the numbers of sublayers mean: twice that of their layer, and this.
enum Sublayer { ATTENTION, MLP };

// A matrix as T, or in codes: in parts one behind the other where these have different types.
template <class T>
struct Weight {
    Matrix<T> plain;
    std::vector<Packed> packed;
    bool apart = false;  // of two parts the first gates the second, unit by unit

    bool empty() const { return plain.empty() && packed.empty(); }
    float bias(int row) const {
        for (const Packed& part : packed) {
            if (row < part.units * LANES) return part.bias.size() ? part.bias.data()[row] : 0;
            row -= part.units * LANES;
        }
        return plain.bias.size() ? plain.bias.data()[row] : 0;
    }
    std::size_t bytes() const {
        std::size_t all = plain.bytes();
        for (const Packed& part : packed) all += part.bytes();
        return all;
    }
    bool same(const std::vector<Packed>& other) const {
        return std::equal(packed.begin(), packed.end(), other.begin(), other.end(),
                          [](const Packed& a, const Packed& b) { return a.same(b); });
    }
};

template <class T>
struct Layer {
    Weight<T> matrices[MATRIX_HEAD];
    Memory<float> input_norm, mlp_norm, after_norm, output_norm, q_norm, k_norm;
    bool wide_q = false, wide_k = false;  // whether q_norm and k_norm span all heads
    int window = 0;                       // positions that a row sees, itself included; 0: all
    int table = 0;                        // which rotary table; -1: none
    int mixer = MIXER_ATTENTION;
    int mlp = MLP_DENSE;
    Memory<float> router_bias, sinks;
    Memory<float> taps, taps_bias, decay, dt_bias, gated, skip;
    Memory<float> attention_kernels, mlp_kernels;
};

// What a forward works in, in its turn with the pool. Strides are the model's, so that what pads a
// row stays zero.
template <class T>
struct Scratch {
    Memory<float> x, qkv, added, entering, rates, mixing, leaving, kernels;
    Memory<T> normed, q, attended, gated, paired, mixed, blended;
    Memory<std::int8_t> digits;
    Memory<BlockSummary> parts;
    Memory<float> wide, gates;
    Memory<float> scores, made, shared;  // of mixtures
    Memory<T> seated, inner, shared_inner;
    std::vector<std::uint8_t> nonfinite;
};

struct Model : Counted {
    Config c;
    std::atomic<int> turned{0x7fffffff};  // positions that all its rotary tables reach
    // The target's id of each row of logits, or -1, and the id that its embedding has here for each
    // of the target's, or -1; empty where they are the same.
    std::vector<std::int32_t> targets, inputs;
    bool rising = false;  // whether there are `targets`, each above the one before and none -1
    std::vector<std::int32_t> likely_ids;  // of each of the likely rows, or -1
    // Its token for one of the target's, or -1.
    int input_of(int token) const {
        if (!inputs.empty()) return token < int(inputs.size()) ? inputs[token] : -1;
        return token < c.embeddings ? token : -1;
    }
    explicit Model(const Config& config) : c(config) {}
};

// Whether so many logits are those of the likely rows, which are fewer than all.
inline bool is_likely(const Model& model, std::int64_t count) {
    return count > 0 && count == std::int64_t(model.likely_ids.size());
}

// Scores of tokens behind others, see outrider_transitions.
template <class T>
struct Transitions {
    int top = 0, rank = 0;  // 0: there are none
    int tokens = 0;
    const T *before = nullptr, *behind = nullptr;
    const float* projection = nullptr;
};

template <class T>
struct Weights : Model {
    using Model::Model;
    const T* embedding = nullptr;  // [vocabulary, hidden], its owner's; null: see rows()
    std::vector<Layer<T>> layers;
    // Other models may hold the same. `table`: a packed embedding that is not the head, or null.
    std::shared_ptr<Weight<T>> head, table;
    Weight<T> likely;          // rows of the head, copied, that drafts may come from alone
    int half = 0, blocks = 0;  // of a row of digits, at most
    bool apart = false;        // whether a weight is
    Memory<float> norm, state_norm, fuse_norm;
    Weight<T> fuse;  // [hidden, fused]
    Transitions<T> transitions;
    std::vector<Weight<T>> drafts;  // [heads][blocks + 1], the last of each empty if it borrows
    Memory<float> cos[ROTARY_TABLES], sin[ROTARY_TABLES];  // [turned_to, head_dim / 2]
    int turned_to[ROTARY_TABLES] = {};
    mutable Scratch<T> scratch;

    int head_pad() const { return padded(c.head_dim, IN_PAD); }
    // Whether the target's `head` makes the logits of all of Medusa's heads.
    bool borrows() const { return head && drafts[c.blocks].empty(); }
    // Makes rows have room for the digits that parts of a weight are multiplied with.
    void make_room(const std::vector<Packed>& parts) {
        for (const Packed& part : parts) {
            half = std::max(half, part.half());
            blocks = std::max(blocks, part.blocks());
        }
    }
    // Where tokens are looked up, if not in `embedding`.
    const Weight<T>& rows() const { return table ? *table : *head; }
};

// Whether rows begin with a state and an embedding beside it.
inline bool begins_with_state(const Config& c) {
    return c.input == INPUT_PAIRED || c.input == INPUT_JOINED;
}

// Whether the first layer reads what a linear joins, without norms (EAGLE-1).
inline bool bare(const Config& c) { return c.input == INPUT_JOINED && !c.fused_norms; }

// Layers with attention, which alone have keys and values.
inline int attending(const Config& c) { return c.layers - c.convs - c.linears - c.nones; }
inline bool attends(int mixer) { return mixer == MIXER_ATTENTION || mixer == MIXER_BESIDE; }

// Layers with linear attention.
inline int linears(const Config& c) { return c.linears + c.besides; }
inline bool is_linear(int mixer) { return mixer == MIXER_LINEAR || mixer == MIXER_BESIDE; }

// Whether layers have states of sequences.
inline bool stateful(const Config& c) { return c.convs || linears(c); }

// Rows of the matrix that a layer of attention begins with: queries, gates, keys and values.
inline int entering(const Config& c) {
    return ((1 + (c.gated != 0)) * c.heads + 2 * c.kv_heads) * c.head_dim;
}

inline int linear_values(const Config& c) { return c.value_heads * c.value_dim; }

// Rows of RATES.
inline int rates_of(const Config& c) { return (c.mamba ? 1 : 2) * c.value_heads; }

// Numbers of a row's kernels, of what enters a sublayer and what leaves it.
inline int kernel_numbers(const Config& c) {
    return c.kernel_taps ? 2 * c.kernel_taps * (c.hidden / c.kernel_group) : 0;
}

// The width of MLPs, at most.
inline int widest_mlp(const Config& c) {
    return std::max({c.inner, c.expert_inner, c.shared_inner});
}

// Rows of ROUTER.
inline int routed(const Config& c) { return c.experts + c.shared_gated; }

// Matrices that are stacked in GATE_UP.
inline int stacked(const Config& c) { return c.activation == ACTIVATION_RELU2 ? 1 : 2; }

// Whether the units of a matrix are those of a gate and of what it gates, in turn.
inline bool takes_turns(int kind) {
    return kind == MATRIX_GATE_UP || kind == MATRIX_SHARED_GATE_UP;
}

// Rows of GATE_UP, and rows and columns of DOWN.
struct MlpSize {
    int up, out, in;
};
inline MlpSize mlp_size(const Config& c, int kind) {
    if (kind != MLP_MIXTURE) return {stacked(c) * c.inner, c.hidden, c.inner};
    return {stacked(c) * c.experts * c.expert_inner, c.experts * c.hidden, c.expert_inner};
}

// Channels that the convolution of linear attention mixes.
inline int linear_channels(const Config& c) {
    return 2 * c.key_heads * c.key_dim + linear_values(c);
}

// Rows of the matrices that a layer begins and ends with: out of the first, into the last.
inline int entering(const Config& c, int mixer) {
    if (mixer == MIXER_CONV) return 3 * c.hidden;
    if (is_linear(mixer)) return linear_channels(c) + linear_values(c);
    return mixer == MIXER_ATTENTION ? entering(c) : 0;
}
inline int leaving(const Config& c, int mixer) {
    if (mixer == MIXER_CONV) return c.hidden;
    if (is_linear(mixer)) return linear_values(c);
    return mixer == MIXER_ATTENTION ? c.heads * c.head_dim : 0;
}

// Channels of a layer's convolution.
inline int channels(const Config& c, int mixer) {
    return mixer == MIXER_CONV ? c.hidden : is_linear(mixer) ? linear_channels(c) : 0;
}

// Which of a model's layers with attention each layer is, and which of those with such a state.
struct LayerPlaces {
    std::vector<int> attention, states;
};
template <class T>
LayerPlaces places_of(const Weights<T>& m) {
    int attention = 0, convs = 0, linears = 0;
    LayerPlaces places;
    for (const Layer<T>& layer : m.layers) {
        places.attention.push_back(attention);
        places.states.push_back(is_linear(layer.mixer) ? linears : convs);
        attention += attends(layer.mixer);
        convs += layer.mixer == MIXER_CONV;
        linears += is_linear(layer.mixer);
    }
    return places;
}

// What a layer's convolution keeps.
inline StateSize conv_size(const Config& c, int mixer) {
    const std::size_t width = channels(c, mixer);
    return {(c.taps - 1) * width, width};
}

// What the heads of linear attention keep: matrices, and of a row keys, updates and decays.
inline StateSize heads_size(const Config& c) {
    const std::size_t keys = std::size_t(c.key_heads) * c.key_dim, values = linear_values(c);
    return {values * c.key_dim, keys + values + c.value_heads};
}

// What a layer keeps: of its convolution, and behind that of its heads.
inline StateSize state_size(const Config& c, int mixer) {
    const StateSize conv = conv_size(c, mixer);
    if (!is_linear(mixer)) return conv;
    const StateSize heads = heads_size(c);
    return {conv.state + heads.state, conv.row + heads.row};
}

// What all layers keep.
inline StateSize state_size(const Config& c) {
    const StateSize conv = state_size(c, MIXER_CONV), linear = state_size(c, MIXER_LINEAR);
    return {c.convs * conv.state + linears(c) * linear.state,
            c.convs * conv.row + linears(c) * linear.row};
}

// A layer's part of a walk, the one of that place among those of its mixer.
inline LayerWalk part_of(const Config& c, const Walk& walk, int mixer, int place) {
    StateSize before{}, own = state_size(c, mixer);
    if (is_linear(mixer)) {
        before = state_size(c, MIXER_CONV);
        before = {c.convs * before.state, c.convs * before.row};
    }
    before.state += place * own.state;
    before.row += place * own.row;
    const Slot& slot = *walk.slot;
    return {slot.states.data() + before.state, slot.inputs.data() + walk.before * before.row,
            slot.next.data() + walk.drafted * before.row,
            walk.kept ? slot.kept.data() + before.state : nullptr};
}

// Keys and values: [place among layers of attention][page], see cache.hpp.
struct Store : Counted {
    explicit Store(const Model* of) : model(of), kept(of) {}
    const Model* const model;
    const Using kept;  // the model, which a cache outlives otherwise
    int pages = 0, page_size = 0;
    std::size_t page_elements = 0, layer_elements = 0;
    LazyMemory data;
    Memory<float> centres;                // [places, heads, width] of keys in codes, or empty
    std::vector<std::uint8_t> nonfinite;  // slots whose row was not finite
    int num_nonfinite = 0;
    std::int64_t experts = 0;  // that forwards have read, of all layers
    Memory<float> logits;      // of the rows that a draft goes on from
    Memory<float> states[2];   // that its rows begin with, and that they end with
    std::vector<std::unique_ptr<Slot>> slots;
};

constexpr int MOST_SLOTS = 1 << 20;
constexpr const char* NO_SLOT = "there is no such slot";
constexpr const char* OTHER_STATES = "states have another size than their model's";

// Where a sequence keeps its states; made if it is new.
inline Slot& slot_of(Store& store, int number) {
    if (number >= int(store.slots.size())) store.slots.resize(number + 1);
    auto& slot = store.slots[number];
    if (!slot) slot = std::make_unique<Slot>();
    return *slot;
}

template <class E>
Cache<E> cache_of(const Store& store, int place) {
    const Config& c = store.model->c;
    const int width = padded(c.head_dim, IN_PAD);
    const Places<E> places{reinterpret_cast<E*>(store.data.data()) + place * store.layer_elements,
                           store.page_elements, store.page_size, width};
    if constexpr (std::is_same_v<E, Codes>) {
        const std::size_t at = std::size_t(place) * c.kv_heads * width;
        return {places, store.centres.size() ? store.centres.data() + at : nullptr};
    } else {
        return {places};
    }
}

struct Row {
    std::int32_t token, position, slot;
    std::int32_t first, prefix;     // positions found through the page table: from, and up to
    std::int32_t edge;              // windows end before it; of a block it is the first position
    std::int32_t pages;             // where that starts in Rows::pages
    std::int32_t above, num_above;  // slots of ancestors behind the prefix, in Rows::above
    std::int32_t logits;            // which line of logits, or -1
    bool far;                       // see Config
};

// Whether a row turns by the far table.
inline bool is_far(const Config& c, int prompt, int position) {
    return c.far && (prompt > c.far || position >= c.far);
}

// A segment that wants logits, as it was read: what points does so into the words.
struct Scored {
    const std::int32_t *nodes, *parents, *pages;
    int num_nodes, num_pages, committed, logits;  // `committed`: tokens before its nodes
    int first;                                    // position of the first token that is seen
    int last;                                     // the token before its nodes, -1: not given
    int prompt;                                   // its length
    bool chain;
    Slot* slot;  // null where layers have no states
};

struct Rows {
    std::vector<Row> rows;
    std::vector<Scored> scored;
    std::vector<std::int32_t> pages;
    std::vector<std::int32_t> above;
    int num_logits = 0;
    int given = 0;  // of INPUT_BLOCK: the last rows, which are states and go through no layer
    const float* states =
        nullptr;              // [rows, hidden], or of the last ones, where the model wants them
    std::vector<Walk> walks;  // where layers have states
};

// How many states a forward wants.
inline std::size_t num_states(const Config& c, const Rows& rows) {
    if (c.input == INPUT_HEADS) return rows.scored.size();
    return c.input == INPUT_BLOCK ? rows.given : rows.rows.size();
}

constexpr const char* UNSTATED = "rows begin with a state in some models, and in others with none";

// What is wrong with the states that a forward is given, or null.
inline const char* check_states(const Config& c, const Rows& rows, const float* states,
                                std::int64_t count) {
    if ((c.input == INPUT_EMBEDDED) != (states == nullptr)) return UNSTATED;
    if (states && count != std::int64_t(num_states(c, rows)))
        return "there are not as many states as rows";
    return nullptr;
}

// What a forward is asked for; see outrider.h.
struct ForwardRequest {
    const std::int32_t* sublayers;  // to run, rising
    int num_sublayers;
    // Layers after which the residual stream is wanted; -1: embedding; as many as there are: what
    // the next row of a draft begins with.
    const std::int32_t* hidden;
    int num_hidden;
    float* logits;      // [num_logits, vocabulary], or of the likely rows
    float* hidden_out;  // [num_hidden, hidden_rows, hidden], of which the first rows are written
    std::size_t hidden_rows;
    bool likely = false;  // logits are those of the likely rows
};

// Hidden states that are wanted of a forward: see ForwardRequest.
struct Hidden {
    const std::int32_t* layers = nullptr;
    int count = 0;
    float* out = nullptr;
    std::size_t rows = 0;
};

// Reads `words` (see outrider.h) into rows; returns what is wrong with them, or null.
const char* read_rows(const Model& model, Store& store, const std::int32_t* words,
                      std::int64_t count, Rows& rows);

constexpr const char* INCOMPLETE = "the model's weights are not complete";

inline std::vector<std::int32_t> all_sublayers(const Model& model) {
    std::vector<std::int32_t> all(2 * model.c.layers);
    std::iota(all.begin(), all.end(), 0);
    return all;
}

constexpr const char* NO_LAYER = "there is no such layer";

// Whether these are sublayers of a model, rising.
inline bool known_sublayers(const Model& model, const std::int32_t* sublayers, int count) {
    for (int i = 0; i < count; ++i)
        if (sublayers[i] < 0 || sublayers[i] / 2 >= model.c.layers ||
            (i && sublayers[i] <= sublayers[i - 1]))
            return false;
    return true;
}

// Whether a forward through these sublayers has all its weights.
bool ready(const Model& model, const std::int32_t* sublayers, int count);
inline bool complete(const Model& model) {
    const auto all = all_sublayers(model);
    return ready(model, all.data(), int(all.size()));
}

void forward(const Model& model, Store& store, const Rows& rows, const ForwardRequest& request);

// The logits [count, heads, vocabulary] that a model of INPUT_HEADS has for `states` [count,
// hidden].
void run_heads(const Model& model, const float* states, int count, float* logits);

// Makes states of a target's hidden states: rows `which` of each of `hidden` [parts][., fused /
// parts], to rows `to` of `states` [., hidden].
void fuse(const Model& model, const float* const* hidden, int parts, const std::int32_t* which,
          int count, float* states, const std::int32_t* to);

}  // namespace outrider
