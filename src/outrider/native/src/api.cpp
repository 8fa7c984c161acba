// The C interface, declared in native/interface.py. Functions that can fail return a sentence, or null.
#include <algorithm>

#include "guard.hpp"
#include "model.hpp"

namespace outrider {

int cpu_level();

// The layout is that of QuantizedData in native/interface.py.
struct QuantizedData {
    const std::uint8_t* codes;  // [out, in]
    const float* scales;        // [out, groups]
    const std::uint8_t* zeros;  // [out, groups], or null
    std::int32_t bits, group, groups;
};

namespace {

constexpr int MOST_LAYERS = 1 << 16;

bool fits(const Config& c) {
    const bool whole = c.input != HEADS || c.layers * std::int64_t(c.blocks + 1) <= MOST_LAYERS;
    const bool right = c.embeddings > 0 && c.embeddings <= MOST && c.input >= EMBEDDED &&
                       c.input <= HEADS && c.fused >= 0 && c.fused <= MOST && c.fused_norms >= 0 &&
                       (!c.fused_norms || c.fused % c.fused_norms == 0) && c.blocks >= 0 && whole;
    const bool above = right && c.layers > 0 && c.hidden > 0 && c.inner > 0 && c.kv_heads > 0 &&
                       c.heads > 0 && c.head_dim > 0 && c.vocabulary > 0 && c.max_length > 0;
    return above && (c.dtype == 0 || c.dtype == 1) && c.heads % c.kv_heads == 0 &&
           c.head_dim % 2 == 0 && c.head_dim <= 256 && c.layers <= MOST_LAYERS &&
           c.hidden <= MOST / 2 && c.inner <= MOST / 2 && c.vocabulary <= MOST &&
           c.max_length <= MOST && 3 * std::int64_t(c.heads) * c.head_dim <= MOST;
}

constexpr const char* BAD_PAGE = "a page has 1 to 1073741824 positions";

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
    const int numbers = kind < HEAD ? int(m.layers.size()) : int(m.drafts.size());
    const bool numbered = kind < HEAD || kind == DRAFT;
    if (kind < QKV || kind > DRAFT || (numbered && (number < 0 || number >= numbers)))
        return "there is no such matrix";
    const int query = c.heads * c.head_dim, key = c.kv_heads * c.head_dim;
    const bool paired = c.input == PAIRED && number == 0;
    const int last = kind == DRAFT && number % (c.blocks + 1) == c.blocks;
    const int outs[] = {query + 2 * key, c.hidden,     2 * c.inner, c.hidden,
                        c.vocabulary,    c.embeddings, c.hidden,    last ? c.vocabulary : c.hidden};
    const int ins[] = {paired ? 2 * c.hidden : c.hidden, query, c.hidden, c.inner, c.hidden,
                       c.hidden, c.fused, c.hidden};
    if (out != outs[kind] || in != ins[kind]) return "a matrix has another shape than its model";
    if (kind < HEAD) {
        to = &m.layers[number].matrices[kind];
    } else if (kind == FUSE) {
        to = &m.fuse;
    } else if (kind == DRAFT) {
        to = &m.drafts[number];
    } else {
        auto& own = kind == HEAD ? m.head : m.table;
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

template <class T>
const char* set_quantized(Weights<T>& m, int number, int kind, const QuantizedData& from,
                          const float* bias, int out, int in, const Weights<T>* beside) {
    Weight<T>* weight;
    if (const char* wrong = find_matrix(m, number, kind, out, in, weight)) return wrong;
    Packed& to = weight->packed;
    if (const char* wrong = pack(to, from.codes, from.scales, from.zeros, bias, out, in, from.bits,
                                 from.group, from.groups, kind == GATE_UP ? 2 : 1))
        return wrong;
    weight->plain = Matrix<T>();
    m.width = std::max(m.width, to.width());
    m.blocks = std::max(m.blocks, to.blocks());
    if (kind != HEAD && kind != EMBEDDING) return nullptr;
    for (const auto& other : ends_of(beside))
        if (other && other->packed.same(to)) {
            (kind == HEAD ? m.head : m.table) = other;
            break;
        }
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
    if ((kind == HEAD || kind == EMBEDDING) && !bias)
        for (const auto& other : ends_of(beside))
            if (other && holds(other->plain, from, out, in)) {
                (kind == HEAD ? m.head : m.table) = other;
                return nullptr;
            }
    Matrix<T> to;
    const int parts = kind == GATE_UP ? 2 : 1, rows = out / parts;
    to.inputs = padded(in, IN_PAD);
    to.units = padded(rows, LANES) / LANES * parts;
    to.data = Memory<T>(to.units * to.unit_size());
    if (bias) to.bias = Memory<float>(std::size_t(to.units) * LANES);
    for (int unit = 0; unit < to.units; ++unit) {
        pack_one(to.data.data() + unit * to.unit_size(), from, unit, parts, out, in);
        const int first = unit / parts * LANES, part = unit % parts * rows;
        for (int i = 0; bias && i < std::min(LANES, rows - first); ++i)
            to.bias.data()[unit * LANES + i] = bias[part + first + i];
    }
    weight->plain = std::move(to);
    weight->packed = Packed();
    return nullptr;
}

template <class T>
const char* set_norm(Weights<T>& m, int number, int kind, const float* data, std::int64_t count) {
    const Config& c = m.c;
    const bool whole = kind == FINAL_NORM || kind >= STATE_NORM;
    if (kind < INPUT_NORM || kind > FUSE_NORM || number < 0 ||
        number >= (whole ? 1 : int(m.layers.size())))
        return "there is no such vector";
    Layer<T>* layer = whole ? nullptr : &m.layers[number];
    Memory<float>* places[] = {
        whole ? nullptr : &layer->input_norm, whole ? nullptr : &layer->mlp_norm, &m.norm,
        whole ? nullptr : &layer->q_norm,     whole ? nullptr : &layer->k_norm,   &m.state_norm,
        &m.fuse_norm};
    const int size = kind == Q_NORM || kind == K_NORM ? c.head_dim
                     : kind == FUSE_NORM              ? c.fused
                                                      : c.hidden;
    if (count != size) return "a vector has another length than its model";
    *places[kind] = padded_copy(data, count);
    return nullptr;
}

template <class T>
const char* set_rotary(Weights<T>& m, int table, const float* cos, const float* sin, int length,
                       int width) {
    if (table < 0 || table >= TABLES) return "there is no such rotary table";
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

// Of a layer's page: keys and values of all heads.
std::size_t page_elements(const Config& c, int page_size) {
    return product_of({2, std::size_t(c.kv_heads), std::size_t(padded(page_size, BLOCK)),
                       std::size_t(padded(c.head_dim, IN_PAD))});
}

// Of all layers' page.
std::size_t page_bytes(const Config& c, int page_size) {
    if (c.input == HEADS) return 0;
    return product_of({std::size_t(c.dtype == 0 ? 4 : 2), std::size_t(c.layers),
                       page_elements(c, page_size)});
}

template <class T>
void move_entries(const Store& store, const std::int32_t* from, const std::int32_t* to, int count) {
    const Config& c = store.model->c;
    for (int layer = 0; layer < c.layers && c.input != HEADS; ++layer) {
        const Cache<T> cache = cache_of<T>(store, layer);
        const std::size_t width = cache.width;
        std::vector<T> kept(2 * std::size_t(count) * width);
        for (int head = 0; head < c.kv_heads; ++head) {
            for (int i = 0; i < count; ++i)
                cache.get(from[i], head, &kept[2 * i * width], &kept[(2 * i + 1) * width]);
            for (int i = 0; i < count; ++i)
                cache.put(to[i], head, &kept[2 * i * width], &kept[(2 * i + 1) * width]);
        }
    }
}

// Calls `work` with the weights as what they are, and with those of `beside` if of the same dtype.
template <class Work>
const char* with(Model* model, const Model* beside, Work work) {
    const Model* near = beside && beside->c.dtype == model->c.dtype ? beside : nullptr;
    auto typed = [&]() -> const char* {
        if (model->c.dtype == 0)
            return work(*static_cast<Weights<float>*>(model),
                        static_cast<const Weights<float>*>(near));
        return work(*static_cast<Weights<bf16>*>(model), static_cast<const Weights<bf16>*>(near));
    };
    return guarded(typed, model, beside);
}

// Calls `work` with the weights as what they are.
template <class Work>
const char* with(Model* model, Work work) {
    return with(model, nullptr, [&](auto& m, const auto*) { return work(m); });
}

template <class T>
std::unique_ptr<Model> make_model(const Config& config, const void* embedding) {
    auto made = std::make_unique<Weights<T>>(config);
    made->embedding = static_cast<const T*>(embedding);
    if (config.input == HEADS)
        made->drafts.resize(std::size_t(config.layers) * (config.blocks + 1));
    else
        made->layers.resize(config.layers);
    return made;
}

}  // namespace
}  // namespace outrider

using namespace outrider;

API int outrider_abi() noexcept { return 17; }

// Nanoseconds that the process has spent in calls of this library that can fail.
API std::int64_t outrider_spent() noexcept { return spent; }

API int outrider_cpu() noexcept { return cpu_level(); }

// How many threads the pool has: fewer than asked for where the system starts no more.
API int outrider_start(int threads) noexcept { return start_pool(threads < 1 ? 1 : threads); }

// `embedding` [embeddings, hidden] stays its owner's and must outlive the model; without one, rows
// of the head are looked up.
API const char* outrider_model(const Config* config, const void* embedding, Model** made) {
    return guarded([&]() -> const char* {
        Config c = *config;
        if (!c.embeddings) c.embeddings = c.vocabulary;
        if (!fits(c)) return "there is no model of these sizes";
        *made = (c.dtype == 0 ? make_model<float>(c, embedding) : make_model<bf16>(c, embedding))
                    .release();
        return nullptr;
    });
}

// The model goes when no call and no cache of its own uses it any more.
API void outrider_model_free(const Model* model) noexcept { release(model); }

// `data` [out, in] of `dtype`, which is the model's. A head or embedding that is the same to the bit
// in `beside` (null: none) is held once, whichever of the two models is freed first.
API const char* outrider_matrix(Model* model, int layer, int kind, const void* data, int dtype,
                                const float* bias, int out, int in, const Model* beside) {
    return with(model, beside, [&](auto& m, const auto* other) {
        return set_matrix(m, layer, kind, data, dtype, bias, out, in, other);
    });
}

// `codes` [out, in]; see outrider_matrix.
API const char* outrider_quantized(Model* model, int layer, int kind, const QuantizedData* data,
                                   const float* bias, int out, int in, const Model* beside) {
    return with(model, beside, [&](auto& m, const auto* other) {
        return set_quantized(m, layer, kind, *data, bias, out, in, other);
    });
}

// Bytes of head and packed embedding that `beside` holds too.
API std::int64_t outrider_shared(Model* model, const Model* beside) {
    std::int64_t bytes = 0;
    with(model, beside, [&](auto& m, const auto* other) -> const char* {
        for (const auto& mine : {m.head, m.table})
            for (const auto& theirs : ends_of(other))
                if (mine && mine == theirs) bytes += mine->bytes();
        return nullptr;
    });
    return bytes;
}

// `number` is the layer, 0 for the model's own.
API const char* outrider_vector(Model* model, int number, int kind, const float* data,
                              std::int64_t count) {
    return with(model, [&](auto& m) { return set_norm(m, number, kind, data, count); });
}

// `cos` and `sin` are [length, head_dim / 2]. They may be set again, longer, between calls.
API const char* outrider_rotary(Model* model, int table, const float* cos, const float* sin,
                                int length, int width) {
    return with(model, [&](auto& m) { return set_rotary(m, table, cos, sin, length, width); });
}

// A layer's rows see `window` positions, or all with 0, and turn by a rotary table.
API const char* outrider_layer(Model* model, int layer, int window, int table) {
    return with(model, [&](auto& m) -> const char* {
        if (layer < 0 || layer >= int(m.layers.size())) return "there is no such layer";
        if (window < 0) return "a layer has a window below 0";
        if (table < 0 || table >= TABLES) return "there is no such rotary table";
        m.layers[layer].window = window;
        m.layers[layer].table = table;
        return nullptr;
    });
}

API const char* outrider_check(const Model* model) {
    return guarded([&]() -> const char* { return complete(*model) ? nullptr : INCOMPLETE; }, model);
}

// Bytes that a page of `page_size` positions takes.
API const char* outrider_page_bytes(const Model* model, int page_size, std::int64_t* bytes) {
    return guarded([&]() -> const char* {
        if (page_size < 1 || page_size > MOST) return BAD_PAGE;
        *bytes = std::int64_t(page_bytes(model->c, page_size));
        return nullptr;
    }, model);
}

API const char* outrider_store(const Model* model, int pages, int page_size, Store** made) {
    return guarded([&]() -> const char* {
        if (page_size < 1 || page_size > MOST) return BAD_PAGE;
        if (pages < 1 || std::int64_t(pages) * page_size > 0x7fffffff)
            return "a cache has more than 2147483647 positions, or no pages";
        auto store = std::make_unique<Store>(model);
        store->pages = pages;
        store->page_size = page_size;
        store->page_elements = model->c.input == HEADS ? 0 : page_elements(model->c, page_size);
        store->layer_elements = store->page_elements * pages;
        store->harmed.resize(std::size_t(pages) * page_size);
        store->data =
            Memory<char>(product_of({std::size_t(pages), page_bytes(model->c, page_size)}));
        *made = store.release();
        return nullptr;
    }, model);
}

API void outrider_store_free(const Store* store) noexcept { release(store); }

API int outrider_harmed(const Store* store) noexcept { return store->num_harmed; }

// Copies the entries at slots `from` to slots `to`, in every layer; all are read before any write.
API const char* outrider_move(Store* store, const std::int32_t* from, const std::int32_t* to,
                              int count) {
    return guarded([&]() -> const char* {
        const std::int64_t slots = std::int64_t(store->pages) * store->page_size;
        if (count < 0) return "there are fewer than no entries to move";
        for (int i = 0; i < count; ++i)
            if (from[i] < 0 || from[i] >= slots || to[i] < 0 || to[i] >= slots)
                return "a slot is not of this store";
        if (store->model->c.dtype == 0)
            move_entries<float>(*store, from, to, count);
        else
            move_entries<bf16>(*store, from, to, count);
        std::vector<std::uint8_t> marks(count);
        for (int i = 0; i < count; ++i) marks[i] = store->harmed[from[i]];
        for (int i = 0; i < count; ++i) {
            store->num_harmed += int(marks[i]) - int(store->harmed[to[i]]);
            store->harmed[to[i]] = marks[i];
        }
        return nullptr;
    }, store);
}

// `targets` [vocabulary] are the target's ids for a drafter's, `inputs` [count] a drafter's ids, by
// which its embedding is looked up, for the target's; -1 stands for none.
API const char* outrider_ids(Model* model, const std::int32_t* targets, int vocabulary,
                             const std::int32_t* inputs, int count) {
    return guarded([&]() -> const char* {
        if (vocabulary != model->c.vocabulary || count < 0) return "there are too few ids, or too many";
        for (int i = 0; i < count; ++i)
            if (inputs[i] < -1 || inputs[i] >= model->c.embeddings) return "an id has no embedding";
        for (int i = 0; i < vocabulary; ++i)
            if (targets[i] < -1) return "an id is below -1";
        model->targets.assign(targets, targets + vocabulary);
        model->inputs.assign(inputs, inputs + count);
        return nullptr;
    }, model);
}

// Lets a model look tokens up where another does, whose `embedding` must outlive both; heads take its
// last norm.
API const char* outrider_borrow(Model* model, const Model* from) {
    return with(model, from, [&](auto& m, const auto* other) -> const char* {
        if (!other || other->c.hidden != m.c.hidden || other->c.embeddings != m.c.embeddings)
            return "the other model has other embeddings";
        if (m.c.input == HEADS) {
            if (!other->norm.size()) return INCOMPLETE;
            m.norm = padded_copy(other->norm.data(), m.c.hidden);
            return nullptr;
        }
        m.embedding = other->embedding;
        if (!m.embedding) m.table = other->table ? other->table : other->head;
        if (!m.embedding && !m.table) return INCOMPLETE;
        if (m.table) {
            m.width = std::max(m.width, m.table->packed.empty() ? 0 : m.table->packed.width());
            m.blocks = std::max(m.blocks, m.table->packed.empty() ? 0 : m.table->packed.blocks());
        }
        return nullptr;
    });
}

// Makes states of a target's hidden states: rows `which` [count], below `rows`, of each of `hidden`
// [parts], to rows `to` [count], below `room`, of `states` [room, width].
API const char* outrider_fuse(const Model* model, const float* const* hidden, int parts,
                              const std::int32_t* which, int count, int rows, float* states,
                              const std::int32_t* to, int room, int width) {
    return guarded([&]() -> const char* {
        const Config& c = model->c;
        if (!c.fused || parts < 1 || c.fused % parts || width != c.hidden)
            return "hidden states have another shape than their model";
        for (int i = 0; i < count; ++i)
            if (which[i] < 0 || which[i] >= rows || to[i] < 0 || to[i] >= room)
                return "there is no such row";
        if (!complete(*model)) return INCOMPLETE;
        if (count > 0) fuse(*model, hidden, parts, which, count, states, to);
        return nullptr;
    }, model);
}

// `words` are segments one after the other, each [tokens, nodes, start, pages, logits, first]
// and then the token ids, the nodes' ids, their parents and the page table. `logits` has room for
// [num_logits, vocabulary], `hidden_out` for [num_hidden, num_rows, width]. `states` [num_rows, width]
// are those that rows begin with, null where the model wants none. Of heads a segment has one, and a row
// of logits for each head.
API const char* outrider_forward(const Model* model, Store* store, const std::int32_t* words,
                                 std::int64_t count, const float* states,
                                 const std::int32_t* sublayers, int num_sublayers,
                                 const std::int32_t* hidden, int num_hidden, float* logits,
                                 int num_logits, int vocabulary, float* hidden_out, int num_rows,
                                 int width) {
    return guarded([&]() -> const char* {
        if (store->model != model) return "the cache is another model's";
        if (vocabulary != model->c.vocabulary || width != model->c.hidden)
            return "the room for results has another shape than its model";
        Rows rows;
        if (const char* wrong = read_rows(*model, *store, words, count, rows)) return wrong;
        const Config& c = model->c;
        const auto given = c.input == HEADS ? rows.scored.size() : rows.rows.size();
        if (rows.num_logits != num_logits || int(given) != num_rows)
            return "the rows are not as many as announced";
        if ((c.input == EMBEDDED) != (states == nullptr)) return UNSTATED;
        if (c.input == HEADS) {
            if (num_logits != num_rows * c.layers || num_hidden || num_sublayers)
                return "there are not as many heads as levels";
            if (!complete(*model)) return INCOMPLETE;
            run_heads(*model, states, num_rows, logits);
            return nullptr;
        }
        for (int i = 0; i < num_sublayers; ++i)
            if (sublayers[i] < 0 || sublayers[i] / 2 >= model->c.layers ||
                (i && sublayers[i] <= sublayers[i - 1]))
                return "there is no such layer";
        for (int i = 0; i < num_hidden; ++i)
            if (hidden[i] < -1 || hidden[i] > model->c.layers) return "there is no such layer";
        if (!ready(*model, sublayers, num_sublayers)) return INCOMPLETE;
        rows.states = states;
        forward(*model, *store, rows,
                Wanted{sublayers, num_sublayers, hidden, num_hidden, logits, hidden_out});
        return nullptr;
    }, model, store);
}
