// attention and attention_backward on CUDA.
#include "kernels/attention/attention_cuda.h"

#include "ops/attention.h"
#include "ops/cuda.h"

namespace {

void require_supported(const char* op, const AttentionProblem& p) {
  require(p.table.kind == TableKind::none && p.sinks == nullptr && p.head_scale == nullptr &&
              p.score.normaliser == Normaliser::softmax,
          op, "no CUDA kernel for table terms, sinks, head scales, sigmoid and relu2; ",
          "use backend=\"reference\"");
}

void run_forward(AttentionForwardParams f, const Sequences&) {
  const AttentionProblem& p = f.problem;
  require_supported("attention", p);
  Status status;
  if (takes_split_path(p)) {
    const int64_t elements = attention_decode_workspace(p);
    const Tensor workspace = empty_tensor({&elements, 1}, accumulator(p.dtype));
    f.workspace = workspace.mutable_data_ptr();
    status = launch_attention_decode(f, stream());
  } else if (takes_mma_path(p)) {
    status = launch_attention_mma(f, stream());
  } else {
    status = launch_attention(f, stream());
  }
  require_launched("attention", status);
}

void run_backward(AttentionBackwardParams b, const Sequences&) {
  constexpr const char* op = "attention_backward";
  require_supported(op, b.problem);
  const int64_t rows = query_rows(b.problem);
  const Tensor delta = empty_tensor({&rows, 1}, accumulator(b.problem.dtype));
  b.workspace = delta.mutable_data_ptr();
  require_launched(op, launch_attention_delta(b, stream()));
  require_launched(op, takes_mma_path(b) ? launch_attention_gradients_mma(b, stream())
                                         : launch_attention_gradients(b, stream()));
  if (b.grad_bias != nullptr) require_launched(op, launch_attention_bias_gradient(b, stream()));
}

}  // namespace
