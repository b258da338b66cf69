// Gated and grouped normalisation on CUDA, see gated_norm.h. A warp or a block owns a group of a
// row and reads it again in each sweep: groups are short, so later reads hit the caches.
#include "kernels/norm/gated_norm.h"

#include "kernels/norm/rounded_cuda.h"
#include "runtime/gpu_row.h"

namespace omniattn {
namespace {

using gpu::Pack;
using gpu::Width;

constexpr unsigned kThreads = 256;
// Packs of column sums kept in registers. With more, ptxas spilled or used over
// 200 registers at W of 8 and 1.
template <int W>
constexpr int kColumnsKept = W == 8 || W == 1 ? 2 : 4;
// Same limits as the other norms, see norm_cuda.cu.
constexpr int64_t kMaxShards = 512, kShardRows = 8;

// Loads pack i of a vector with one element per column; fills it with `otherwise` if p is null.
template <int W, class T>
__device__ __forceinline__ void load_vector(const T* p, int64_t i, compute_t<T> otherwise,
                                            compute_t<T> (&out)[W]) {
  Pack<T, W> pack;
  if (p != nullptr) pack = gpu::load_constant<W>(p + i);
#pragma unroll
  for (int j = 0; j < W; ++j) out[j] = p != nullptr ? pack[j] : otherwise;
}

// act(z) and act'(z) of the two gates; all activations would need too many registers.
template <class C>
__device__ __forceinline__ ValueAndSlope<C> gate_of(Activation act, C z) {
  const C s = C(1) / (C(1) + exp(-z)), slope = s * (C(1) - s);
  return act == Activation::silu ? ValueAndSlope<C>{z * s, s + z * slope}
                                 : ValueAndSlope<C>{s, slope};
}

template <class T>
__device__ __forceinline__ const T* offset_or_null(const void* p, int64_t offset) {
  return p != nullptr ? static_cast<const T*>(p) + offset : nullptr;
}

template <class T, int W>
__global__ void __launch_bounds__(kThreads)
    gated_norm_forward_kernel(const __grid_constant__ GatedNormParams p) {
  using C = compute_t<T>;
  const int64_t n = p.cols;
  const C inverse_n = C(1) / static_cast<C>(n > 0 ? n : 1);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t item = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; item < p.rows * p.groups; item += step) {
    const int64_t row = item / p.groups, first = (item - row * p.groups) * n;
    const T* const x = static_cast<const T*>(p.x) + row * p.x_stride + first;
    const T* const z = offset_or_null<T>(p.z, row * p.z_stride + first);
    const T* const weight = offset_or_null<T>(p.weight, first);
    const T* const bias = offset_or_null<T>(p.bias, first);
    // Loads the values to normalise, and the factor of the result.
    const auto load = [&](int64_t i, C(&v)[W], C(&factor)[W]) {
      load_vector<W>(x, i, C(0), v);
      load_vector<W>(z, i, C(0), factor);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const C act = z != nullptr ? gate_of(p.act, factor[j]).value : C(1);
        v[j] *= p.place == GatePlace::before ? act : C(1);
        factor[j] = p.place == GatePlace::after ? act : C(1);
      }
    };
    C v[W], factor[W];
    C mean = 0, variance = 0;
    if (p.center) {
      gpu::sweep_row<W, 0>(n, [&](int64_t i, int) {
        load(i, v, factor);
#pragma unroll
        for (int j = 0; j < W; ++j) mean += v[j];
      });
      mean = gpu::row_sum(mean) * inverse_n;
    }
    gpu::sweep_row<W, 0>(n, [&](int64_t i, int) {
      load(i, v, factor);
#pragma unroll
      for (int j = 0; j < W; ++j) variance += (v[j] - mean) * (v[j] - mean);
    });
    variance = gpu::row_sum(variance) * inverse_n;
    const C rstd = C(1) / sqrt(variance + static_cast<C>(p.eps));
    gpu::sweep_row<W, 0>(n, [&](int64_t i, int) {
      C w[W], b[W];
      load(i, v, factor);
      load_vector<W>(weight, i, C(1), w);
      load_vector<W>(bias, i, C(0), b);
      Pack<T, W> out;
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const C normed = rounded_if<T>(p.cast_first, (v[j] - mean) * rstd) * w[j] + b[j];
        out.v[j] = gpu::narrow<T>(rounded_if<T>(p.cast_first, normed) * factor[j]);
      }
      gpu::store(static_cast<T*>(p.y) + item * n + i, out);
    });
    if (threadIdx.x == 0 && p.stats != nullptr) {
      C* const stats = static_cast<C*>(p.stats) + item * 2;
      stats[0] = mean;
      stats[1] = rstd;
    }
  }
}

