// CUDA launcher of top_k, see topk.h.
#pragma once

#include "kernels/topk/topk.h"
#include "runtime/stream.h"

namespace omniattn {

Status launch_top_k(const TopKParams& p, int64_t rows, Stream stream);

}  // namespace omniattn
