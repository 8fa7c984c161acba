#include "attention.hpp"
#include "model.hpp"
#include "pool.hpp"

namespace outrider {
namespace {

// Rows that every worker normalises for itself rather than wait for the others.
constexpr int ALONE = 16;

template <class T>
void rms_norm(T* to, const float* x, const float* weight, int width, int stride, float eps) {
    F16 sum = splat(0.0f);
    for (int i = 0; i < stride; i += LANES) sum = fma(load(x + i), load(x + i), sum);
    F16 factor = splat(1.0f / std::sqrt(total(sum) / float(width) + eps));
    for (int i = 0; i < stride; i += LANES) store(to + i, load(x + i) * factor * load(weight + i));
}

template <class T>
struct Forward {
    const Weights<T>& m;
    Store& store_;
    const Rows& rows;
    const Wanted& wanted;
    Scratch<T>& s;
    const Config& c = m.c;
    const int n = int(rows.rows.size());
    const int width = padded(c.hidden, IN_PAD);
    const int inner = padded(c.inner, IN_PAD);
    const int turned = (c.heads + 2 * c.kv_heads) * c.head_dim;
    const int qkv_width = padded(turned, LANES);
    const int out_width = padded(c.heads * c.head_dim, IN_PAD);
    const int head_pad = m.head_pad();

    void reserve(int workers) {
        const std::size_t count = padded(n, LANES);
        s.x.reserve(count * width);
        s.qkv.reserve(count * qkv_width);
        s.normed.reserve((count > ALONE ? count : ALONE * workers) * width);
        s.q.reserve(count * c.heads * head_pad);
        s.attended.reserve(count * out_width);
        s.gated.reserve(count * inner);
        s.bad.resize(n);
    }

    // RMSNorm of rows of x, `pick` saying which: the whole of it is there for this worker.
    template <class Pick>
    const T* norm(const Team& team, const float* weight, int count, Pick pick) {
        const bool alone = count <= ALONE;
        T* to = s.normed.data() + (alone ? std::size_t(team.index) * ALONE * width : 0);
        int first = 0, last = count;
        if (!alone) team.part(count, 1, first, last);
        for (int r = first; r < last; ++r)
            rms_norm(to + std::size_t(r) * width, s.x.data() + std::size_t(pick(r)) * width, weight,
                     c.hidden, width, c.norm_eps);
        if (!alone) team.meet();
        return to;
    }

    void multiply(const Team& team, const Matrix<T>& matrix, const T* x, int stride, int count,
                  const End& end) {
        int first, last;
        team.part(matrix.units, 2, first, last);
        product(matrix, first, last, x, stride, count, end);
    }

    void embed(const Team& team) {
        int first, last;
        team.part(n, 1, first, last);
        T scale;
        narrow_to(&scale, c.embedding_scale);
        for (int r = first; r < last; ++r) {
            const T* from = m.embedding + std::size_t(rows.rows[r].token) * c.hidden;
            float* to = s.x.data() + std::size_t(r) * width;
            for (int i = 0; i < c.hidden; ++i) {
                T scaled = from[i];  // rounded, as torch rounds it
                if (c.embedding_scale != 1) narrow_to(&scaled, widen(from[i]) * widen(scale));
                to[i] = widen(scaled);
            }
            for (int i = c.hidden; i < width; ++i) to[i] = 0;
        }
    }

    // Writes one head, normalised and turned, as T.
    void turn(T* to, const float* from, const float* norm, const float* cos, const float* sin) {
        alignas(64) float head[MAX_HEAD_DIM] = {}, out[MAX_HEAD_DIM] = {};
        const int half = c.head_dim / 2;
        std::memcpy(head, from, c.head_dim * sizeof(float));
        if (norm) rms_norm(head, head, norm, c.head_dim, head_pad, c.norm_eps);
        if (cos) {
            for (int i = 0; i < half; ++i) {
                out[i] = head[i] * cos[i] - head[half + i] * sin[i];
                out[half + i] = head[half + i] * cos[i] + head[i] * sin[i];
            }
        }
        const float* done = cos ? out : head;
        for (int i = 0; i < head_pad; i += LANES) store(to + i, load(done + i));
    }