// The formulas are in gated_norm_cpu.cpp. blockIdx.x is the group, since there may be more groups
// than gridDim.y allows. Shard s has the rows s, s + shards, ...
template <class T, int W>
__global__ void __launch_bounds__(kThreads)
    gated_norm_backward_kernel(const __grid_constant__ GatedNormBackwardParams p,
                               compute_t<T>* dweight, compute_t<T>* dbias, int64_t partial_stride) {
  using C = compute_t<T>;
  constexpr int kKept = kColumnsKept<W>;
  const int64_t n = p.cols, group = blockIdx.x, first = group * n;
  const C inverse_n = C(1) / static_cast<C>(n > 0 ? n : 1);
  const int64_t shard = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  const int64_t shards = static_cast<int64_t>(gridDim.y) * blockDim.y;
  const auto sums_of = [&](C* partial) {
    return gpu::ColumnSums<C, W, kKept>{
        partial != nullptr ? partial + shard * partial_stride + first : nullptr};
  };
  auto dw = sums_of(dweight), db = sums_of(dbias);
  const T* const weight = offset_or_null<T>(p.weight, first);
  const T* const bias = offset_or_null<T>(p.bias, first);

  for (int64_t row = shard; row < p.rows; row += shards) {
    const int64_t item = row * p.groups + group;
    const T* const gy = static_cast<const T*>(p.grad_y) + row * p.grad_y_stride + first;
    const T* const x = static_cast<const T*>(p.x) + row * p.x_stride + first;
    const T* const z = offset_or_null<T>(p.z, row * p.z_stride + first);
    const C mean = static_cast<const C*>(p.stats)[item * 2];
    const C rstd = static_cast<const C*>(p.stats)[item * 2 + 1];
    // Loads g, xh, weight, and act(z) with its slope.
    const auto load = [&](int64_t i, C(&g)[W], C(&xh)[W], C(&w)[W], C(&act)[W], C(&slope)[W]) {
      C gate[W];
      load_vector<W>(gy, i, C(0), g);
      load_vector<W>(x, i, C(0), xh);
      load_vector<W>(weight, i, C(1), w);
      load_vector<W>(z, i, C(0), gate);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const auto both = gate_of(p.act, gate[j]);
        act[j] = z != nullptr ? both.value : C(1);
        slope[j] = both.slope;
        g[j] *= p.place == GatePlace::after ? act[j] : C(1);
        xh[j] = (xh[j] * (p.place == GatePlace::before ? act[j] : C(1)) - mean) * rstd;
      }
    };
    C g[W], xh[W], w[W], act[W], act_slope[W];
    C slope = 0, shift = 0;
    gpu::sweep_row<W, kKept>(n, [&](int64_t i, int k) {
      load(i, g, xh, w, act, act_slope);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        dw.add(i, k, j, g[j] * xh[j], row == shard);
        db.add(i, k, j, g[j], row == shard);
        slope += g[j] * w[j] * xh[j];
        shift += g[j] * w[j];
      }
    });
    slope = gpu::row_sum(slope) * inverse_n;
    shift = p.center ? gpu::row_sum(shift) * inverse_n : C(0);
    gpu::sweep_row<W, 0>(n, [&](int64_t i, int) {
      C b[W], from_x[W], from_y[W];
      load(i, g, xh, w, act, act_slope);
      load_vector<W>(bias, i, C(0), b);
      load_vector<W>(x, i, C(0), from_x);
      load_vector<W>(gy, i, C(0), from_y);
      Pack<T, W> dx, dz;
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const C dv = (g[j] * w[j] - shift - xh[j] * slope) * rstd;
        const bool before = p.place == GatePlace::before;
        dx.v[j] = gpu::narrow<T>(before ? dv * act[j] : dv);
        const C to_gate = before ? dv * from_x[j] : from_y[j] * (xh[j] * w[j] + b[j]);
        dz.v[j] = gpu::narrow<T>(to_gate * act_slope[j]);
      }
      gpu::store(static_cast<T*>(p.dx) + item * n + i, dx);
      if (z != nullptr) gpu::store(static_cast<T*>(p.dz) + item * n + i, dz);
    });
  }
  gpu::sweep_row<W, kKept>(n, [&](int64_t i, int k) {
    dw.store(i, k);
    db.store(i, k);
  });
}

