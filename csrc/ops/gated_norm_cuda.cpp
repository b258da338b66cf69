// gated_norm, gated_norm_backward on CUDA.
#include "kernels/norm/gated_norm_cuda.h"

#include "ops/cuda.h"
#include "ops/gated_norm.h"

namespace {

void run_forward(const GatedNormParams& p) {
  require_launched("gated_norm", launch_gated_norm(p, stream()));
}

void run_backward(const GatedNormBackwardParams& p, void* dweight, void* dbias) {
  const int64_t vectors = (dweight ? 1 : 0) + (dbias ? 1 : 0);
  const int64_t width = vectors * p.groups * p.cols;
  const int64_t partial_sizes[] = {width > 0 ? gated_norm_backward_shards(p) : 0, width};
  const Tensor partial = empty_tensor({partial_sizes, 2}, accumulator(p.dtype));
  const NormWeightGradients weights{partial.mutable_data_ptr(), dweight, dbias};
  require_launched("gated_norm_backward", launch_gated_norm_backward(p, weights, stream()));
}

}  // namespace
