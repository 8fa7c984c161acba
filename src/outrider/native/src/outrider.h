// The C interface: all types, constants and functions that Python sees.
//
// Python reads this file through cffi (native/_interface.py is made of it by `make interface`), C++
// includes it. A function that can fail returns a sentence that says what is wrong, or null.
// Pointers must hold as many elements as their sizes say; every number in them is checked.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
namespace outrider {
#define OUTRIDER_API __attribute__((visibility("default")))
#define OUTRIDER_NOEXCEPT noexcept
extern "C" {
#endif

// Tokens of a context in suffix decoding, and so of a draft, at most.
#define SUFFIX_DEPTH 64
// Depths, ranks and bins of the margin that rates tell apart; the last of each stands for all
// beyond.
#define RATE_DEPTHS 8
#define RATE_RANKS 4
#define RATE_BINS 4
// Where the bins of the margin begin, after the first.
#define RATE_MARGINS 0.5, 1.5, 3.0
// Children of a drafted node, at most.
#define MAX_BRANCHES 10
// Rotary tables of a model, at most.
#define ROTARY_TABLES 2

enum Dtype { DTYPE_FLOAT32, DTYPE_BFLOAT16 };

// What a row enters the first layer with.
enum InputKind {
    INPUT_EMBEDDED,  // the embedding of its token
    INPUT_PAIRED,  // a state; its queries, keys and values also see the token's embedding (EAGLE-3)
    // What FUSE makes of its token's embedding and a state, each after its part of the norm (MTP).
    INPUT_JOINED,
    INPUT_HEADS,  // a state; there are no layers, but heads that draft one token each (Medusa)
    // The embedding of its token, and of earlier tokens a state, of which every layer makes keys
    // and values and nothing else (DFlash). See outrider_forward.
    INPUT_BLOCK,
};

// What a gate becomes before it multiplies.
enum ActivationKind {
    ACTIVATION_SILU,
    ACTIVATION_GELU,   // by a tanh
    ACTIVATION_RELU2,  // the square of what is positive; it gates nothing, and UP stands alone
    // x sigmoid(1.702 x), beside 1 + what it gates, both within limits (gpt-oss).
    ACTIVATION_CLAMPED,
};

// How a mixture's router weighs the experts that a row goes to: those of the highest scores.
enum RouterKind {
    ROUTER_SOFTMAX,   // by the softmax over all scores
    ROUTER_SELECTED,  // by the softmax over the scores of those that are chosen
    ROUTER_SIGMOID,   // by sigmoids, which are chosen with ROUTER_BIAS added
};

// What stands behind a layer's mixer.
enum MlpKind { MLP_NONE, MLP_DENSE, MLP_MIXTURE };

// What mixes the tokens of a sequence in a layer.
enum MixerKind {
    MIXER_ATTENTION,
    MIXER_CONV,  // a gated short convolution (LFM2), whose QKV makes gates and inputs [3 * hidden]
    // Linear attention: a gated delta net (Qwen3.5) or Mamba-2. QKV makes queries, keys, values and
    // gates: of Mamba-2 C, B, x and z.
    MIXER_LINEAR,
    MIXER_BESIDE,  // linear attention, and attention beside it, which sees the same rows
                   // (Falcon-H1)
    MIXER_NONE,    // such a layer is an MLP only
};

// Matrices: those before HEAD belong to a layer. RATES are linear attention's: what
// becomes the strengths of updates and decays [2 * value_heads, hidden], of Mamba-2 both at once
// [value_heads, hidden]. BESIDE_* are those of attention beside linear attention. *_KERNELS make
// kernels of a row that enters a sublayer [2 * kernel_taps * hidden / kernel_group, hidden].
//
// A mixture's GATE_UP [2 * experts * expert_inner, hidden] has the gates of all experts, and behind
// them what they gate; its DOWN [experts * hidden, expert_inner] one expert behind the other.
// ROUTER [experts + shared_gated, hidden] scores them, and its last row gates the expert that all
// rows share: SHARED_GATE_UP [2 * shared_inner, hidden] and SHARED_DOWN. DRAFT: of heads, each
// one's residual blocks and then what makes its logits.
enum MatrixKind {
    MATRIX_QKV,
    MATRIX_OUTPUT,
    MATRIX_GATE_UP,
    MATRIX_DOWN,
    MATRIX_RATES,
    MATRIX_BESIDE_QKV,
    MATRIX_BESIDE_OUTPUT,
    MATRIX_ATTENTION_KERNELS,
    MATRIX_MLP_KERNELS,
    MATRIX_ROUTER,
    MATRIX_SHARED_GATE_UP,
    MATRIX_SHARED_DOWN,
    MATRIX_HEAD,
    MATRIX_EMBEDDING,
    MATRIX_FUSE,
    MATRIX_DRAFT,
};

// The weights of norms. INPUT and MLP come before attention and MLP, AFTER and OUTPUT behind them:
// each layer has those before, those behind, or both. Q and K are of a head, or of all heads. TAPS
// [taps, channels] are of a convolution, the oldest token's first, and TAPS_BIAS is what it adds.
// DECAY and DT_BIAS [value_heads] and GATED [values of all heads], a norm, are linear attention's,
// SKIP [value_heads] Mamba-2's D. *_KERNELS [2, kernel_taps, hidden] are added to the kernels of
// every row: those of what enters a sublayer, and of what leaves it. ROUTER_BIAS [experts] is added
// to scores for the choice alone. SINKS [heads] are scores of a key without a value, which every
// row sees.
enum VectorKind {
    VECTOR_INPUT,
    VECTOR_MLP,
    VECTOR_AFTER,
    VECTOR_OUTPUT,
    VECTOR_FINAL,
    VECTOR_Q,
    VECTOR_K,
    VECTOR_TAPS,
    VECTOR_TAPS_BIAS,
    VECTOR_DECAY,
    VECTOR_DT_BIAS,
    VECTOR_GATED,
    VECTOR_SKIP,
    VECTOR_ATTENTION_KERNELS,
    VECTOR_MLP_KERNELS,
    VECTOR_ROUTER_BIAS,
    VECTOR_SINKS,
    VECTOR_STATE,
    VECTOR_FUSE,
};

// Products that `outrider_peak` counts: digits are what activations become beside few-bit codes.
enum PeakKind {
    PEAK_FLOAT32,
    PEAK_BFLOAT16,
    PEAK_DIGITS16,
    PEAK_DIGITS8,
    PEAK_DIGITS8_CODES4,
};

typedef struct Model Model;
typedef struct Store Store;        // the cache of a model
typedef struct Pipeline Pipeline;  // processes the logits of a sequence
typedef struct SuffixIndex SuffixIndex;

// Which tokens may come: a bit each, the lowest first. Null: all.
typedef const uint8_t* Mask;
// Returns the mask of what may follow a path of drafted ids in the draft of that number.
typedef const uint8_t* (*AskMask)(int32_t draft, const int32_t* path, int32_t length);

// The sizes of a model.
typedef struct Config {
    int32_t dtype;
    int32_t layers, hidden, inner, heads, kv_heads, head_dim, vocabulary, max_length;
    int32_t embeddings;  // tokens that have one; 0: all of the vocabulary
    int32_t input;
    int32_t fused;          // width of what FUSE makes a state of; 0 where states come as they are
    int32_t fused_norms;    // that are applied to it before, each to its part
    int32_t state_normed;   // the residual stream begins with a norm
    int32_t output_normed;  // a state ends with a norm
    // Whether rows of INPUT_BLOCK see none of later positions: where layers have a window, and in
    // all layers.
    int32_t causal_windows, causal;
    // Rows of a block that kernels mix, 0: none are; and channels that share what a row adds to
    // them.
    int32_t kernel_taps, kernel_group;
    int32_t blocks;  // residual blocks before the last matrix of each head
    int32_t coarse;  // matrices in codes take activations of 8 bits rather than 16
    // Layers that are short convolutions, linear attention, the same with attention beside it, and
    // MLPs only. One attends at least.
    int32_t convs, linears, besides, nones;
    int32_t taps;  // tokens that convolutions span, also those in linear attention
    int32_t key_heads, value_heads, key_dim, value_dim;  // of linear attention
    int32_t mamba;                                       // it is Mamba-2, else a gated delta net
    int32_t norm_groups;  // parts of its values that are normed, each by itself; 0: none are
    int32_t gate_first;   // its gate comes before that norm
    float gate_scale, step_scale;  // multiply its gates, and what its rates are made of
    int32_t tiled_heads;  // value head i goes with key head i % key_heads; else they are grouped
    int32_t gated;        // attention is multiplied by gates, whose heads come behind its queries
    int32_t coded_cache;  // keys and values are kept in codes of 8 bits
    int32_t activation;
    // Of mixtures: experts, those that a row goes to, their width, that of the expert that all rows
    // share (0: there is none), whether its output is multiplied by the sigmoid of a score, how
    // experts are weighed, whether weights are divided by their sum, in how many groups experts
    // are, and to how many of these a row goes.
    int32_t experts, top_experts, expert_inner, shared_inner, shared_gated, router, renormalised;
    int32_t expert_groups, top_groups;
    // Rows of a prompt that is longer, and rows at later positions, turn by the table behind their
    // layer's; 0: none do.
    int32_t far;
    int32_t heat_step;  // queries at position p are multiplied by 1 + heat log(1 + p / heat_step)
    float norm_eps, scale, embedding_scale, residual_scale, logits_scale, heat;
    // What sublayers add to the residual stream is multiplied by, and an MLP's gates are.
    float attention_out, linear_out, mlp_out, mlp_gate;
    float routed_scale;               // multiplies the weights of experts
    float attention_cap, logits_cap;  // scores x of attention and logits become cap tanh(x / cap)
} Config;

// A quantised matrix.
typedef struct QuantizedData {
    const uint8_t* codes;  // [out, in]
    const float* scales;   // [out, groups]
    const uint8_t* zeros;  // [out, groups], or null
    int32_t bits, group, groups;
} QuantizedData;

// Rows of a GGUF file that follow each other in a matrix.
typedef struct CodedData {
    int64_t offset;        // of the first row in the file, in bytes
    const int32_t* order;  // [rows]: which of them comes when, or null
    int32_t file;          // its descriptor
    int32_t type;          // of its codes, by ggml's number
    int32_t rows;
} CodedData;

// A request's options in its pipeline.
typedef struct Options {
    uint64_t seed;
    double presence;
    float temperature;  // 0: greedy
    float frequency, repetition;
    float min_p;  // its logarithm; above 0 where off
    float top_p;
    int32_t top_k;  // 0 where off
    int32_t vocabulary, sample, prompt_length, min_tokens, penalises;
} Options;

// Logits that rows of a sequence have instead of the model's. The last entry stands for all
// positions behind it.
typedef struct Planted {
    const int64_t* ids;  // [count, columns]: these have the logits `z`; null: nothing is planted
    const float* z;      // [count, columns]
    const float* rest;   // [count]: what every other id has
    int64_t count, columns;
    int64_t first;  // position of the token that the first entry decides
} Planted;

// Limits of one draft.
typedef struct DraftLimits {
    int32_t depth, nodes;  // at most
    int32_t width;         // nodes whose rows are run at a level, at most
    int32_t branches;      // children of a node, at most
    float least;           // survival below which no row is run
    float worth;           // survival below which a node is left out of the draft
    // [RATE_DEPTHS, RATE_RANKS, RATE_BINS]: P(accepted | parent accepted); null: all of them 1
    const float* rates;
    // The only nodes that may be: their number, then of each its parent's number, -1 for the root,
    // and the rank of its draw. Null: all.
    const int32_t* choices;
} DraftLimits;

// Sizes of a call of `outrider_decide`.
typedef struct DecideSizes {
    int64_t words, pipelines, rows, lines, vocabulary, hidden, hidden_rows, hidden_first, width;
    int64_t mask_bytes;
} DecideSizes;

// Sizes of a call of `outrider_draft`: `room` is the number of nodes of a draft at most.
typedef struct DraftSizes {
    int64_t words, drafts, room, mask_bytes, states, width, sublayers;
    int64_t vocabulary;  // the model's, or the number of its likely rows
} DraftSizes;

// -- the library --

// A number that stands for this file.
OUTRIDER_API int64_t outrider_abi(void) OUTRIDER_NOEXCEPT;
// Returns the instruction sets that this CPU runs, a bit each, as native/choice.py counts them.
OUTRIDER_API int32_t outrider_cpu(void) OUTRIDER_NOEXCEPT;
// Returns those of them that are slower than the set before, likewise.
OUTRIDER_API int32_t outrider_slow(void) OUTRIDER_NOEXCEPT;
// Returns the nanoseconds that the process has spent in calls that can fail.
OUTRIDER_API int64_t outrider_spent(void) OUTRIDER_NOEXCEPT;
// Returns those of them in which rows of logits were processed, drawn from and measured.
OUTRIDER_API int64_t outrider_sampled(void) OUTRIDER_NOEXCEPT;
// Starts the pool at the first call. Returns how many threads it has: fewer than asked for where
// the system starts no more.
OUTRIDER_API int32_t outrider_start(int32_t threads) OUTRIDER_NOEXCEPT;
// The same of a pool for the calls of this thread alone, whose threads run on the CPUs that this
// one may use now.
OUTRIDER_API int32_t outrider_start_own(int32_t threads) OUTRIDER_NOEXCEPT;

// -- models --

// `embedding` [embeddings, hidden] stays its owner's and must outlive the model; without one, rows
// of the head are looked up.
OUTRIDER_API const char* outrider_model(const Config* config, const void* embedding, Model** made);
// The model goes when no call and no cache of its own uses it any more.
OUTRIDER_API void outrider_model_free(const Model* model) OUTRIDER_NOEXCEPT;
// Packs `data` [out, in] of `dtype`, which is the model's, with `bias` [out] or null. A head or
// embedding that is the same to the bit in `beside` (null: none) is held once, whichever of the two
// models is freed first.
OUTRIDER_API const char* outrider_matrix(Model* model, int32_t layer, int32_t kind,
                                         const void* data, int32_t dtype, const float* bias,
                                         int32_t out, int32_t in, const Model* beside);
// Packs a quantised matrix [out, in]; see outrider_matrix.
OUTRIDER_API const char* outrider_quantized(Model* model, int32_t layer, int32_t kind,
                                            const QuantizedData* data, const float* bias,
                                            int32_t out, int32_t in, const Model* beside);
// Reads a matrix [out, in] from a file whose codes are kept, in `count` parts one behind the other,
// and packs it; see outrider_matrix. Parts but the last have a multiple of 16 rows if the next has
// another type; the first half of the parts are a gate, the second half what it gates.
OUTRIDER_API const char* outrider_coded(Model* model, int32_t layer, int32_t kind,
                                        const CodedData* parts, int32_t count, const float* bias,
                                        int32_t out, int32_t in, const Model* beside);
// Keeps a norm's weight; `number` is the layer, 0 for the model's own.
OUTRIDER_API const char* outrider_vector(Model* model, int32_t number, int32_t kind,
                                         const float* data, int64_t count);
// Keeps `cos` and `sin` [length, width], width = head_dim / 2. They may be set again, longer,
// between calls.
OUTRIDER_API const char* outrider_rotary(Model* model, int32_t table, const float* cos,
                                         const float* sin, int32_t length, int32_t width);
// A layer's tokens are mixed by a `mixer`, and behind it stands an `mlp`; until it is said, by
// attention, and a dense one. Rows see `window` positions, or all with 0, and turn by a rotary
// table, or with -1 do not.
OUTRIDER_API const char* outrider_layer(Model* model, int32_t layer, int32_t mixer, int32_t mlp,
                                        int32_t window, int32_t table);
// `target_token_ids` [vocabulary] are the target's ids for a drafter's, `input_token_ids` [count] a
// drafter's ids, by which its embedding is looked up, for the target's; -1 stands for none.
OUTRIDER_API const char* outrider_ids(Model* model, const int32_t* target_token_ids,
                                      int32_t vocabulary, const int32_t* input_token_ids,
                                      int32_t count);
// Lets a model look tokens up where another does, whose `embedding` must outlive both; heads take
// its last norm, and a model of INPUT_JOINED, or one of INPUT_BLOCK without ids of its own, also
// its head.
OUTRIDER_API const char* outrider_borrow(Model* model, const Model* from);
// Copies rows of the head to places among `size` likely ones, which drafts may come from alone:
// `token_ids` [count] to `places` [count]. They stay as many, and begin without ids.
OUTRIDER_API const char* outrider_likely(Model* model, int32_t size, const int32_t* places,
                                         const int32_t* token_ids, int32_t count);
// Lets a model of INPUT_BLOCK draft one of its `top` likeliest ids, by its logit and its score
// behind the token before it: the product of their rows of `before` [tokens, rank] and `behind`
// [vocabulary, rank], both of the model's dtype. Rows of `before` are multiplied, number by number,
// by what `projection` [rank, hidden] (null: nothing) makes of the row that drafts. All stay their
// owner's and must outlive the model.
OUTRIDER_API const char* outrider_transitions(Model* model, int32_t top, int32_t rank,
                                              int32_t dtype, const void* before, int32_t tokens,
                                              const void* behind, int32_t vocabulary,
                                              const float* projection, int32_t width);
// Fails unless the model has all its weights.
OUTRIDER_API const char* outrider_check(const Model* model);
// Writes the packed weights of a model to a new file, under a `key` [32].
OUTRIDER_API const char* outrider_keep(Model* model, const char* path, const uint8_t* key);
// Gives a new model the weights that a file has under `key` [32], where there are any: `taken` says
// whether it did. They stay in the file, mapped, if large pages hold it; else they are read if
// `copies`.
OUTRIDER_API const char* outrider_take(Model* model, const char* path, const uint8_t* key,
                                       int32_t copies, const Model* beside, int32_t* taken);
// Returns the bytes of the matrices of a model, without those that `beside` (or null) holds too.
OUTRIDER_API int64_t outrider_weights(Model* model, const Model* beside);

// -- caches --

// Writes how many bytes a page of `page_size` positions takes.
OUTRIDER_API const char* outrider_page_bytes(const Model* model, int32_t page_size, int64_t* bytes);
OUTRIDER_API const char* outrider_store(const Model* model, int32_t pages, int32_t page_size,
                                        Store** made);
OUTRIDER_API void outrider_store_free(const Store* store) OUTRIDER_NOEXCEPT;
// Returns the number of slots whose row was not finite.
OUTRIDER_API int32_t outrider_nonfinite(const Store* store) OUTRIDER_NOEXCEPT;
// Returns how many experts the forwards over a cache have read so far, those of all layers
// together: each once in a forward, however many rows went to it.
OUTRIDER_API int64_t outrider_experts(const Store* store) OUTRIDER_NOEXCEPT;
// Copies the entries at some slots to others, in every layer; all are read before any is written.
OUTRIDER_API const char* outrider_move(Store* store, const int32_t* from_slots,
                                       const int32_t* to_slots, int32_t count);

// Copies the states of a slot as they were at the end of the last page of its sequence that is full
// to `states` [count] (null: nowhere), and writes how many tokens those are: 0 if there are none.
OUTRIDER_API const char* outrider_kept_states(const Store* store, int32_t slot, float* states,
                                              int64_t count, int32_t* tokens);
// Lets a slot's sequence go on behind so many tokens, whose states these are.
OUTRIDER_API const char* outrider_set_states(Store* store, int32_t slot, const float* states,
                                             int64_t count, int32_t tokens);

// -- steps --

// Runs some sublayers: twice its number stands for a layer's attention, one more for its MLP.
//
// `words` are segments one after the other, each [tokens, nodes, start, pages, logits, first,
// prompt, slot] and then the token ids, the nodes' ids, their parents and the page table; `prompt`
// is the prompt's length. `slot` is where a sequence keeps its states, 0 where layers have none: it
// begins anew with `start` 0, and otherwise goes on behind its last tokens and those of the last
// nodes that were accepted. Where a segment has nodes it may have no tokens, if none were accepted.
// Of INPUT_BLOCK a segment's last token and its nodes are a block, whose rows see each other, and
// its other tokens have states; one that wants no logits has states only. `num_rows` counts the
// rows of blocks then, and those of states are as many as there are. `logits` has room for
// [num_logits, vocabulary], where `vocabulary` is the model's or the number of its likely rows,
// `hidden_out` for [num_hidden, num_rows, width]. `states` [num_states, width] are those that rows
// begin with, null where the model wants none. Of heads a segment has one, and a row of logits for
// each head. `hidden` are layers after which the residual stream is wanted; -1 stands for the
// embedding, as many as there are for what the next row of a draft begins with.
OUTRIDER_API const char* outrider_forward(const Model* model, Store* store, const int32_t* words,
                                          int64_t count, const float* states, int32_t num_states,
                                          const int32_t* sublayers, int32_t num_sublayers,
                                          const int32_t* hidden_layers, int32_t num_hidden,
                                          float* logits, int32_t num_logits, int32_t vocabulary,
                                          float* hidden_out, int32_t num_rows, int32_t width);
// Makes states of a target's hidden states: rows `which` [count] of each of `hidden` [parts][rows,
// part] become rows `to` [count] of `states` [room, width]. Of INPUT_JOINED there is one part, to
// which the target's last norm is applied; those of INPUT_BLOCK end with a norm of their own.
OUTRIDER_API const char* outrider_fuse(const Model* model, const float* const* hidden,
                                       int32_t parts, int32_t rows, int32_t part,
                                       const int32_t* which, int32_t count, float* states,
                                       const int32_t* to, int32_t room, int32_t width);
// A forward over `words` (see outrider_forward) into `logits` [lines, vocabulary], whose first
// `rows` lines are those of the rows that want logits.
//
// A segment with a pipeline wants them of its last token and of all nodes. These rows are decided,
// with a mask a row, of `mask_bytes` or more, unless `masks` is null; their `tokens` and `scores`
// [rows] are written. Where `keeps` is set for a segment, its logits are copied before that to the
// next lines behind the others. A segment without a pipeline (null) keeps its logits as they are.
// `planted` (null: none) has an entry for each segment that wants logits. `hidden_layers` are those
// whose states go to `hidden_out` [hidden, hidden_rows, width], from row `hidden_first` on.
OUTRIDER_API const char* outrider_decide(const Model* model, Store* store, const DecideSizes* sizes,
                                         const int32_t* words, const Pipeline* const* pipelines,
                                         const Planted* planted, const uint8_t* keeps,
                                         const Mask* masks, float* logits,
                                         const int32_t* hidden_layers, float* hidden_out,
                                         int32_t* tokens, float* scores);
// A forward over `words`; segments that want logits go on by a pipeline each, as their `limits`
// say, with `planted` logits (null: none) or those of the model.
//
// They want one row of them or, of a model that drafts in one pass, one for each level. Where
// layers have states drafts are chains, of which each pass runs all rows. What is drafted first has
// the position in `positions` (null: the number of the segment's tokens) of its sequence. `states`
// (null: none) are those that rows begin with [rows, hidden] or, of heads, [drafts, hidden].
// `sublayers` (null: all) are run. Page tables reach to the end of the draft. Segments that are
// `constrained` (null: none) have a mask a row, of `mask_bytes` or more, for which the caller's
// thread calls `ask` between two forwards. Written are `ints`: tokens, parents and runs [drafts,
// room each] and how much was drafted [drafts]; and `floats`: margins and survivals [drafts, room
// each]. Runs are the places behind the committed tokens at which nodes have keys and values, or
// -1; survivals the chances, by the rates, that a node and all before it are accepted.
OUTRIDER_API const char* outrider_draft(const Model* model, Store* store, const DraftSizes* sizes,
                                        const int32_t* words, const Pipeline* const* pipelines,
                                        const Planted* planted, const DraftLimits* limits,
                                        const int32_t* positions, const float* states,
                                        const int32_t* sublayers, const uint8_t* constrained,
                                        AskMask ask, int32_t* ints, float* floats);

// -- sampling --

// `token_ids` are, one after the other: what ends the output, what has a bias, the prompt's tokens
// (where penalties want them). `banned` [vocabulary] (null: none) stays its owner's.
OUTRIDER_API const char* outrider_pipeline(const Options* options, const uint8_t* banned,
                                           const int32_t* token_ids, int32_t ends,
                                           const float* bias, int32_t biased, int32_t prompt,
                                           Pipeline** made);
OUTRIDER_API void outrider_pipeline_free(const Pipeline* pipeline) OUTRIDER_NOEXCEPT;
// Takes in the tokens of the output that were committed since the last call.
OUTRIDER_API const char* outrider_pipeline_count(Pipeline* pipeline, const int32_t* token_ids,
                                                 int32_t count);
// Processes `rows` rows of `width` logits, in place. `paths` are the token ids behind the committed
// ones, row by row, each its length and then its ids.
OUTRIDER_API const char* outrider_pipeline_apply(const Pipeline* pipeline, float* z, int32_t rows,
                                                 int32_t width, int32_t output,
                                                 const int32_t* path_token_ids, int64_t count,
                                                 int32_t late_only);
// Writes the token and score of each row of z, `stride` apart. `keys` [rows, 4] are seed (low,
// high), position and sample; where `greedy` there is no noise.
OUTRIDER_API const char* outrider_draw(const float* z, int32_t rows, int64_t stride,
                                       int32_t vocabulary, const uint32_t* keys,
                                       const uint8_t* greedy, int32_t* tokens, float* scores);
// Of each of the `rows` [count] of logits: the log probability and rank of a token, and so many of
// the `likeliest` ids with their values. Those follow the ones of the row before.
OUTRIDER_API const char* outrider_logprobs(const float* const* rows, int32_t count,
                                           int32_t vocabulary, const int32_t* token_ids,
                                           const int32_t* likeliest, float* own, int32_t* ranks,
                                           int32_t* ids, float* values);
// Writes the noise of `count` tokens from id 0 on, at one position: for the tests of its bits.
OUTRIDER_API void outrider_noise(uint64_t seed, uint32_t position, uint32_t sample, int64_t count,
                                 float* out) OUTRIDER_NOEXCEPT;

// -- suffix decoding --

// Makes an index of the last `room` places of a text.
OUTRIDER_API const char* outrider_suffix(int32_t room, SuffixIndex** made);
OUTRIDER_API void outrider_suffix_free(const SuffixIndex* index) OUTRIDER_NOEXCEPT;
// Appends tokens to the text; with `ends`, what comes next is another text.
OUTRIDER_API const char* outrider_suffix_extend(SuffixIndex* index, const int32_t* token_ids,
                                                int32_t count, int32_t ends);
// Forgets so many of the oldest places, the ends of texts among them; `left` says how many stay.
OUTRIDER_API const char* outrider_suffix_drop(SuffixIndex* index, int64_t places, int64_t* left);
// Drafts behind the text of `index`, by it or by `store` (null: none). `out` [4, SUFFIX_DEPTH] are
// tokens, parents, how often each token stood at its place, and how often others did; `drafted`
// says how many.
OUTRIDER_API const char* outrider_suffix_draft(const SuffixIndex* index, const SuffixIndex* store,
                                               int32_t depth, int32_t nodes, int32_t* out,
                                               int64_t* drafted);

// -- what bounds a step --

// Reads `bytes`, whole pieces of 128 KiB, once.
OUTRIDER_API const char* outrider_read(const void* data, int64_t bytes);
// Does products of a kind in `pieces`; `products` is how many.
OUTRIDER_API const char* outrider_peak(int32_t kind, int32_t pieces, int64_t* products);

#ifdef __cplusplus
}  // extern "C"
}  // namespace outrider
#endif