template <class P, class F>
void dispatch_group(const P& p, bool aligned, int64_t strides, const F& f) {
  gpu::dispatch_width(
      p.dtype,
      [&]<class T, int W>(T, Width<W>) {
        return aligned && strides % W == 0 && p.cols % W == 0 && p.x_stride % W == 0 &&
               p.z_stride % W == 0 && gpu::aligned_16(p.x) && gpu::aligned_16(p.z) &&
               gpu::aligned_16(p.weight) && gpu::aligned_16(p.bias);
      },
      f);
}

template <class F>
void dispatch_backward(const GatedNormBackwardParams& p, const F& f) {
  dispatch_group(p, gpu::aligned_16(p.grad_y), p.grad_y_stride, f);
}

template <int W>
dim3 group_block(int64_t cols) {
  return gpu::row_block(cols / W, kColumnsKept<W>, kThreads);
}

}  // namespace

Status launch_gated_norm(const GatedNormParams& p, Stream stream) {
  if (p.rows * p.groups == 0) return nullptr;
  dispatch_group(p, true, 0, [&]<class T, int W>(T, Width<W>) {
    const dim3 block = group_block<W>(p.cols);
    GPU_LAUNCH((gated_norm_forward_kernel<T, W>), gpu::row_grid(p.rows * p.groups, block), block, 0,
               stream, p);
  });
  return gpu::launch_status();
}

int64_t gated_norm_backward_shards(const GatedNormBackwardParams& p) {
  int64_t shards = 0;
  dispatch_backward(p, [&]<class T, int W>(T, Width<W>) {
    const dim3 block = group_block<W>(p.cols);
    const int64_t wanted = (p.rows + kShardRows - 1) / kShardRows;
    shards = gpu::row_grid(min(wanted, kMaxShards), block) * static_cast<int64_t>(block.y);
  });
  return shards;
}

Status launch_gated_norm_backward(const GatedNormBackwardParams& p, const WeightGradients& weights,
                                  Stream stream) {
  const int64_t shards = gated_norm_backward_shards(p), width = p.groups * p.cols;
  const bool both = weights.dweight != nullptr && weights.dbias != nullptr;
  const int64_t stride = both ? 2 * width : width;
  dispatch_backward(p, [&]<class T, int W>(T, Width<W>) {
    using C = compute_t<T>;
    C* const partial = static_cast<C*>(weights.partial);
    C* const dw = weights.dweight != nullptr ? partial : nullptr;
    C* const db = weights.dbias != nullptr ? partial + (both ? width : 0) : nullptr;
    const dim3 block = group_block<W>(p.cols);
    if (shards > 0) {
      const dim3 grid(static_cast<unsigned>(p.groups), static_cast<unsigned>(shards / block.y));
      GPU_LAUNCH((gated_norm_backward_kernel<T, W>), grid, block, 0, stream, p, dw, db, stride);
    }
    launch_sum_shards(p.dtype, dw, shards, stride, width, weights.dweight, stream);
    launch_sum_shards(p.dtype, db, shards, stride, width, weights.dbias, stream);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
