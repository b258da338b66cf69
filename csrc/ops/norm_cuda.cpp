// rms_norm and layer_norm on CUDA.
#include "kernels/norm/norm_cuda.h"
#include "ops/cuda.h"
#include "ops/norm.h"

namespace omniattn::ops::norm {

void run_forward(const char* op, const NormParams& p) {
  require_launched(op, launch_norm(p, stream()));
}

void run_backward(const char* op, const NormBackwardParams& p, void* dweight, void* dbias) {
  const int64_t width = (dweight ? p.cols : 0) + (dbias ? p.cols : 0);
  const int64_t shards = width > 0 ? norm_backward_shards(p) : 0;
  const Tensor partial = scratch(shards * width, accumulator(p.dtype));
  const NormWeightGradients weights{partial.mutable_data_ptr(), dweight, dbias};
  require_launched(op, launch_norm_backward(p, weights, stream()));
}

}  // namespace omniattn::ops::norm
