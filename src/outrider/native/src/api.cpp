// The C interface of caches and forwards; weights.cpp makes models, decide.cpp, draft.cpp,
// sampler.cpp and suffix.cpp have the rest.
#include <algorithm>
#include <cmath>

#include "guard.hpp"
#include "model.hpp"

namespace outrider {

int cpu_sets();
int cpu_slow_sets();

namespace {

constexpr const char* BAD_PAGE = "a page has 1 to 1073741824 positions";

// Of a layer's page: keys and values of all heads.
std::size_t page_elements(const Config& c, int page_size) {
    return product_of({2, std::size_t(c.kv_heads), std::size_t(padded(page_size, BLOCK)),
                       std::size_t(padded(c.head_dim, IN_PAD))}) /
           (c.coded_cache ? NUMBERS<Codes> : 1);
}

// Of all layers' page.
std::size_t page_bytes(const Config& c, int page_size) {
    if (c.input == INPUT_HEADS) return 0;
    const std::size_t element = c.coded_cache ? sizeof(Codes) : c.dtype == 0 ? 4 : 2;
    return product_of({element, std::size_t(attending(c)), page_elements(c, page_size)});
}

// Positions over which a bias is averaged.
constexpr double CENTRED = 8192;

// What keys are less before they become codes: the mean of their biases as positions turn them. All
// scores of a query lose the same by it, which its weights do not feel; and the large biases of
// elements that hardly turn do not cost others of their group their digits.
template <class T>
void find_centres(const Weights<T>& m, Store& store) {
    const Config& c = m.c;
    if (c.attention_cap > 0 || c.input == INPUT_HEADS) return;
    const int half = c.head_dim / 2, width = padded(c.head_dim, IN_PAD);
    store.centres = Memory<float>(std::size_t(attending(c)) * c.kv_heads * width);
    const std::vector<int> places = places_of(m).attention;
    for (int l = 0; l < c.layers; ++l) {
        const Layer<T>& layer = m.layers[l];
        if (!attends(layer.mixer)) continue;
        const bool beside = layer.mixer == MIXER_BESIDE;
        const Weight<T>& heads = layer.matrices[beside ? MATRIX_BESIDE_QKV : MATRIX_QKV];
        const std::size_t place = places[l];
        if (layer.k_norm.size() || (layer.table >= 0 && m.turned_to[layer.table] < 2)) continue;
        for (int i = 0; i < c.kv_heads * half; ++i) {
            const int head = i / half, d = i % half;
            const int row = ((1 + (c.gated != 0)) * c.heads + head) * c.head_dim + d;
            const double x = heads.bias(row), y = heads.bias(row + half);
            double cosine = 1, sine = 0;
            if (layer.table >= 0) {
                const double a = m.cos[layer.table].data()[half + d];
                const double b = m.sin[layer.table].data()[half + d];
                const double angle = CENTRED * std::atan2(b, a), size = std::hypot(a, b);
                cosine = angle == 0 ? size : size * std::sin(angle) / angle;
                sine = angle == 0 ? 0 : size * (1 - std::cos(angle)) / angle;
            }
            float* to = store.centres.data() + (place * c.kv_heads + head) * width + d;
            to[0] = float(x * cosine - y * sine);
            to[half] = float(y * cosine + x * sine);
        }
    }
}

template <class E>
void move_entries(const Store& store, const std::int32_t* from, const std::int32_t* to, int count) {
    const Config& c = store.model->c;
    for (int place = 0; place < attending(c) && c.input != INPUT_HEADS; ++place) {
        const Cache<E> cache = cache_of<E>(store, place);
        const std::size_t width = cache.entry();
        std::vector<typename Cache<E>::Entry> kept(2 * std::size_t(count) * width);
        for (int head = 0; head < c.kv_heads; ++head) {
            for (int i = 0; i < count; ++i)
                cache.get(from[i], head, &kept[2 * i * width], &kept[(2 * i + 1) * width]);
            for (int i = 0; i < count; ++i)
                cache.put(to[i], head, &kept[2 * i * width], &kept[(2 * i + 1) * width]);
        }
    }
}

}  // namespace
std::int64_t outrider_abi() noexcept { return OUTRIDER_ABI; }

std::int64_t outrider_spent() noexcept { return spent; }

std::int64_t outrider_sampled() noexcept { return sampled; }

int outrider_cpu() noexcept { return cpu_sets(); }

int outrider_slow() noexcept { return cpu_slow_sets(); }

int outrider_start(int threads) noexcept { return start_pool(threads < 1 ? 1 : threads); }

int outrider_start_own(int threads) noexcept { return start_own_pool(threads < 1 ? 1 : threads); }

const char* outrider_page_bytes(const Model* model, int page_size, std::int64_t* bytes) {
    return guarded({model}, [&]() -> const char* {
        if (page_size < 1 || page_size > MOST) return BAD_PAGE;
        *bytes = std::int64_t(page_bytes(model->c, page_size));
        return nullptr;
    });
}

const char* outrider_store(const Model* model, int pages, int page_size, Store** made) {
    return guarded({model}, [&]() -> const char* {
        if (page_size < 1 || page_size > MOST) return BAD_PAGE;
        if (pages < 1 || std::int64_t(pages) * page_size > 0x7fffffff)
            return "a cache has more than 2147483647 positions, or no pages";
        auto store = std::make_unique<Store>(model);
        store->pages = pages;
        store->page_size = page_size;
        store->page_elements =
            model->c.input == INPUT_HEADS ? 0 : page_elements(model->c, page_size);
        store->layer_elements = store->page_elements * pages;
        if (model->c.coded_cache)
            model->c.dtype == 0 ? find_centres(static_cast<const Weights<float>&>(*model), *store)
                                : find_centres(static_cast<const Weights<bf16>&>(*model), *store);
        store->nonfinite.resize(std::size_t(pages) * page_size);
        store->data = LazyMemory(product_of({std::size_t(pages), page_bytes(model->c, page_size)}));
        *made = store.release();
        return nullptr;
    });
}

void outrider_store_free(const Store* store) noexcept { release(store); }

int outrider_nonfinite(const Store* store) noexcept { return store->num_nonfinite; }

std::int64_t outrider_experts(const Store* store) noexcept { return store->experts; }

const char* outrider_move(Store* store, const std::int32_t* from, const std::int32_t* to,
                          int count) {
    return guarded({store}, [&]() -> const char* {
        const std::int64_t slots = std::int64_t(store->pages) * store->page_size;
        if (count < 0) return "there are fewer than no entries to move";
        for (int i = 0; i < count; ++i)
            if (from[i] < 0 || from[i] >= slots || to[i] < 0 || to[i] >= slots)
                return "a slot is not of this store";
        if (store->model->c.coded_cache)
            move_entries<Codes>(*store, from, to, count);
        else if (store->model->c.dtype == 0)
            move_entries<float>(*store, from, to, count);
        else
            move_entries<bf16>(*store, from, to, count);
        std::vector<std::uint8_t> marks(count);
        for (int i = 0; i < count; ++i) marks[i] = store->nonfinite[from[i]];
        for (int i = 0; i < count; ++i) {
            store->num_nonfinite += int(marks[i]) - int(store->nonfinite[to[i]]);
            store->nonfinite[to[i]] = marks[i];
        }
        return nullptr;
    });
}

const char* outrider_kept_states(const Store* store, int slot, float* states, std::int64_t count,
                                 std::int32_t* tokens) {
    return guarded({store}, [&]() -> const char* {
        *tokens = 0;
        if (slot < 0 || slot >= int(store->slots.size()) || !store->slots[slot]) return NO_SLOT;
        const Slot& from = *store->slots[slot];
        if (count != std::int64_t(state_size(store->model->c).state)) return OTHER_STATES;
        if (from.position < 0 || !from.kept_at) return nullptr;
        if (states) std::memcpy(states, from.kept.data(), count * sizeof(float));
        *tokens = from.kept_at;
        return nullptr;
    });
}

const char* outrider_set_states(Store* store, int slot, const float* states, std::int64_t count,
                                int tokens) {
    return guarded({store}, [&]() -> const char* {
        if (!stateful(store->model->c) || slot < 0 || slot >= MOST_SLOTS) return NO_SLOT;
        if (count != std::int64_t(state_size(store->model->c).state)) return OTHER_STATES;
        if (tokens < 1) return "states stand behind one token or more";
        Slot& to = slot_of(*store, slot);
        to.states.reserve(count);
        std::memcpy(to.states.data(), states, count * sizeof(float));
        to.position = tokens;
        to.drafted = to.kept_at = 0;
        return nullptr;
    });
}

const char* outrider_fuse(const Model* model, const float* const* hidden, int parts, int rows,
                          int part, const std::int32_t* which, int count, float* states,
                          const std::int32_t* to, int room, int width) {
    return guarded({model}, [&]() -> const char* {
        const Config& c = model->c;
        const int fused = c.input == INPUT_JOINED ? c.hidden : c.fused;
        if (!fused || std::int64_t(parts) * part != fused || width != c.hidden)
            return "hidden states have another shape than their model";
        for (int i = 0; i < count; ++i)
            if (which[i] < 0 || which[i] >= rows || to[i] < 0 || to[i] >= room)
                return "there is no such row";
        if (!complete(*model)) return INCOMPLETE;
        if (count > 0) fuse(*model, hidden, parts, which, count, states, to);
        return nullptr;
    });
}

const char* outrider_forward(const Model* model, Store* store, const std::int32_t* words,
                             std::int64_t count, const float* states, int num_states,
                             const std::int32_t* sublayers, int num_sublayers,
                             const std::int32_t* hidden, int num_hidden, float* logits,
                             int num_logits, int vocabulary, float* hidden_out, int num_rows,
                             int width) {
    return guarded({model, store}, [&]() -> const char* {
        if (store->model != model) return "the cache is another model's";
        const bool likely = is_likely(*model, vocabulary);
        if ((vocabulary != model->c.vocabulary && !likely) || width != model->c.hidden)
            return "the room for results has another shape than its model";
        Rows rows;
        if (const char* wrong = read_rows(*model, *store, words, count, rows)) return wrong;
        const Config& c = model->c;
        const auto made =
            c.input == INPUT_HEADS ? rows.scored.size() : rows.rows.size() - rows.given;
        if (rows.num_logits != num_logits || int(made) != num_rows)
            return "the rows are not as many as announced";
        if (const char* wrong = check_states(c, rows, states, num_states)) return wrong;
        if (c.input == INPUT_HEADS) {
            if (num_logits != num_rows * c.layers || num_hidden || num_sublayers)
                return "there are not as many heads as levels";
            if (!complete(*model)) return INCOMPLETE;
            run_heads(*model, states, num_rows, logits);
            return nullptr;
        }
        if (!known_sublayers(*model, sublayers, num_sublayers)) return NO_LAYER;
        for (int i = 0; i < num_hidden; ++i)
            if (hidden[i] < -1 || hidden[i] > model->c.layers) return NO_LAYER;
        if (!ready(*model, sublayers, num_sublayers)) return INCOMPLETE;
        rows.states = states;
        forward(*model, *store, rows,
                ForwardRequest{sublayers, num_sublayers, hidden, num_hidden, logits, hidden_out,
                               std::size_t(num_rows), likely});
        return nullptr;
    });
}

}  // namespace outrider
