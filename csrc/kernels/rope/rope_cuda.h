// CUDA launcher of the rotary embedding, see rope.h.
#pragma once

#include "kernels/rope/rope.h"
#include "runtime/stream.h"

namespace omniattn {

// Tokens whose position has no row in the tables (of p.rows) become NaN: the host cannot look at
// positions without waiting for the GPU.
Status launch_rope(const RopeParams& p, int64_t batch, Stream stream);

}  // namespace omniattn