    T* cache(int layer) const {
        return reinterpret_cast<T*>(store_.data.data()) + layer * store_.layer_elements;
    }

    // Queries to s.q, keys and values to their slots.
    void turn_all(const Team& team, int number, const Layer<T>& layer) {
        const int group = c.heads / c.kv_heads, half = c.head_dim / 2, d = c.head_dim;
        const std::size_t plane = std::size_t(store_.page_size) * head_pad;
        int first, last;
        team.part(n * c.kv_heads, 1, first, last);
        for (int task = first; task < last; ++task) {
            const int r = task / c.kv_heads, h = task % c.kv_heads;
            const Row& row = rows.rows[r];
            const float* from = s.qkv.data() + std::size_t(r) * qkv_width;
            const float* cos = m.cos[layer.table].data() + std::size_t(row.position) * half;
            const float* sin = m.sin[layer.table].data() + std::size_t(row.position) * half;
            T* q = s.q.data() + std::size_t(r) * c.heads * head_pad;
            for (int g = h * group; g < (h + 1) * group; ++g)
                turn(q + g * head_pad, from + g * d, layer.q_norm.data(), cos, sin);
            T* key = cache(number) + row.slot / store_.page_size * store_.page_elements +
                     h * plane + std::size_t(row.slot % store_.page_size) * head_pad;
            turn(key, from + (c.heads + h) * d, layer.k_norm.data(), cos, sin);
            turn(key + c.kv_heads * plane, from + (c.heads + c.kv_heads + h) * d, nullptr, nullptr,
                 nullptr);
        }
    }

    void attention(const Team& team, int number, const Layer<T>& layer) {
        const int group = c.heads / c.kv_heads;
        const std::size_t plane = std::size_t(store_.page_size) * head_pad;
        // Dealt out in turn: rows further on see more.
        for (int task = team.index; task < n * c.kv_heads; task += team.count) {
            const int r = task / c.kv_heads, h = task % c.kv_heads;
            const Row& row = rows.rows[r];
            const Keys<T> keys{cache(number) + h * plane,       store_.page_elements,
                               store_.page_size,                head_pad,
                               rows.pages.data() + row.pages,   rows.above.data() + row.above,
                               row.prefix};
            const int length = row.prefix + row.num_above;
            const int first = layer.window && length > layer.window ? length - layer.window : 0;
            for (int g = 0; g < group; g += GROUP) {
                const int head = h * group + g, heads = group - g < GROUP ? group - g : GROUP;
                attend(keys, first, length, s.q.data() + (std::size_t(r) * c.heads + head) * head_pad,
                       s.attended.data() + std::size_t(r) * out_width + head * c.head_dim, heads,
                       c.head_dim, c.kv_heads * plane, c.scale);
            }
        }
    }

    void keep_hidden(const Team& team, int layer) {
        for (int i = 0; i < wanted.num_hidden; ++i) {
            if (wanted.hidden[i] != layer) continue;
            int first, last;
            team.part(n, 1, first, last);
            for (int r = first; r < last; ++r)
                std::memcpy(wanted.hidden_out + (std::size_t(i) * n + r) * c.hidden,
                            s.x.data() + std::size_t(r) * width, c.hidden * sizeof(float));
        }
    }

    void run_layer(const Team& team, int number) {
        const Layer<T>& layer = m.layers[number];
        auto same = [](int r) { return r; };
        const T* a = norm(team, layer.input_norm.data(), n, same);
        multiply(team, layer.matrices[QKV], a, width, n,
                 {.kind = End::put, .y = s.qkv.data(), .stride = std::size_t(qkv_width),
                  .columns = qkv_width});
        team.meet();
        turn_all(team, number, layer);
        team.meet();
        attention(team, number, layer);
        team.meet();
        const End residual{.kind = End::add, .y = s.x.data(), .stride = std::size_t(width),
                           .columns = width, .scale = c.residual_scale};
        multiply(team, layer.matrices[OUTPUT], s.attended.data(), out_width, n, residual);
        team.meet();
        a = norm(team, layer.mlp_norm.data(), n, same);
        multiply(team, layer.matrices[GATE_UP], a, width, n,
                 {.kind = End::gate, .gated = s.gated.data(), .gated_stride = std::size_t(inner)});
        team.meet();
        multiply(team, layer.matrices[DOWN], s.gated.data(), inner, n, residual);
        team.meet();
    }

