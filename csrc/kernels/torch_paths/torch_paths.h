// Helpers of paths that call kernels of torch.
#pragma once

#include "kernels/attention/attention_problem.h"
#include "runtime/stream.h"

namespace omniattn {

// Major number of the compute capability of the current GPU.
int64_t gpu_generation();

// Checks the boundaries of packed sequences, which q, k and v share, and copies them to `to` (N +
// 1,).
Status launch_boundaries(const AttentionProblem& p, int32_t* to, Stream stream);

}  // namespace omniattn
