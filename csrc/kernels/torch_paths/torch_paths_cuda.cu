// Boundaries of packed sequences for kernels of torch, which do not check them.
#include "kernels/attention/attention_tile_cuda.h"
#include "kernels/torch_paths/torch_paths.h"
#include "runtime/gpu_generation.h"

namespace omniattn {
namespace {

using namespace gpu;

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    boundaries_kernel(const __grid_constant__ AttentionProblem p, int32_t* to) {
  const int64_t n = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (n >= p.batch) return;
  const Sequence s = sequence_of(p, n);
  if (n == 0) to[0] = 0;
  to[n + 1] = static_cast<int32_t>(s.q + s.tq);
}

}  // namespace

int64_t gpu_generation() { return generation(); }

Status launch_boundaries(const AttentionProblem& p, int32_t* to, Stream stream) {
  GPU_LAUNCH(boundaries_kernel, static_cast<unsigned>(ceil_div(p.batch, kThreads)), kThreads, 0,
             stream, p, to);
  return launch_status();
}

}  // namespace omniattn
