// causal_conv1d on CUDA.
#include "kernels/conv/conv_cuda.h"
#include "ops/conv.h"
#include "ops/cuda.h"

namespace omniattn::ops::conv {

void run_forward(const char* op, const CausalConvParams& p) {
  require_launched(op, launch_causal_conv(p, stream()));
}

void run_backward(const char* op, const CausalConvBackwardParams& p, void* dweight, void* dbias) {
  const CausalConv& c = p.conv;
  const DType sums = accumulator(c.dtype);
  const Tensor g = scratch(c.batch * c.steps * c.channels, sums);
  const int64_t shards = dweight || dbias ? causal_conv_shards(c) : 0;
  const Tensor partial = scratch(shards * (c.taps + 1) * c.channels, sums);
  const CausalConvScratch memory{g.mutable_data_ptr(), partial.mutable_data_ptr()};
  require_launched(op, launch_causal_conv_backward(p, memory, dweight, dbias, stream()));
}

}  // namespace omniattn::ops::conv
