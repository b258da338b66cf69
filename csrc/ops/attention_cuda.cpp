// attention and attention_backward on CUDA.
#include "kernels/attention/attention_cuda.h"

#include "ops/attention.h"
#include "ops/cuda.h"

namespace {

void run_forward(AttentionForwardParams f) {
  require_launched("attention", launch_attention(f, stream()));
}

void run_backward(AttentionBackwardParams b) {
  const int64_t rows = query_rows(b.problem);
  const Tensor delta = empty_tensor({&rows, 1}, accumulator(b.problem.dtype));
  b.workspace = delta.mutable_data_ptr();
  require_launched("attention_backward", launch_attention_backward(b, stream()));
}

}  // namespace
