// Sums over shards on CUDA, see sums.h.
#include "kernels/sums/sums.h"

#include "runtime/dispatch.h"
#include "runtime/gpu.h"
#include "semantics/arith.h"

namespace omniattn {
namespace {

constexpr unsigned kColumns = 32, kRows = 8;

template <class T>
__global__ void __launch_bounds__(kColumns* kRows)
    sum_shards_kernel(const compute_t<T>* partial, int64_t shards, int64_t stride, int64_t n,
                      T* out) {
  using C = compute_t<T>;
  GPU_SHARED(C, sums, kColumns * kRows);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  C sum = 0;
  if (i < n) {
    for (int64_t s = threadIdx.y; s < shards; s += kRows) sum += partial[s * stride + i];
  }
  sums[threadIdx.y * kColumns + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && i < n) {
    for (unsigned y = 1; y < kRows; ++y) sum += sums[y * kColumns + threadIdx.x];
    out[i] = gpu::narrow<T>(sum);
  }
}

}  // namespace

void launch_sum_shards(DType dtype, const void* partial, int64_t shards, int64_t stride, int64_t n,
                       void* out, Stream stream) {
  if (out == nullptr || n == 0) return;
  dispatch(dtype, [&]<class T>(T) {
    const auto grid = static_cast<unsigned>(ceil_div(n, kColumns));
    GPU_LAUNCH(sum_shards_kernel<T>, grid, dim3(kColumns, kRows), 0, stream,
               static_cast<const compute_t<T>*>(partial), shards, stride, n, static_cast<T*>(out));
  });
}

}  // namespace omniattn
