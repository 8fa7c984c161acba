// Packed weights in a file of their own, which a later start maps instead of packing them again.
//
// A file is a header, numbers, and arrays on borders of 64 bytes; the numbers and the order of the
// arrays are those of `visit`. It is this machine's and this library's: layouts are not checked
// against others, but every size is, and a sum over all bytes.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>

#include "with.hpp"

namespace outrider {
namespace {

constexpr std::size_t BORDER = 64, PIECE = LARGE_PAGE;
constexpr char MAGIC[8] = {'O', 'U', 'T', 'R', 'K', 'E', 'P', '1'};
constexpr int MOST_PARTS = 64;  // of a matrix
constexpr const char* DAMAGED = "kept weights are damaged";

struct Head {
    char magic[8];
    std::uint64_t bytes, sum;      // of what follows the header
    std::uint64_t numbers, first;  // how many, and where the arrays begin
    std::uint8_t key[32];
    std::uint8_t pad[BORDER * 2 - 72];
};
static_assert(sizeof(Head) == 2 * BORDER);

std::size_t bordered(std::size_t bytes) { return (bytes + BORDER - 1) / BORDER * BORDER; }

// A sum in which every bit and its place count, of whole multiples of BORDER bytes.
std::uint64_t sum_of(const char* from, std::size_t bytes) {
    constexpr int lanes = 64;
    std::uint32_t sums[lanes] = {};
    for (std::size_t at = 0; at < bytes; at += BORDER) {
        std::uint32_t words[BORDER / 4], *to = sums + at / BORDER % 4 * 16;
        std::memcpy(words, from + at, BORDER);
        for (int i = 0; i < 16; ++i) to[i] = (to[i] << 7 | to[i] >> 25) + words[i];
    }
    std::uint64_t all = bytes;
    for (std::uint32_t each : sums) all = (all ^ each) * 0x9e3779b97f4a7c15u;
    return all;
}

// The sums of a file's pieces, on all threads.
struct Summing : Work {
    const char* from = nullptr;
    std::size_t bytes = 0;
    std::vector<std::uint64_t> sums;

    void run(Team& team) override {
        team.share(int(sums.size()), 1, [&](int first, int last) {
            for (int i = first; i < last; ++i) {
                const std::size_t at = std::size_t(i) * PIECE;
                sums[i] = sum_of(from + at, std::min(PIECE, bytes - at));
            }
        });
    }
    std::uint64_t all() const {
        std::uint64_t all = 0;
        for (std::uint64_t each : sums) all = (all ^ each) * 0x9e3779b97f4a7c15u;
        return all;
    }
};

// Goes through what a model keeps, to write it or to read it back.
struct Writer {
    std::vector<std::int64_t> numbers;
    std::vector<std::pair<const void*, std::size_t>> arrays;

    template <class N>
    void number(const N& n) {
        numbers.push_back(std::int64_t(n));
    }
    void real(float x) {
        std::int32_t bits;
        std::memcpy(&bits, &x, 4);
        number(bits);
    }
    void list(std::vector<Packed>& parts) { number(parts.size()); }
    template <class T>
    void array(Memory<T>& m) {
        numbers.push_back(std::int64_t(m.size()));
        arrays.emplace_back(m.data(), m.bytes());
    }
};

struct Reader {
    const std::shared_ptr<Pages> from;
    const std::int64_t* next;
    std::size_t left, at;
    const bool copies;  // rather than leave arrays where they are
    bool wrong = false;

