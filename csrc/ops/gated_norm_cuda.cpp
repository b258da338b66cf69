// rms_norm_gated and group_norm on CUDA.
#include "kernels/norm/gated_norm_cuda.h"
#include "ops/cuda.h"
#include "ops/gated_norm.h"

namespace omniattn::ops::gated_norm {

void run_forward(const char* op, const GatedNormParams& p) {
  require_launched(op, launch_gated_norm(p, stream()));
}

void run_backward(const char* op, const GatedNormBackwardParams& p, void* dweight, void* dbias) {
  const int64_t vectors = (dweight ? 1 : 0) + (dbias ? 1 : 0);
  const int64_t width = vectors * p.groups * p.cols;
  const int64_t shards = width > 0 ? gated_norm_backward_shards(p) : 0;
  const Tensor partial = scratch(shards * width, accumulator(p.dtype));
  const NormWeightGradients weights{partial.mutable_data_ptr(), dweight, dbias};
  require_launched(op, launch_gated_norm_backward(p, weights, stream()));
}

}  // namespace omniattn::ops::gated_norm
