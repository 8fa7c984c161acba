// Calls of the C interface with a model of either dtype.
#pragma once

#include "guard.hpp"
#include "model.hpp"

namespace outrider {

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
    return guarded({model, beside}, typed);
}

// Calls `work` with the weights as what they are.
template <class Work>
const char* with(Model* model, Work work) {
    return with(model, nullptr, [&](auto& m, const auto*) { return work(m); });
}

}  // namespace outrider
