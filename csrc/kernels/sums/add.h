// Adds a matrix to sums, which torch's products cannot do through the stable ABI.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/stream.h"

namespace omniattn {

// CUDA launcher: sums (rows, cols) in the accumulator type += x (rows, cols) of `dtype`, with
// `stride` elements between the rows of x.
Status launch_add(DType dtype, const void* x, int64_t stride, int64_t rows, int64_t cols,
                  void* sums, Stream stream);

}  // namespace omniattn
