// CUDA launchers of the row normalisations, see norm.h.
#pragma once

#include "kernels/norm/norm.h"
#include "runtime/stream.h"

namespace omniattn {

Status launch_norm(const NormParams& p, Stream stream);

// Partial sums of dweight and dbias that the backward keeps; depends on the shape only.
int64_t norm_backward_shards(const NormBackwardParams& p);

struct NormWeightGradients {
  void* partial;          // (shards, width) in the accumulator type; width: of those not null
  void *dweight, *dbias;  // (cols) or null
};

Status launch_norm_backward(const NormBackwardParams& p, const NormWeightGradients& weights,
                            Stream stream);

// out (cols) in `dtype` = sum over shards of partial (shards, cols) in the accumulator type,
// `stride` between shards, in an order that is always the same; nothing where out is null.
void launch_sum_shards(DType dtype, const void* partial, int64_t shards, int64_t stride,
                       int64_t cols, void* out, Stream stream);

}  // namespace omniattn