    std::int64_t one() {
        if (!left) wrong = true;
        if (wrong) return 0;
        --left;
        return *next++;
    }
    template <class N>
    void number(N& n) {
        const std::int64_t got = one();
        n = static_cast<N>(got);
        wrong |= std::int64_t(n) != got;
    }
    void real(float& x) {
        std::int32_t bits = 0;
        number(bits);
        std::memcpy(&x, &bits, 4);
    }
    void list(std::vector<Packed>& parts) {
        const std::int64_t count = one();
        wrong |= count < 0 || count > MOST_PARTS;
        if (!wrong) parts.resize(std::size_t(count));
    }
    template <class T>
    void array(Memory<T>& m) {
        const std::int64_t count = one();
        const std::size_t room = from->bytes - at;
        if (wrong || count < 0 || std::size_t(count) > room / sizeof(T)) {
            wrong = true;
            return;
        }
        const std::size_t bytes = std::size_t(count) * sizeof(T);
        T* data = reinterpret_cast<T*>(from->data + at);
        if (count && !copies) {
            m = Memory<T>(data, std::size_t(count), from);
        } else {
            m = Memory<T>::of_weights(std::size_t(count));
            if (count) std::memcpy(static_cast<void*>(m.data()), data, bytes);
        }
        at = std::min(from->bytes, at + bordered(bytes));
    }
};

template <class V>
void visit(V& v, Packed& p) {
    v.real(p.factor);
    v.number(p.scaling);
    v.number(p.lessened);
    for (int* n : {&p.record, &p.per_record, &p.zero, &p.units, &p.in, &p.bits, &p.group, &p.groups,
                   &p.block, &p.split})
        v.number(*n);
    for (std::uint8_t& code : p.map) v.number(code);
    v.array(p.codes);
    v.array(p.scales);
    v.array(p.zeros);
    v.array(p.bias);
}

template <class V, class T>
void visit(V& v, Weight<T>& w) {
    v.number(w.plain.units);
    v.number(w.plain.inputs);
    v.array(w.plain.data);
    v.array(w.plain.bias);
    v.list(w.packed);
    for (Packed& p : w.packed) visit(v, p);
    v.number(w.apart);
}

template <class V, class T>
void visit(V& v, Weights<T>& m) {
    for (Layer<T>& layer : m.layers) {
        for (Weight<T>& matrix : layer.matrices) visit(v, matrix);
        for (Memory<float>* norm :
             {&layer.input_norm, &layer.mlp_norm, &layer.after_norm, &layer.output_norm,
              &layer.q_norm, &layer.k_norm, &layer.taps, &layer.taps_bias, &layer.decay,
              &layer.dt_bias, &layer.gated, &layer.skip, &layer.router_bias, &layer.sinks})
            v.array(*norm);
        v.number(layer.wide_q);
        v.number(layer.wide_k);
    }
    visit(v, *m.head);
    bool table = m.table != nullptr;
    v.number(table);
    if (table && !m.table) m.table = std::make_shared<Weight<T>>();
    if (table) visit(v, *m.table);
    v.array(m.norm);
}

// Whether products stay within the arrays of `p`, of `in` inputs.
bool sound(const Packed& p, int in) {
    const int s = int(p.scaling);
    if (s < 0 || s > int(Scaling::nibbles) || p.in != in || p.units < 1 || p.units > MOST ||
        p.group < 1 || p.group > MOST || p.groups < 1 || p.split < 1 || p.per_record < 1)
        return false;
    const bool steps = p.scaling == Scaling::steps || p.scaling == Scaling::nibbles;
    const int each = !steps ? 0 : p.scaling == Scaling::steps && p.lessened ? 2 : 1;
    const std::int64_t record =
        (p.lessened ? 4 : 2) * LANES + std::int64_t(each) * p.per_record * LANES;
    const std::int64_t width = std::int64_t(p.groups) * p.split * p.block;
    const int longest = halved(p.bits) ? CELL / 2 : LONGEST_BLOCK;
    const int group = p.group < in ? p.group : in;
    if (p.bits < 0 || p.bits > 8 || p.bits == 1 || p.bits == 7 || p.per_record > 16 ||
        (p.block != 16 && p.block != 32 && p.block != 64 && p.block != LONGEST_BLOCK) ||
        p.block > longest || (halved(p.bits) && p.block != longest) ||
        (p.bits == MAPPED && p.block != CELL) || p.groups != (in - 1) / group + 1 ||
        p.split != (p.group - 1) / LONGEST_BLOCK + 1 ||
        p.block < std::min(p.group, LONGEST_BLOCK) || p.groups % p.per_record ||
        p.record != record || 2 * width > MOST || width % CELL)
        return false;
    const std::size_t units = std::size_t(p.units), rows = units * LANES;
    return p.codes.size() == units * p.unit_size() && p.scales.size() == units * p.scales_size() &&
           (!p.zeros.size() || p.zeros.size() == rows * std::size_t(p.groups)) &&
           (!p.bias.size() || p.bias.size() == rows);
}

// Whether `w` is a matrix [out, in], whose units take turns if it `gates`.
template <class T>
bool sound(const Weight<T>& w, int out, int in, bool gates) {
    const int want = gates ? padded(out / 2, LANES) / LANES * 2 : padded(out, LANES) / LANES;
    if (w.packed.empty()) {
        const Matrix<T>& p = w.plain;
        return !w.apart && p.units == want && p.inputs == padded(in, IN_PAD) &&
               p.data.size() == std::size_t(p.units) * p.unit_size() &&
               (!p.bias.size() || p.bias.size() == std::size_t(p.units) * LANES);
    }
    std::int64_t units = 0;
    for (const Packed& part : w.packed) {
        if (!sound(part, in)) return false;
        units += part.units;
    }
    const bool halves = w.packed.size() == 2 && w.packed[0].units == w.packed[1].units;
    return w.plain.empty() && units == want && (w.apart ? gates && halves : true) &&
           (!gates || w.apart || w.packed.size() == 1);
}

bool sound(const Memory<float>& vector, int count, bool needed) {
    return vector.size() == std::size_t(count) + IN_PAD || (!needed && !vector.size());
}

template <class T>
bool sound(const Weights<T>& m) {
    const Config& c = m.c;
    for (const Layer<T>& layer : m.layers) {
        const Weight<T>* w = layer.matrices;
        const int mixer = layer.mixer, width = channels(c, mixer);
        const bool linear = is_linear(mixer), mixes = mixer != MIXER_NONE;
        const bool beside = mixer == MIXER_BESIDE;
        const int attention = entering(c, MIXER_ATTENTION), heads = leaving(c, MIXER_ATTENTION);
        const int values = linear_values(c), shared = c.shared_inner;
        const MlpSize mlp = mlp_size(c, layer.mlp);
        const bool mixture = layer.mlp == MLP_MIXTURE, gates = stacked(c) == 2;
        auto none = [](const Weight<T>& weight) { return weight.empty(); };
        if (!(mixes ? sound(w[0], entering(c, mixer), c.hidden, false) &&
                          sound(w[1], c.hidden, leaving(c, mixer), false)
                    : none(w[0]) && none(w[1])) ||
            !(linear ? sound(w[MATRIX_RATES], rates_of(c), c.hidden, false)
                     : none(w[MATRIX_RATES])) ||
            !(beside ? sound(w[MATRIX_BESIDE_QKV], attention, c.hidden, false) &&
                           sound(w[MATRIX_BESIDE_OUTPUT], c.hidden, heads, false)
                     : none(w[MATRIX_BESIDE_QKV]) && none(w[MATRIX_BESIDE_OUTPUT])) ||
            !(layer.mlp
                  ? sound(w[2], mlp.up, c.hidden, gates) && sound(w[3], mlp.out, mlp.in, false)
                  : none(w[2]) && none(w[3])) ||
            (mixture && w[3].packed.size() > 1) ||
            !(mixture ? sound(w[MATRIX_ROUTER], routed(c), c.hidden, false)
                      : none(w[MATRIX_ROUTER])) ||
            !(mixture && shared
                  ? sound(w[MATRIX_SHARED_GATE_UP], stacked(c) * shared, c.hidden, gates) &&
                        sound(w[MATRIX_SHARED_DOWN], c.hidden, shared, false)
                  : none(w[MATRIX_SHARED_GATE_UP]) && none(w[MATRIX_SHARED_DOWN])) ||
            !sound(layer.router_bias, c.experts, false) || !sound(layer.sinks, c.heads, false) ||
            !sound(layer.taps, c.taps * width, width > 0) ||
            !sound(layer.taps_bias, width, false) || !sound(layer.decay, c.value_heads, linear) ||
            !sound(layer.dt_bias, c.value_heads, linear) || !sound(layer.gated, values, linear) ||
            !sound(layer.skip, c.value_heads, linear && c.mamba) ||
            !sound(layer.input_norm, c.hidden, false) || !sound(layer.mlp_norm, c.hidden, false) ||
            !sound(layer.after_norm, c.hidden, false) ||
            !sound(layer.output_norm, c.hidden, false) ||
            !sound(layer.q_norm, (layer.wide_q ? c.heads : 1) * c.head_dim, false) ||
            !sound(layer.k_norm, (layer.wide_k ? c.kv_heads : 1) * c.head_dim, false))
            return false;
    }
    return sound(*m.head, c.vocabulary, c.hidden, false) && sound(m.norm, c.hidden, true) &&
           (!m.table || sound(*m.table, c.embeddings, c.hidden, false));
}

// Sets what a model knows of its matrices' sizes.
template <class T>
void measure(Weights<T>& m) {
    auto take = [&](const Weight<T>& w) {
        m.make_room(w.packed);
        m.apart |= w.apart;
    };
    for (const Layer<T>& layer : m.layers)
        for (const Weight<T>& matrix : layer.matrices) take(matrix);
    take(*m.head);
    if (m.table) take(*m.table);
}

struct File {
    explicit File(int number) : number(number) {}
    File(const File&) = delete;
    ~File() {
        if (number >= 0) close(number);
    }
    const int number;
};

bool write_all(int file, const void* from, std::size_t bytes) {
    for (const char* next = static_cast<const char*>(from); bytes;) {
        const ssize_t put = write(file, next, std::min(bytes, PIECE));
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return false;
        next += put;
        bytes -= std::size_t(put);
    }
    return true;
}

// Writes what follows a header, piece by piece, and sums it up.
struct Pieces {
    const int file;
    std::vector<char> piece = std::vector<char>(PIECE);
    std::size_t filled = 0;
    std::uint64_t bytes = 0;
    Summing sums;
    bool failed = false;

