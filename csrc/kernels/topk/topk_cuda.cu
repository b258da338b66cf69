// top_k on CUDA, see topk.h. The elements of a row are totally ordered, so the next element is
// the largest one after the last: a warp, or a block for long rows, passes k times over the
// row, which stays in the L1 cache.
#include "kernels/topk/topk.h"

#include "runtime/gpu_row.h"

namespace omniattn {
namespace {

constexpr unsigned kThreads = 256;
// Up to this many elements per lane and pass, one warp takes a row; longer rows get a block.
constexpr int kPerLane = 32;

// Maps scores to integers in the same order: -0 equals +0, NaN is less than -inf.
__device__ __forceinline__ uint32_t order_of(float x) {
  const auto bits = __builtin_bit_cast(uint32_t, x + 0.0f);
  return x != x ? 0 : bits >> 31 ? ~bits : bits | 1u << 31;
}
__device__ __forceinline__ uint64_t order_of(double x) {
  const auto bits = __builtin_bit_cast(uint64_t, x + 0.0);
  return x != x ? 0 : bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
}

template <class Order>
struct Candidate {
  Order order;
  int64_t index;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    top_k_kernel(const __grid_constant__ TopKParams p, int64_t rows) {
  using Order = decltype(order_of(compute_t<T>{}));
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  // All warps of a block do the same number of iterations: row_reduce may synchronise the block.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < rows; first += step) {
    const int64_t row = first + threadIdx.y;
    const bool there = row < rows;
    const T* const scores = static_cast<const T*>(p.scores) + (there ? row : 0) * p.scores_stride;
    const uint8_t* const mask =
        p.mask != nullptr ? p.mask + (there ? row : 0) * p.mask_stride : nullptr;
    Candidate<Order> last{~Order{0}, -1};
    for (int64_t place = 0; place < p.k; ++place) {
      Candidate<Order> best{0, p.n};
      for (int64_t i = threadIdx.x; i < p.n; i += blockDim.x) {
        if (mask != nullptr && mask[i] == 0) continue;
        const Order order = order_of(gpu::widen(scores[i]));
        const bool behind = order < last.order || (order == last.order && i > last.index);
        if (behind && (best.index == p.n || order > best.order)) best = {order, i};
      }
      const Order highest =
          gpu::row_reduce(best.order, Order{0}, [](Order a, Order b) { return max(a, b); });
      const int64_t index = gpu::row_reduce(best.order == highest ? best.index : p.n, p.n,
                                            [](int64_t a, int64_t b) { return min(a, b); });
      last = {highest, index};
      if (there && threadIdx.x == 0) p.index[row * p.k + place] = index < p.n ? index : -1;
    }
  }
}

}  // namespace

Status launch_top_k(const TopKParams& p, int64_t rows, Stream stream) {
  if (rows * p.k == 0) return nullptr;
  dispatch(p.dtype, [&]<class T>(T) {
    const dim3 block = gpu::row_block(p.n, kPerLane, kThreads);
    GPU_LAUNCH((top_k_kernel<T>), gpu::row_grid(rows, block), block, 0, stream, p, rows);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
