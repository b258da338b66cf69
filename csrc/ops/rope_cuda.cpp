// apply_rotary and qk_norm_rotary on CUDA.
#include "kernels/rope/rope_cuda.h"
#include "kernels/rope/norm_rope_cuda.h"
#include "ops/cuda.h"
#include "ops/rope.h"

namespace omniattn::ops::rope {

// The kernel checks them: reading them here would wait for the GPU.
void check_positions(const char*, const RopeParams&, int64_t) {}

void run(const char* op, const RopeParams& p, int64_t batch) {
  require_launched(op, launch_rope(p, batch, stream()));
}

void run_forward(const char* op, const NormRopeParams& p, int64_t batch) {
  require_launched(op, launch_norm_rope(p, batch, stream()));
}

void run_backward(const char* op, const NormRopeBackwardParams& p, int64_t batch, void* dweight) {
  const int64_t shards = dweight != nullptr ? norm_rope_backward_shards(p, batch) : 0;
  const Tensor partial = scratch(shards * p.rope.dim, accumulator(p.rope.dtype));
  void* const sums = dweight != nullptr ? partial.mutable_data_ptr() : nullptr;
  require_launched(op, launch_norm_rope_backward(p, batch, sums, dweight, stream()));
}

}  // namespace omniattn::ops::rope
