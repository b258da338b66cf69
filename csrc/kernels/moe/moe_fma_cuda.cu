// Grouped products by FMA in the compute type, see moe_cuda.h and moe_tile_cuda.h.
#include "kernels/moe/moe_tile_cuda.h"
#include "runtime/dispatch.h"
#include "runtime/gpu_gemm_fma.h"

namespace omniattn {
namespace {

template <class Params>
Status launch(DType dtype, const Params& p, Stream stream) {
  if (gpu::is_empty(p)) return nullptr;
  dispatch(dtype, [&]<class T>(T) { gpu::enqueue<gpu::GemmByFma<T>>(p, stream); });
  return gpu::launch_status();
}

template <class Params>
Status launch_product(const Params& p, Stream stream) {
  return launch(p.product.dtype, p, stream);
}
Status launch_weight_grad(const MoeWeightGrad& p, Stream stream) {
  return launch(p.dtype, p, stream);
}

}  // namespace

const MoeProductKernels kMoeFma{.block_rows = gpu::kFmaRows,
                                .up = launch_product<MoeUpProduct>,
                                .up_backward = launch_product<MoeUpBackwardProduct>,
                                .project = launch_product<MoeProjectProduct>,
                                .weight_grad = launch_weight_grad};

}  // namespace omniattn
