// The C interface of pipelines and draws.
#include "sampler.hpp"

#include <cmath>

#include "guard.hpp"
#include "memory.hpp"

namespace outrider {

namespace {

bool all_below(const std::int32_t* ids, std::int64_t count, std::int32_t vocabulary) {
    for (std::int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= vocabulary) return false;
    return true;
}

}  // namespace

const char* outrider_pipeline(const Options* options, const std::uint8_t* banned,
                              const std::int32_t* ids, int ends, const float* bias, int biased,
                              int prompt, Pipeline** made) {
    return guarded({}, [&]() -> const char* {
        const Options& o = *options;
        if (ends < 0 || biased < 0 || prompt < 0 || o.vocabulary < 1 || o.vocabulary > MOST ||
            o.top_k < 0 || o.sample < 0 || o.prompt_length < 0 || o.min_tokens < 0)
            return "a pipeline has a number below its least";
        if (!all_below(ids, std::int64_t(ends) + biased + prompt, o.vocabulary))
            return "a token id of a pipeline is past the vocabulary";
        auto pipeline = std::make_unique<Pipeline>(*options, banned);
        pipeline->ends.assign(ids, ids + ends);
        pipeline->bias_ids.assign(ids + ends, ids + ends + biased);
        pipeline->bias.assign(bias, bias + biased);
        pipeline->count_prompt(ids + ends + biased, prompt);
        *made = pipeline.release();
        return nullptr;
    });
}

void outrider_pipeline_free(const Pipeline* pipeline) noexcept { release(pipeline); }

const char* outrider_pipeline_count(Pipeline* pipeline, const std::int32_t* ids, int count) {
    return guarded({pipeline}, [&]() -> const char* {
        if (!all_below(ids, count, pipeline->o.vocabulary))
            return "a token id is past the vocabulary";
        pipeline->count_output(ids, count);
        return nullptr;
    });
}

const char* outrider_pipeline_apply(const Pipeline* pipeline, float* z, int rows, int width,
                                    int output, const std::int32_t* paths, std::int64_t count,
                                    int late_only) {
    return guarded({pipeline}, [&]() -> const char* {
        if (width != pipeline->o.vocabulary) return "a row is not as long as the vocabulary";
        if (output < 0) return "the output has a length below 0";
        std::vector<Path> found;
        for (std::int64_t at = 0; at < count;) {
            const int length = paths[at++];
            if (length < 0 || length > count - at) return "a path is cut short";
            if (!all_below(paths + at, length, width)) return "a token id is past the vocabulary";
            found.push_back({paths + at, length});
            at += length;
        }
        if (int(found.size()) != rows) return "there are not as many paths as rows";
        each_row(rows, width, [&](int r) {
            pipeline->apply(z + std::size_t(r) * width, output, found[r], late_only != 0);
        });
        return nullptr;
    });
}

const char* outrider_draw(const float* z, int rows, std::int64_t stride, int vocabulary,
                          const std::uint32_t* keys, const std::uint8_t* greedy,
                          std::int32_t* tokens, float* scores) {
    return guarded({}, [&]() -> const char* {
        if (vocabulary < 1 || stride < vocabulary) return "a row is shorter than the vocabulary";
        each_row(rows, vocabulary, [&](int r) {
            const std::uint32_t* k = keys + 4 * std::size_t(r);
            const NoiseKey key{k[0], k[1], k[2], k[3]};
            const Drawn drawn = draw(z + r * stride, vocabulary, greedy[r] ? nullptr : &key);
            tokens[r] = drawn.token;
            scores[r] = drawn.score;
        });
        return nullptr;
    });
}

const char* outrider_logprobs(const float* const* rows, int count, int vocabulary,
                              const std::int32_t* tokens, const std::int32_t* likeliest, float* own,
                              std::int32_t* ranks, std::int32_t* ids, float* values) {
    return guarded({}, [&]() -> const char* {
        if (!all_below(tokens, count, vocabulary)) return "a token id is past the vocabulary";
        std::vector<std::size_t> first(1);  // of a row's likeliest
        for (int r = 0; r < count; ++r) {
            if (likeliest[r] < 0 || likeliest[r] > vocabulary)
                return "more ids are wanted than there are";
            first.push_back(first.back() + likeliest[r]);
        }
        each_row(count, vocabulary, [&](int r) {
            const Logprobs found = logprobs(rows[r], vocabulary, tokens[r], likeliest[r],
                                            ids + first[r], values + first[r]);
            own[r] = found.own;
            ranks[r] = found.rank;
        });
        return nullptr;
    });
}

void outrider_noise(std::uint64_t seed, std::uint32_t position, std::uint32_t sample,
                    std::int64_t count, float* out) noexcept {
    write_noise({std::uint32_t(seed), std::uint32_t(seed >> 32), position, sample}, count, out);
}

}  // namespace outrider