    void run(const Team& team, const std::vector<int>& scored) {
        embed(team);
        team.meet();
        keep_hidden(team, -1);
        for (int i = 0; i < wanted.num_layers; ++i) {
            run_layer(team, wanted.layers[i]);
            keep_hidden(team, wanted.layers[i]);
        }
        int first, last;
        team.part(n, 1, first, last);
        for (int r = first; r < last; ++r) {
            F16 zero = splat(0.0f);  // stays so unless an element is no number
            for (int i = 0; i < width; i += LANES)
                zero = fma(load(s.x.data() + std::size_t(r) * width + i), splat(0.0f), zero);
            s.bad[r] = !(total(zero) == 0);
        }
        if (scored.empty()) return;
        const int count = int(scored.size());
        const T* a = norm(team, m.norm.data(), count, [&](int r) { return scored[r]; });
        multiply(team, m.head, a, width, count,
                 {.kind = End::put, .y = wanted.logits, .stride = std::size_t(c.vocabulary),
                  .columns = c.vocabulary, .scale = 1.0f / c.logits_scale});
    }
};

// Rows that are not finite leave a mark, and whoever sees a mark has NaN logits: most such rows
// are NaN by themselves, but not one that sees a row whose last layer alone went wrong.
void mark(Store& store, const Rows& rows, const std::vector<std::uint8_t>& bad, const Wanted& wanted,
          int vocabulary) {
    for (std::size_t r = 0; r < bad.size(); ++r) {
        std::uint8_t& old = store.harmed[rows.rows[r].slot];
        store.num_harmed += int(bad[r]) - int(old);
        old = bad[r];
    }
    if (!store.num_harmed) return;
    for (const Row& row : rows.rows) {
        if (row.logits < 0) continue;
        bool sees = false;
        for (int j = 0; j < row.prefix && !sees; ++j) {
            int page = rows.pages[row.pages + j / store.page_size];
            sees = store.harmed[std::size_t(page) * store.page_size + j % store.page_size];
        }
        for (int j = 0; j < row.num_above && !sees; ++j) sees = store.harmed[rows.above[row.above + j]];
        float* line = wanted.logits + std::size_t(row.logits) * vocabulary;
        for (int i = 0; sees && i < vocabulary; ++i) line[i] = NAN;
    }
}

template <class T>
void forward_as(const Weights<T>& m, Store& store, const Rows& rows, const Wanted& wanted) {
    std::lock_guard<std::mutex> hold(m.scratch.use);
    std::vector<int> scored(rows.num_logits);
    for (std::size_t r = 0; r < rows.rows.size(); ++r)
        if (rows.rows[r].logits >= 0) scored[rows.rows[r].logits] = int(r);
    Forward<T> f{m, store, rows, wanted, m.scratch};
    f.reserve(pool_size());
    struct Context {
        Forward<T>* forward;
        const std::vector<int>* scored;
    } context{&f, &scored};
    run_pool(
        [](void* p, const Team& team) {
            auto* c = static_cast<Context*>(p);
            c->forward->run(team, *c->scored);
        },
        &context);
    mark(store, rows, m.scratch.bad, wanted, m.c.vocabulary);
}

}  // namespace

void forward(const Model& model, Store& store, const Rows& rows, const Wanted& wanted) {
    if (model.c.dtype == 0)
        forward_as(static_cast<const Weights<float>&>(model), store, rows, wanted);
    else
        forward_as(static_cast<const Weights<bf16>&>(model), store, rows, wanted);
}

}  // namespace outrider
