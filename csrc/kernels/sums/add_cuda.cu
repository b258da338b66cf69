// Additions on CUDA, see add.h.
#include "kernels/sums/add.h"

#include "runtime/dispatch.h"
#include "runtime/gpu.h"
#include "semantics/arith.h"

namespace omniattn {
namespace {

constexpr int64_t kThreads = 256;
constexpr int64_t kMostBlocks = 1 << 16;

template <class T>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const T* x, int64_t stride, int64_t rows, int64_t cols, compute_t<T>* sums) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; i < rows * cols; i += step) sums[i] += gpu::widen(x[i / cols * stride + i % cols]);
}

}  // namespace

Status launch_add(DType dtype, const void* x, int64_t stride, int64_t rows, int64_t cols,
                  void* sums, Stream stream) {
  if (rows == 0 || cols == 0) return nullptr;
  dispatch(dtype, [&]<class T>(T) {
    const auto grid = static_cast<unsigned>(min(ceil_div(rows * cols, kThreads), kMostBlocks));
    GPU_LAUNCH(add_kernel<T>, grid, static_cast<unsigned>(kThreads), 0, stream,
               static_cast<const T*>(x), stride, rows, cols, static_cast<compute_t<T>*>(sums));
  });
  return gpu::launch_status();
}

}  // namespace omniattn
