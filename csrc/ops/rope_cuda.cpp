// rope, rope_, norm_rope on CUDA.
#include "kernels/rope/rope_cuda.h"
#include "kernels/rope/norm_rope_cuda.h"

#include "ops/cuda.h"
#include "ops/norm_rope.h"

namespace {

// The kernel checks them: reading them here would wait for the GPU.
void check_positions(const char*, const RopeParams&, int64_t) {}

void run(const RopeParams& p, int64_t batch) {
  require_launched("rope", launch_rope(p, batch, stream()));
}

void run_forward(const NormRopeParams& p, int64_t batch) {
  require_launched("norm_rope", launch_norm_rope(p, batch, stream()));
}

void run_backward(const NormRopeBackwardParams& p, int64_t batch, void* dweight) {
  const DType acc = accumulator(p.rope.dtype);
  const int64_t shards = norm_rope_backward_shards(p, batch);
  const int64_t sizes[] = {dweight != nullptr ? shards : 0, p.rope.dim};
  const Tensor partial = empty_tensor({sizes, 2}, acc);
  void* const sums = dweight != nullptr ? partial.mutable_data_ptr() : nullptr;
  require_launched("norm_rope_backward",
                   launch_norm_rope_backward(p, batch, sums, dweight, stream()));
}

}  // namespace
