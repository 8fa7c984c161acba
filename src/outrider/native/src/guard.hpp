// What every function of the C interface does with exceptions.
#pragma once

#include <exception>
#include <new>

#define API extern "C" __attribute__((visibility("default")))

namespace outrider {

// A sentence, or null where all went well.
template <class Work>
const char* guarded(Work work) {
    try {
        return work();
    } catch (const std::bad_alloc&) {
        return "there is not enough memory";
    } catch (const std::exception&) {
        return "an unexpected error";
    }
}

}  // namespace outrider
