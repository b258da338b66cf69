// norm, add_norm, norm_backward on CUDA.
#include "kernels/norm/norm_cuda.h"

#include "ops/cuda.h"
#include "ops/norm.h"

namespace {

void run_forward(const NormParams& p) { require_launched("norm", launch_norm(p, stream())); }

void run_backward(const NormBackwardParams& p, void* dweight, void* dbias) {
  const int64_t width = (dweight ? p.cols : 0) + (dbias ? p.cols : 0);
  const int64_t partial_sizes[] = {width > 0 ? norm_backward_shards(p) : 0, width};
  const Tensor partial = empty_tensor({partial_sizes, 2}, accumulator(p.dtype));
  const NormWeightGradients weights{partial.mutable_data_ptr(), dweight, dbias};
  require_launched("norm_backward", launch_norm_backward(p, weights, stream()));
}

}  // namespace
