// CUDA launchers of the gated and grouped normalisation, see gated_norm.h.
#pragma once

#include "kernels/norm/gated_norm.h"
#include "kernels/norm/norm_cuda.h"

namespace omniattn {

Status launch_gated_norm(const GatedNormParams& p, Stream stream);

// Partial sums of dweight and dbias that the backward keeps; depends on the shape only.
int64_t gated_norm_backward_shards(const GatedNormBackwardParams& p);
// weights.dweight, weights.dbias: (groups * cols) or null.
Status launch_gated_norm_backward(const GatedNormBackwardParams& p,
                                  const NormWeightGradients& weights, Stream stream);

}  // namespace omniattn
