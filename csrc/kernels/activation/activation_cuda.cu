// GLU family on CUDA, see activation.h: each thread takes 16 bytes of gate and up at a time.
#include "kernels/activation/activation.h"

#include "runtime/gpu_row.h"

namespace omniattn {
namespace {

using gpu::Pack;
using gpu::Width;

constexpr unsigned kThreads = 256;

// Calls f(row, column) for the Packs of this thread; the grid covers the columns and loops over the
// rows.
template <int W, class F>
__device__ __forceinline__ void for_packs(int64_t rows, int64_t cols, const F& f) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * W;
  if (i >= cols) return;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  for (; row < rows; row += step) f(row, i);
}

template <class T, int W>
__device__ __forceinline__ Pack<T, W> up_or_ones(const void* up, int64_t offset) {
  if (up != nullptr) return gpu::load_constant<W>(static_cast<const T*>(up) + offset);
  Pack<T, W> ones;
#pragma unroll
  for (int j = 0; j < W; ++j) ones.v[j] = gpu::narrow<T>(compute_t<T>(1));
  return ones;
}

template <class T, int W>
__global__ void __launch_bounds__(kThreads)
    glu_kernel(const __grid_constant__ GluParams p, int64_t rows) {
  const ClampedProduct<compute_t<T>> clamped(p.clamp);
  for_packs<W>(rows, p.cols, [&](int64_t row, int64_t i) {
    const auto gate = gpu::load_constant<W>(static_cast<const T*>(p.gate) + row * p.gate_row + i);
    const auto up = up_or_ones<T, W>(p.up, row * p.up_row + i);
    Pack<T, W> y;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      y.v[j] = gpu::narrow<T>(p.clamp.limit > 0 ? clamped(gate[j], up[j]).value
                                                : activate(p.act, gate[j]).value * up[j]);
    }
    gpu::store(static_cast<T*>(p.y) + row * p.y_row + i, y);
  });
}

template <class T, int W>
__global__ void __launch_bounds__(kThreads)
    glu_backward_kernel(const __grid_constant__ GluBackwardParams p, int64_t rows) {
  const ClampedProduct<compute_t<T>> clamped(p.clamp);
  for_packs<W>(rows, p.cols, [&](int64_t row, int64_t i) {
    const auto gy = gpu::load<W>(static_cast<const T*>(p.grad_y) + row * p.grad_y_row + i);
    const auto gate = gpu::load_constant<W>(static_cast<const T*>(p.gate) + row * p.gate_row + i);
    const auto up = up_or_ones<T, W>(p.up, row * p.up_row + i);
    Pack<T, W> dgate, dup;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      if (p.clamp.limit > 0) {
        const auto product = clamped(gate[j], up[j]);
        dgate.v[j] = gpu::narrow<T>(gy[j] * product.by_gate);
        dup.v[j] = gpu::narrow<T>(gy[j] * product.by_up);
        continue;
      }
      const auto act = activate(p.act, gate[j]);
      dgate.v[j] = gpu::narrow<T>(gy[j] * up[j] * act.slope);
      dup.v[j] = gpu::narrow<T>(gy[j] * act.value);
    }
    gpu::store(static_cast<T*>(p.dgate) + row * p.dgate_row + i, dgate);
    if (p.dup != nullptr) gpu::store(static_cast<T*>(p.dup) + row * p.dup_row + i, dup);
  });
}

struct Shape {
  dim3 grid, block;
};
Shape shape_of(int64_t rows, int64_t packs) {
  constexpr int64_t kMaxGridY = 0xffff;
  const dim3 block = packs > 32 ? dim3(kThreads) : dim3(32, kThreads / 32);
  const int64_t row_groups = (rows + block.y - 1) / block.y;
  return {dim3(static_cast<unsigned>((packs + block.x - 1) / block.x),
               static_cast<unsigned>(min(row_groups, kMaxGridY))),
          block};
}

}  // namespace

Status launch_glu(const GluParams& p, int64_t rows, Stream stream) {
  if (rows == 0 || p.cols == 0) return nullptr;
  const auto vectorised = [&]<class T, int W>(T, Width<W>) {
    return p.cols % W == 0 && p.gate_row % W == 0 && p.up_row % W == 0 && p.y_row % W == 0 &&
           gpu::aligned_16(p.gate) && gpu::aligned_16(p.up) && gpu::aligned_16(p.y);
  };
  gpu::dispatch_width(p.dtype, vectorised, [&]<class T, int W>(T, Width<W>) {
    const Shape shape = shape_of(rows, p.cols / W);
    GPU_LAUNCH((glu_kernel<T, W>), shape.grid, shape.block, 0, stream, p, rows);
  });
  return gpu::launch_status();
}

Status launch_glu_backward(const GluBackwardParams& p, int64_t rows, Stream stream) {
  if (rows == 0 || p.cols == 0) return nullptr;
  const auto vectorised = [&]<class T, int W>(T, Width<W>) {
    return p.cols % W == 0 && p.grad_y_row % W == 0 && p.gate_row % W == 0 && p.up_row % W == 0 &&
           p.dgate_row % W == 0 && p.dup_row % W == 0 && gpu::aligned_16(p.grad_y) &&
           gpu::aligned_16(p.gate) && gpu::aligned_16(p.up) && gpu::aligned_16(p.dgate) &&
           gpu::aligned_16(p.dup);
  };
  gpu::dispatch_width(p.dtype, vectorised, [&]<class T, int W>(T, Width<W>) {
    const Shape shape = shape_of(rows, p.cols / W);
    GPU_LAUNCH((glu_backward_kernel<T, W>), shape.grid, shape.block, 0, stream, p, rows);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
