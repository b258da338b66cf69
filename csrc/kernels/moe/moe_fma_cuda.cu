// Grouped products by FMA in the compute type, see moe_cuda.h and moe_tile_cuda.h: tiles of 64 x
// 128, of which a thread computes 4 x 8 numbers.
#include "kernels/moe/moe_tile_cuda.h"
#include "runtime/dispatch.h"
#include "runtime/gpu_fma.h"

namespace omniattn {
namespace gpu {

template <class T>
struct MoeFmaEngine {
  using Element = T;
  using C = compute_t<T>;
  static constexpr int kRows = kFmaRows, kWidth = 1, kBlocksPerSM = 1;
  static_assert(kMoeThreads == kFmaThreads);

  struct Stage {
    C a[kDepth * kLeading], b[kDepth * kMoeTileStride];
  };
  union Shared {
    Stage stage;
    C sums[kRows * kMoeTileStride];
  };

  // to[c][i] = element k + c of index i. Threads follow the elements' order in memory.
  template <int kCount, class Operand>
  static __device__ __forceinline__ void load_stage(const Operand& from, int64_t k, C* to,
                                                    int stride) {
    const bool along_k = from.along_k();
#pragma unroll
    for (int n = 0; n < kCount * kDepth / kMoeThreads; ++n) {
      const int at = static_cast<int>(threadIdx.x) + n * kMoeThreads;
      const int i = along_k ? at / kDepth : at % kCount;
      const int c = along_k ? at % kDepth : at / kCount;
      to[c * stride + i] = from.has(i, k + c) ? gpu::widen(*from.at(i, k + c)) : C(0);
    }
  }

  template <class A, class B>
  static __device__ __forceinline__ void multiply(const A& a, const B& b, int64_t k, int rows,
                                                  Shared& shared) {
    constexpr int kColumns = kMoeTileColumns / 16;
    const int x = thread_x(), y = thread_y();
    C acc[4][kColumns];
    clear(acc);
    for (int64_t from = 0; from < k; from += kDepth) {
      load_stage<kRows>(a, from, shared.stage.a, kLeading);
      load_stage<kMoeTileColumns>(b, from, shared.stage.b, kMoeTileStride);
      __syncthreads();
      if (4 * y < rows) multiply_staged(shared.stage.a, shared.stage.b, kMoeTileStride, acc);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        shared.sums[(4 * y + i) * kMoeTileStride + x + 16 * j] = acc[i][j];
      }
    }
    __syncthreads();
  }
};

}  // namespace gpu

namespace {

template <class Params>
Status launch(DType dtype, const Params& p, Stream stream) {
  if (gpu::is_empty(p)) return nullptr;
  dispatch(dtype, [&]<class T>(T) { gpu::enqueue<gpu::MoeFmaEngine<T>>(p, stream); });
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
