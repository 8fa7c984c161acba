// A sequence's logits pipeline, specified by sampling/pipeline.py, and the draw.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "guard.hpp"

namespace outrider {

constexpr int NOISE_BLOCK = 128;     // tokens that are drawn together
constexpr float MOST_NOISE = 22.9f;  // above every g

struct NoiseKey {
    std::uint32_t low, high;  // of the seed
    std::uint32_t position, sample;
};

// The ids between the committed tokens and a row's position.
struct Path {
    const std::int32_t* ids;
    int length;
};

// Makes of z [count] what the mask keeps, in place.
void keep(float* z, int count, Mask mask);

struct Pipeline : public Counted {
    // `banned` [vocabulary] or null is its owner's and must outlive the pipeline.
    Pipeline(const Options& options, const std::uint8_t* banned) : o(options), banned_(banned) {}

    const Options o;
    std::vector<std::int32_t> ends;  // masked before `min_tokens`
    std::vector<std::int32_t> bias_ids;
    std::vector<float> bias;

    // Tokens of the prompt, then of the output, as they are committed; for penalties.
    void count_prompt(const std::int32_t* ids, int count);
    void count_output(const std::int32_t* ids, int count);
    // Makes z [vocabulary] of logits, in place; `output` tokens are committed beside the prompt.
    // `late_only` leaves out what comes before penalties, which the caller has done.
    void apply(float* z, int output, Path path, bool late_only) const;
    // What `apply` does in the end: temperature and truncation, of any `count` logits.
    void sharpen(float* z, int count) const;
    // Whether `apply` does nothing else there.
    bool only_sharpens(int output, Path path) const;

    // Where the token at `position` gets its noise.
    NoiseKey key(int position) const {
        return {std::uint32_t(o.seed), std::uint32_t(o.seed >> 32), std::uint32_t(position),
                std::uint32_t(o.sample)};
    }

private:
    float penalised(float z, int times) const;
    void penalise(float* z, Path path) const;

    const std::uint8_t* banned_;
    struct Seen {
        std::int32_t id;
        int times;  // in the output
    };
    Seen& seen(std::int32_t id);

    std::unordered_map<std::int32_t, int> slots_;  // where a token stands in `seen_`
    std::vector<Seen> seen_;
};

// The token of a row of processed logits and its score: NaN where an element of z is.
struct Drawn {
    std::int32_t token;
    float score;
};

// argmax z + g; with no `key`, argmax z. The lowest id on a tie.
Drawn draw(const float* z, int vocabulary, const NoiseKey* key);

// The `count` highest of z + g (of z with no `key`), highest first, the lower id first on a tie;
// NaN where an element of z is.
void draw_some(const float* z, int vocabulary, const NoiseKey* key, int count, Drawn* out);

// The same of elements that are those of `ids` alone; with a key the ids rise. Without one, the
// first of equal elements comes first.
void draw_some_of(const float* z, const std::int32_t* ids, int own, const NoiseKey* key, int count,
                  Drawn* out);

// Writes the noise of `count` tokens from id 0 on.
void write_noise(const NoiseKey& key, std::int64_t count, float* out);

// Of the logits z: a token's log probability and rank, and the `count` likeliest ids with theirs.
struct Logprobs {
    float own;
    std::int32_t rank;
};
Logprobs logprobs(const float* z, int vocabulary, int token, int count, std::int32_t* ids,
                  float* values);

}  // namespace outrider
