// A model's weights, its cache, and the rows of one forward.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "cache.hpp"
#include "guard.hpp"
#include "memory.hpp"
#include "product.hpp"
#include "quantized.hpp"

namespace outrider {

// The layout is that of Config in native/interface.py.
struct Config {
    std::int32_t dtype;  // 0 fp32, 1 bf16
    std::int32_t layers, hidden, inner, heads, kv_heads, head_dim, vocabulary, max_length;
    float norm_eps, scale, embedding_scale, residual_scale, logits_scale;
};

enum MatrixKind { QKV, OUTPUT, GATE_UP, DOWN, HEAD, EMBEDDING };
enum NormKind { INPUT_NORM, MLP_NORM, FINAL_NORM, Q_NORM, K_NORM };

// A matrix as T, or quantised; one of the two is empty.
template <class T>
struct Weight {
    Matrix<T> plain;
    Packed packed;

    bool empty() const { return plain.empty() && packed.empty(); }
    int units() const { return plain.units + packed.units; }
    std::size_t bytes() const { return plain.bytes() + packed.bytes(); }
};

template <class T>
struct Layer {
    Weight<T> matrices[4];  // QKV to DOWN
    Memory<float> input_norm, mlp_norm, q_norm, k_norm;
    int window = 0;  // positions that a row sees, itself included; 0: all
    int table = 0;   // which rotary table
};

constexpr int TABLES = 2;

// What a forward works in, in its turn with the pool. Strides are the model's, so that what pads a
// row stays zero.
template <class T>
struct Scratch {
    Memory<float> x, qkv;
    Memory<T> normed, q, attended, gated;
    Memory<std::int8_t> digits;
    Memory<Part> parts;
    std::vector<std::uint8_t> bad;
};

struct Model : Counted {
    Config c;
    std::atomic<int> turned{0x7fffffff};  // positions that all its rotary tables reach
    explicit Model(const Config& config) : c(config) {}
};

template <class T>
struct Weights : Model {
    using Model::Model;
    const T* embedding = nullptr;  // [vocabulary, hidden], its owner's; null: see rows()
    std::vector<Layer<T>> layers;
    // Other models may hold the same. `table`: a packed embedding that is not the head, or null.
    std::shared_ptr<Weight<T>> head, table;
    int width = 0, blocks = 0;  // of a row of digits, at most
    Memory<float> norm;
    Memory<float> cos[TABLES], sin[TABLES];  // [turned_to, head_dim / 2]
    int turned_to[TABLES] = {};
    mutable Scratch<T> scratch;

    int head_pad() const { return padded(c.head_dim, IN_PAD); }
    // Where tokens are looked up, if not in `embedding`.
    const Weight<T>& rows() const { return table ? *table : *head; }
};

// Keys and values: [layer][page], see cache.hpp.
struct Store : Counted {
    explicit Store(const Model* of) : model(of), kept(of) {}
    const Model* const model;
    const Using kept;  // the model, which a cache outlives otherwise
    int pages = 0, page_size = 0;
    std::size_t page_elements = 0, layer_elements = 0;
    Memory<char> data;
    std::vector<std::uint8_t> harmed;  // slots whose row was not finite
    int num_harmed = 0;
    Memory<float> logits;  // of the rows that a draft goes on from
};

template <class T>
Cache<T> cache_of(const Store& store, int layer) {
    const Config& c = store.model->c;
    return {reinterpret_cast<T*>(store.data.data()) + layer * store.layer_elements,
            store.page_elements, store.page_size, padded(c.head_dim, IN_PAD)};
}

struct Row {
    std::int32_t token, position, slot;
    std::int32_t prefix;           // positions found through the page table
    std::int32_t pages;            // where that starts in Rows::pages
    std::int32_t above, num_above; // slots of ancestors behind the prefix, in Rows::above
    std::int32_t logits;           // which line of logits, or -1
};

// A segment that wants logits, as it was read: what points does so into the words.
struct Scored {
    const std::int32_t *nodes, *parents, *pages;
    int num_nodes, num_pages, committed, logits;  // `committed`: tokens before its nodes
    bool chain;
};

struct Rows {
    std::vector<Row> rows;
    std::vector<Scored> scored;
    std::vector<std::int32_t> pages;
    std::vector<std::int32_t> above;
    int num_logits = 0;
};

// What a forward is asked for; see api.cpp.
struct Wanted {
    const std::int32_t* layers;
    int num_layers;
    const std::int32_t* hidden;  // layers after which the residual stream is wanted; -1: embedding
    int num_hidden;
    float* logits;      // [num_logits, vocabulary]
    float* hidden_out;  // [num_hidden, rows, hidden]
};

// Hidden states that are wanted of a forward: see Wanted.
struct Hidden {
    const std::int32_t* layers = nullptr;
    int count = 0;
    float* out = nullptr;
};

// Reads `words` (see api.cpp) into rows; returns what is wrong with them, or null.
const char* read_rows(const Model& model, const Store& store, const std::int32_t* words,
                      std::int64_t count, Rows& rows);

constexpr const char* INCOMPLETE = "the model's weights are not complete";

inline std::vector<std::int32_t> all_layers(const Model& model) {
    std::vector<std::int32_t> all(model.c.layers);
    std::iota(all.begin(), all.end(), 0);
    return all;
}

// Whether a forward through these layers has all its weights.
bool ready(const Model& model, const std::int32_t* layers, int count);
inline bool complete(const Model& model) {
    const auto all = all_layers(model);
    return ready(model, all.data(), int(all.size()));
}

void forward(const Model& model, Store& store, const Rows& rows, const Wanted& wanted);

}  // namespace outrider
