// Backward on tensor cores, see attention_mma_cuda.h. As in attention_backward_fma_cuda.cu every
// gradient has one owner; P and dS are computed once for dQ and once for dK and dV.
#include "kernels/attention/attention_dkdv_mma_cuda.h"
#include "kernels/attention/attention_dq_mma_cuda.h"

namespace omniattn {

using namespace gpu;

bool takes_mma_path(const AttentionBackwardParams& params) {
  const AttentionProblem& p = params.problem;
  if (!takes_mma_path(p)) return false;
  int64_t shared_bytes = 0;
  dispatch_mma(p, [&]<class T, int kD>(T, Head<kD>) {
    shared_bytes = max(sizeof(DqShared<T, kD>), sizeof(DkdvShared<T, kD>));
  });
  return shared_bytes <= shared_memory_limit() && has_aligned_queries(p, params.grad_out);
}

Status launch_attention_gradients_mma(const AttentionBackwardParams& params, Stream stream) {
  const AttentionProblem& p = params.problem;
  const PlainScore score = plain_score(p);
  dispatch_mma(p, [&]<class T, int kD>(T, Head<kD>) {
    GPU_LAUNCH((attention_dq_mma_kernel<T, kD>), item_grid(dq_items<kD>(p)), Workers::kThreads,
               (sizeof(DqShared<T, kD>)), stream, params, score);
    if (p.tk == 0) return;
    GPU_LAUNCH((attention_dkdv_mma_kernel<T, kD>), item_grid(dkdv_items(p)), Workers::kThreads,
               (sizeof(DkdvShared<T, kD>)), stream, params, score);
  });
  return launch_status();
}

}  // namespace omniattn
