// Grouped products by tensor cores, see moe_cuda.h and moe_tile_cuda.h.
#include "kernels/moe/moe_tile_cuda.h"
#include "runtime/gpu_gemm_mma.h"

namespace omniattn {
namespace gpu {

template <bool kAAlongK, bool kBAlongK, class Params>
void enqueue_mma(DType dtype, const Params& p, Stream stream) {
  if (dtype == DType::bf16) {
    enqueue<GemmByMma<bf16, kAAlongK, kBAlongK>>(p, stream);
  } else {
    enqueue<GemmByMma<f16, kAAlongK, kBAlongK>>(p, stream);
  }
}

}  // namespace gpu

namespace {

template <class Params>
Status launch(const Params& p, Stream stream) {
  if (gpu::is_empty(p)) return nullptr;
  if (p.product.b.k_stride == 1) {
    gpu::enqueue_mma<true, true>(p.product.dtype, p, stream);
  } else {
    gpu::enqueue_mma<true, false>(p.product.dtype, p, stream);
  }
  return gpu::launch_status();
}

Status launch_weight_grad(const MoeWeightGrad& p, Stream stream) {
  if (gpu::is_empty(p)) return nullptr;
  gpu::enqueue_mma<false, false>(p.dtype, p, stream);
  return gpu::launch_status();
}

}  // namespace

const MoeProductKernels kMoeMma{.block_rows = 128,
                                .up = launch<MoeUpProduct>,
                                .up_backward = launch<MoeUpBackwardProduct>,
                                .project = launch<MoeProjectProduct>,
                                .weight_grad = launch_weight_grad};

}  // namespace omniattn
