// Steps around the grouped products of the mixture of experts where torch multiplies: gathered
// rows, biases, activations, see moe_cuda.h and moe_tile_cuda.h.
#include "kernels/moe/moe_tile_cuda.h"

namespace omniattn {
namespace gpu {

// Loads the product of a tile, which takes the place of the left operand.
template <class T>
struct GemmFinished {
  using Element = T;
  using C = compute_t<T>;
  static constexpr int kRows = 64, kWidth = 8, kBlocksPerSM = 3;

  struct Shared {
    C sums[kRows * kGemmStride];
  };

  static __device__ __forceinline__ void multiply(const BlockRows<T>& product,
                                                  const MatrixColumns<T>& matrix, int64_t, int rows,
                                                  Shared& shared) {
    const TileColumns& columns = matrix.columns;
    for_row_parts<kWidth>(rows, kGemmColumns, kGemmColumns / kWidth, [&](int r, int c) {
      if (!columns.has(c)) return;
      const auto from = load<kWidth>(product.row(product.first + r) + columns[c]);
      C* const to = shared.sums + r * kGemmStride + c;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) to[j] = from[j];
    });
    __syncthreads();
  }
};

constexpr int kGatherThreads = 128;

template <class T>
__global__ void __launch_bounds__(kGatherThreads)
    moe_gather_kernel(const __grid_constant__ MoeRouting r, const __grid_constant__ MoeRows from,
                      int64_t cols, T* to) {
  constexpr int W = 8;
  const RowView<T> rows(from);
  for (int64_t row = blockIdx.x; row < r.offsets[r.experts]; row += gridDim.x) {
    const T* const x = rows.row(row);
    for (int64_t c = static_cast<int64_t>(threadIdx.x) * W; c < cols; c += kGatherThreads * W) {
      store(to + row * cols + c, load<W>(x + c));
    }
  }
}

// Calls f(T{}) with a 16-bit dtype.
template <class F>
void dispatch_16_bits(DType dtype, const F& f) {
  if (dtype == DType::bf16) {
    f(bf16{});
  } else {
    f(f16{});
  }
}

}  // namespace gpu

namespace {

template <class Params>
Status launch(const Params& p, Stream stream) {
  if (gpu::is_empty(p)) return nullptr;
  gpu::dispatch_16_bits(p.product.dtype,
                        [&]<class T>(T) { gpu::enqueue<gpu::GemmFinished<T>>(p, stream); });
  return gpu::launch_status();
}

Status launch_weight_grad(const MoeWeightGrad& p, Stream stream) {
  return kMoeMma.weight_grad(p, stream);
}

}  // namespace

Status launch_moe_gather(DType dtype, const MoeRouting& r, const MoeRows& from, int64_t cols,
                         void* to, Stream stream) {
  if (r.pairs() * cols == 0) return nullptr;
  gpu::dispatch_16_bits(dtype, [&]<class T>(T) {
    GPU_LAUNCH((gpu::moe_gather_kernel<T>), gpu::tile_grid(r.pairs()), gpu::kGatherThreads, 0,
               stream, r, from, cols, static_cast<T*>(to));
  });
  return gpu::launch_status();
}

const MoeProductKernels kMoeFinished{.block_rows = gpu::GemmFinished<bf16>::kRows,
                                     .up = launch<MoeUpProduct>,
                                     .up_backward = launch<MoeUpBackwardProduct>,
                                     .project = launch<MoeProjectProduct>,
                                     .weight_grad = launch_weight_grad};

}  // namespace omniattn
