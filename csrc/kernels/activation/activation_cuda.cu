// GLU family on CUDA, see activation.h: each thread takes 16 bytes of gate and up, of one row after
// another.
#include "kernels/activation/activation_cuda.h"

#include "runtime/gpu_row.h"

namespace omniattn {
namespace {

using gpu::Pack;
using gpu::Width;

constexpr unsigned kThreads = 256;

template <class C>
struct ValueAndSlope {
  C value, slope;
};

// act(x) and act'(x); the compiler drops the slope where only the value is used.
template <class C>
__device__ __forceinline__ ValueAndSlope<C> activate(Activation act, C x) {
  switch (act) {
    case Activation::identity:
      return {x, C(1)};
    case Activation::relu:
      return {x > C(0) || x != x ? x : C(0), x > C(0) ? C(1) : C(0)};
    case Activation::silu: {
      const C s = C(1) / (C(1) + exp(-x));
      return {x * s, s + x * s * (C(1) - s)};
    }
    case Activation::gelu: {
      constexpr auto kInvSqrt2 = static_cast<C>(0.70710678118654752440);
      constexpr auto kInvSqrt2Pi = static_cast<C>(0.39894228040143267794);
      // erfc keeps the digits of the left tail.
      const C below = C(0.5) * erfc(-x * kInvSqrt2);
      return {x * below, below + x * kInvSqrt2Pi * exp(x * x * C(-0.5))};
    }
    case Activation::gelu_tanh: {
      constexpr auto kScale = static_cast<C>(0.79788456080286535588);  // sqrt(2 / pi)
      constexpr auto kCubic = static_cast<C>(0.044715);
      const C t = tanh(kScale * x * (C(1) + kCubic * x * x));
      const C below = C(0.5) * (C(1) + t);
      const C inner = kScale * (C(1) + 3 * kCubic * x * x);
      return {x * below, below + C(0.5) * x * (C(1) - t * t) * inner};
    }
  }
  return {x, C(1)};
}

// f(row, column) for the Packs of this thread; the grid covers the columns and steps over the rows.
template <int W, class F>
__device__ __forceinline__ void for_packs(int64_t rows, int64_t cols, const F& f) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * W;
  if (i >= cols) return;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  for (; row < rows; row += step) f(row, i);
}

template <class T, int W>
__global__ void __launch_bounds__(kThreads)
    glu_kernel(const __grid_constant__ GluParams p, int64_t rows) {
  for_packs<W>(rows, p.cols, [&](int64_t row, int64_t i) {
    const auto gate = gpu::load_constant<W>(static_cast<const T*>(p.gate) + row * p.gate_row + i);
    const auto up = gpu::load_constant<W>(static_cast<const T*>(p.up) + row * p.up_row + i);
    Pack<T, W> y;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      y.v[j] = gpu::narrow<T>(activate(p.act, gate[j]).value * up[j]);
    }
    gpu::store(static_cast<T*>(p.y) + row * p.y_row + i, y);
  });
}

template <class T, int W>
__global__ void __launch_bounds__(kThreads)
    glu_backward_kernel(const __grid_constant__ GluBackwardParams p, int64_t rows) {
  for_packs<W>(rows, p.cols, [&](int64_t row, int64_t i) {
    const auto gy = gpu::load_constant<W>(static_cast<const T*>(p.grad_y) + row * p.grad_y_row + i);
    const auto gate = gpu::load_constant<W>(static_cast<const T*>(p.gate) + row * p.gate_row + i);
    const auto up = gpu::load_constant<W>(static_cast<const T*>(p.up) + row * p.up_row + i);
    Pack<T, W> dgate, dup;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const auto act = activate(p.act, gate[j]);
      dgate.v[j] = gpu::narrow<T>(gy[j] * up[j] * act.slope);
      dup.v[j] = gpu::narrow<T>(gy[j] * act.value);
    }
    gpu::store(static_cast<T*>(p.dgate) + row * p.dgate_row + i, dgate);
    gpu::store(static_cast<T*>(p.dup) + row * p.dup_row + i, dup);
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
