// Matrices in the codes of a GGUF file, read from it and packed.
#pragma once

#include <vector>

#include "outrider.h"
#include "packed.hpp"

namespace outrider {

// Rows of a file that follow each other in a matrix.
struct CodedRows {
    int file;             // its descriptor
    int type;             // ggml's number
    std::int64_t offset;  // of the first row, in bytes
    int rows;
    const std::int32_t* order;  // which of them comes when, or null
};

// Packs `parts` of one type, each of `in` inputs, one behind the other or, as a gate and what it
// gates, in units that take turns. The pool's threads read the file. Returns what is wrong, or
// null.
const char* pack_coded(Packed& to, const std::vector<CodedRows>& parts, const float* bias, int in,
                       bool turns);

}  // namespace outrider