    void flush() {
        if (!filled || failed) return;
        sums.sums.push_back(sum_of(piece.data(), filled));
        failed = !write_all(file, piece.data(), filled);
        filled = 0;
    }
    void add(const void* from, std::size_t count) {
        bytes += count;
        for (const char* next = static_cast<const char*>(from); count && !failed;) {
            const std::size_t some = std::min(count, PIECE - filled);
            std::memcpy(piece.data() + filled, next, some);
            filled += some;
            next += some;
            count -= some;
            if (filled == PIECE) flush();
        }
    }
    void border() {
        constexpr char zeros[BORDER] = {};
        add(zeros, bordered(bytes) - bytes);
    }
};

template <class T>
const char* keep(Weights<T>& m, const char* path, const std::uint8_t* key) {
    if (m.c.input != INPUT_EMBEDDED || m.c.fused || m.embedding || !complete(m))
        return "weights of this kind are not kept";
    Writer writer;
    visit(writer, m);
    const File file(open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600));
    constexpr const char* failed = "kept weights cannot be written";
    // Whole pieces of the file follow a header of a piece, so that large pages can hold them.
    std::vector<char> front(PIECE);
    if (file.number < 0 || !write_all(file.number, front.data(), PIECE)) return failed;
    Pieces pieces{file.number};
    pieces.add(writer.numbers.data(), writer.numbers.size() * sizeof(std::int64_t));
    pieces.border();
    Head head = {};
    head.first = pieces.bytes;
    for (auto [from, bytes] : writer.arrays) {
        pieces.add(from, bytes);
        pieces.border();
    }
    pieces.flush();
    std::memcpy(head.magic, MAGIC, sizeof MAGIC);
    std::memcpy(head.key, key, sizeof head.key);
    head.bytes = pieces.bytes;
    head.numbers = writer.numbers.size();
    head.sum = pieces.sums.all();
    if (pieces.failed || pwrite(file.number, &head, sizeof head, 0) != ssize_t(sizeof head) ||
        fsync(file.number))
        return failed;
    return nullptr;
}

// Whether a mapping is no slower to read than other memory: small, or mostly in large pages.
bool is_quick(const Pages& mapping) {
    if (mapping.bytes < PIECE) return true;
#if defined(__linux__)
    std::FILE* maps = std::fopen("/proc/self/smaps", "re");
    if (!maps) return false;
    char line[512], begin[32];
    std::snprintf(begin, sizeof begin, "%lx-", reinterpret_cast<unsigned long>(mapping.data));
    bool here = false;
    unsigned long large = 0;
    while (std::fgets(line, sizeof line, maps)) {
        if (!here)
            here = !std::strncmp(line, begin, std::strlen(begin));
        else if (std::sscanf(line, "FilePmdMapped: %lu kB", &large) == 1)
            break;
    }
    std::fclose(maps);
    return large * 1024 >= mapping.bytes / 2;
#else
    return true;
#endif
}

// A file's bytes behind its header, on the border of a large page as in the file.
std::shared_ptr<Pages> map(int file, std::size_t bytes) {
    const auto pages = std::make_shared<Pages>(bytes, PROT_NONE);
    constexpr int kind = MAP_PRIVATE | MAP_FIXED;
    if (mmap(pages->data, bytes, PROT_READ, kind, file, off_t(PIECE)) == MAP_FAILED)
        throw std::bad_alloc();
#if defined(__linux__)
    madvise(pages->data, bytes, MADV_HUGEPAGE);
    madvise(pages->data, bytes, MADV_WILLNEED);
#endif
    return pages;
}

// Whether kept weights of `key` were taken into `m`; `wrong` says why not if they are damaged.
template <class T>
bool take(Weights<T>& m, const char* path, const std::uint8_t* key, bool copies,
          const Weights<T>* beside, const char*& wrong) {
    const File file(open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
    struct stat state;
    Head head;
    if (file.number < 0 || fstat(file.number, &state) || !S_ISREG(state.st_mode)) return false;
    wrong = DAMAGED;
    if (pread(file.number, &head, sizeof head, 0) != ssize_t(sizeof head) ||
        std::memcmp(head.magic, MAGIC, sizeof MAGIC) ||
        std::memcmp(head.key, key, sizeof head.key) || head.bytes < BORDER || head.bytes % BORDER ||
        head.bytes > std::uint64_t(INT64_MAX) / 2 ||
        std::uint64_t(state.st_size) != head.bytes + PIECE || head.first > head.bytes ||
        head.numbers > head.first / sizeof(std::int64_t))
        return false;
    std::shared_ptr<Pages> mapping = map(file.number, head.bytes);
    const auto sums = std::make_shared<Summing>();
    sums->from = mapping->data;
    sums->bytes = head.bytes;
    sums->sums.resize((head.bytes + PIECE - 1) / PIECE);
    Turn().run(sums, 1, pool_size());
    quiet_pool();
    if (sums->all() != head.sum) return false;
    const bool quick = is_quick(*mapping);
    if (!quick && !copies) {
        wrong = nullptr;
        return false;
    }
    Reader reader{mapping, reinterpret_cast<const std::int64_t*>(mapping->data), head.numbers,
                  head.first, !quick};
    if (!m.head) m.head = std::make_shared<Weight<T>>();
    visit(reader, m);
    if (reader.wrong || reader.left || !sound(m)) {
        m.layers = std::vector<Layer<T>>(m.layers.size());
        m.head = m.table = nullptr;
        return false;
    }
    wrong = nullptr;
    for (auto* own : {&m.head, &m.table})
        for (const auto& other : beside ? std::vector{beside->head, beside->table}
                                        : std::vector<std::shared_ptr<Weight<T>>>())
            if (*own && other && !other->packed.empty() && other->same((*own)->packed))
                *own = other;
    measure(m);
    return true;
}

}  // namespace

const char* outrider_keep(Model* model, const char* path, const std::uint8_t* key) {
    return with(model, [&](auto& m) { return keep(m, path, key); });
}

const char* outrider_take(Model* model, const char* path, const std::uint8_t* key,
                          std::int32_t copies, const Model* beside, std::int32_t* taken) {
    return with(model, beside, [&](auto& m, const auto* other) -> const char* {
        const char* wrong = nullptr;
        if (m.c.input != INPUT_EMBEDDED || m.c.fused || m.embedding || m.head)
            return "weights of this kind are not kept";
        *taken = take(m, path, key, copies != 0, other, wrong);
        return wrong;
    });
}

}  // namespace outrider
