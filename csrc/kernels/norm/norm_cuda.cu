// Row normalisation on CUDA, see norm.h. Each row is read once and kept in registers
// between its sweeps; the part of a row that exceeds a block's registers is read again.
// Weight gradients take two stages without atomics: each block sums over its rows, then the
// blocks' sums are added in order.
#include "kernels/norm/norm.h"

#include "kernels/norm/rounded_cuda.h"
#include "kernels/norm/stream.h"
#include "runtime/gpu_row.h"

namespace omniattn {
namespace {

using gpu::Pack;

constexpr unsigned kThreads = 512;  // at most: 128 registers each, which hold the rows
// More blocks fill more of the GPU, but each leaves a row of sums for the second stage to
// read. 512 blocks are 3 to 4 per SM of current large GPUs. At least kShardRows rows per
// block keep this second read small.
constexpr int64_t kMaxShards = 512, kShardRows = 8;

// Packs per thread kept in registers.
constexpr int kForwardKept = 4;
template <int W>
constexpr int kBackwardKept = W == 8 ? 2 : 4;

// weight + offset, or 1 if there is no weight.
template <class T, int W>
struct Scale {
  const T* weight;
  compute_t<T> offset;

  __device__ __forceinline__ void load(int64_t i, compute_t<T> (&scale)[W]) const {
    if (weight == nullptr) {
#pragma unroll
      for (int j = 0; j < W; ++j) scale[j] = 1;
    } else {
      const Pack<T, W> w = gpu::load_constant<W>(weight + i);
#pragma unroll
      for (int j = 0; j < W; ++j) scale[j] = w[j] + offset;
    }
  }
};

template <class T, class H, int W>
__global__ void __launch_bounds__(kThreads)
    norm_forward_kernel(const __grid_constant__ NormParams p) {
  using C = compute_t<T>;
  constexpr int kKept = kForwardKept;
  const int64_t n = p.cols;
  const C inverse_n = C(1) / static_cast<C>(n > 0 ? n : 1);
  const Scale<T, W> scale{static_cast<const T*>(p.weight), static_cast<C>(p.offset)};
  const T* const bias = static_cast<const T*>(p.bias);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;

  for (int64_t row = first; row < p.rows; row += step) {
    const T* const x = static_cast<const T*>(p.x) + row * p.x_stride;
    T* const y = static_cast<T*>(p.y) + row * n;
    // The first sweep leaves the rounded h in `kept`, and beyond that in memory.
    Pack<H, W> kept[kKept];
    const H* h;
    if (p.residual != nullptr) {
      const H* const residual = static_cast<const H*>(p.residual) + row * p.residual_stride;
      H* const sum = static_cast<H*>(p.h) + row * n;
      gpu::sweep_row<W, kKept>(n, [&](int64_t i, int k) {
        const Pack<T, W> a = gpu::load_constant<W>(x + i);
        const Pack<H, W> r = gpu::load_constant<W>(residual + i);
        Pack<H, W> both;
#pragma unroll
        for (int j = 0; j < W; ++j) both.v[j] = gpu::narrow<H>(a[j] + r[j]);
        if (k < kKept) kept[k] = both;
        gpu::store(sum + i, both);
      });
      h = sum;
    } else {
      h = static_cast<const H*>(p.x) + row * p.x_stride;  // H is T
      gpu::sweep_row<W, kKept>(n, [&](int64_t i, int k) {
        if (k < kKept) kept[k] = gpu::load_constant<W>(h + i);
      });
    }
    const auto h_at = [&](int64_t i, int k) { return k < kKept ? kept[k] : gpu::load<W>(h + i); };

    C mean = 0;
    if (p.center) {
      gpu::sweep_row<W, kKept>(n, [&](int64_t i, int k) {
        const Pack<H, W> v = h_at(i, k);
#pragma unroll
        for (int j = 0; j < W; ++j) mean += v[j];
      });
      mean = gpu::row_sum(mean) * inverse_n;
    }
    C variance = 0;
    gpu::sweep_row<W, kKept>(n, [&](int64_t i, int k) {
      const Pack<H, W> v = h_at(i, k);
#pragma unroll
      for (int j = 0; j < W; ++j) variance += (v[j] - mean) * (v[j] - mean);
    });
    variance = gpu::row_sum(variance) * inverse_n;
    const C rstd = C(1) / sqrt(variance + static_cast<C>(p.eps));

    gpu::sweep_row<W, kKept>(n, [&](int64_t i, int k) {
      const Pack<H, W> v = h_at(i, k);
      C s[W];
      scale.load(i, s);
      Pack<T, W> out;
#pragma unroll
      for (int j = 0; j < W; ++j) s[j] *= rounded_if<T>(p.cast_first, (v[j] - mean) * rstd);
      if (bias != nullptr) {
        const Pack<T, W> b = gpu::load_constant<W>(bias + i);
#pragma unroll
        for (int j = 0; j < W; ++j) s[j] += b[j];
      }
#pragma unroll
      for (int j = 0; j < W; ++j) out.v[j] = gpu::narrow<T>(s[j]);
      gpu::store(y + i, out);
    });
    if (threadIdx.x == 0 && p.stats != nullptr) {
      C* const stats = static_cast<C*>(p.stats) + row * 2;
      stats[0] = mean;
      stats[1] = rstd;
    }
  }
}

// The formulas are in norm_cpu.cpp; shard s has the rows s, s + shards, ...
template <class T, class H, int W>
__global__ void __launch_bounds__(kThreads)
    norm_backward_kernel(const __grid_constant__ NormBackwardParams p, compute_t<T>* dweight,
                         compute_t<T>* dbias, int64_t partial_stride) {
  using C = compute_t<T>;
  constexpr int kKept = kBackwardKept<W>;
  const int64_t n = p.cols;
  const C inverse_n = C(1) / static_cast<C>(n > 0 ? n : 1);
  const Scale<T, W> scale{static_cast<const T*>(p.weight), static_cast<C>(p.offset)};
  const int64_t shard = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t shards = static_cast<int64_t>(gridDim.x) * blockDim.y;
  gpu::ColumnSums<C, W, kKept> dw{dweight != nullptr ? dweight + shard * partial_stride : nullptr};
  gpu::ColumnSums<C, W, kKept> db{dbias != nullptr ? dbias + shard * partial_stride : nullptr};

  for (int64_t row = shard; row < p.rows; row += shards) {
    const T* const gy = static_cast<const T*>(p.grad_y) + row * p.grad_y_stride;
    const H* const h = static_cast<const H*>(p.h) + row * p.h_stride;
    T* const dx = static_cast<T*>(p.dx) + row * n;
    const C mean = static_cast<const C*>(p.stats)[row * 2];
    const C rstd = static_cast<const C*>(p.stats)[row * 2 + 1];
    Pack<H, W> kept_h[kKept];
    Pack<T, W> kept_g[kKept];
    gpu::sweep_row<W, kKept>(n, [&](int64_t i, int k) {
      if (k == kKept) return;
      kept_h[k] = gpu::load_constant<W>(h + i);
      kept_g[k] = gpu::load_constant<W>(gy + i);
    });
    const auto h_at = [&](int64_t i, int k) {
      return k < kKept ? kept_h[k] : gpu::load_constant<W>(h + i);
    };
    const auto g_at = [&](int64_t i, int k) {
      return k < kKept ? kept_g[k] : gpu::load_constant<W>(gy + i);
    };

    C slope = 0, shift = 0;
    gpu::sweep_row<W, kKept>(n, [&](int64_t i, int k) {
      const Pack<H, W> hp = h_at(i, k);
      const Pack<T, W> gp = g_at(i, k);
      C s[W];
      scale.load(i, s);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const C g = gp[j], xh = (hp[j] - mean) * rstd;
        dw.add(i, k, j, g * xh, row == shard);
        db.add(i, k, j, g, row == shard);
        slope += g * s[j] * xh;
        shift += g * s[j];
      }
    });
    slope = gpu::row_sum(slope) * inverse_n;
    shift = p.center ? gpu::row_sum(shift) * inverse_n : C(0);

    const H* const gh =
        p.grad_h != nullptr ? static_cast<const H*>(p.grad_h) + row * p.grad_h_stride : nullptr;
    gpu::sweep_row<W, kKept>(n, [&](int64_t i, int k) {
      const Pack<H, W> hp = h_at(i, k);
      const Pack<T, W> gp = g_at(i, k);
      C v[W];
      scale.load(i, v);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        v[j] = (gp[j] * v[j] - shift - (hp[j] - mean) * rstd * slope) * rstd;
      }
      if (gh != nullptr) {
        const Pack<H, W> g = gpu::load_constant<W>(gh + i);
#pragma unroll
        for (int j = 0; j < W; ++j) v[j] += g[j];
      }
      Pack<T, W> out;
#pragma unroll
      for (int j = 0; j < W; ++j) out.v[j] = gpu::narrow<T>(v[j]);
      gpu::store(dx + i, out);
      if constexpr (!std::is_same_v<T, H>) {
        Pack<H, W> wide;
#pragma unroll
        for (int j = 0; j < W; ++j) wide.v[j] = gpu::narrow<H>(v[j]);
        gpu::store(static_cast<H*>(p.dh) + row * n + i, wide);
      }
    });
  }
  gpu::sweep_row<W, kKept>(n, [&](int64_t i, int k) {
    dw.store(i, k);
    db.store(i, k);
  });
}

using gpu::Width;

// Turns f(T{}, H{}, Width<W>{}) into a function of (T{}, Width<W>{}).
template <class F>
auto with_stream(DType dtype, const F& f) {
  return [dtype, &f]<class T, int W>(T t, Width<W> width) {
    dispatch_stream<T>(dtype, [&]<class H>(H h) { f(t, h, width); });
  };
}

template <class F>
void dispatch_row(const NormParams& p, const F& f) {
  gpu::dispatch_width(
      p.dtype,
      [&]<class T, int W>(T, Width<W>) {
        return p.cols % W == 0 && p.x_stride % W == 0 && p.residual_stride % W == 0 &&
               gpu::aligned_16(p.x) && gpu::aligned_16(p.residual) && gpu::aligned_16(p.weight) &&
               gpu::aligned_16(p.bias);
      },
      with_stream(p.h_dtype, f));
}
template <class F>
void dispatch_row(const NormBackwardParams& p, const F& f) {
  gpu::dispatch_width(
      p.dtype,
      [&]<class T, int W>(T, Width<W>) {
        return p.cols % W == 0 && p.grad_y_stride % W == 0 && p.grad_h_stride % W == 0 &&
               p.h_stride % W == 0 && gpu::aligned_16(p.grad_y) && gpu::aligned_16(p.grad_h) &&
               gpu::aligned_16(p.h) && gpu::aligned_16(p.weight);
      },
      with_stream(p.h_dtype, f));
}

template <int W>
dim3 backward_block(const NormBackwardParams& p) {
  return gpu::row_block(p.cols / W, kBackwardKept<W>, kThreads);
}

int64_t shards_of(int64_t rows, dim3 block) {
  const int64_t wanted = (rows + kShardRows - 1) / kShardRows;
  return gpu::row_grid(min(wanted, kMaxShards), block) * static_cast<int64_t>(block.y);
}

}  // namespace

Status launch_norm(const NormParams& p, Stream stream) {
  if (p.rows == 0) return nullptr;
  dispatch_row(p, [&]<class T, class H, int W>(T, H, Width<W>) {
    const dim3 block = gpu::row_block(p.cols / W, kForwardKept, kThreads);
    GPU_LAUNCH((norm_forward_kernel<T, H, W>), gpu::row_grid(p.rows, block), block, 0, stream, p);
  });
  return gpu::launch_status();
}

int64_t norm_backward_shards(const NormBackwardParams& p) {
  int64_t shards = 0;
  dispatch_row(p, [&]<class T, class H, int W>(T, H, Width<W>) {
    shards = shards_of(p.rows, backward_block<W>(p));
  });
  return shards;
}

Status launch_norm_backward(const NormBackwardParams& p, const WeightGradients& weights,
                            Stream stream) {
  const int64_t shards = norm_backward_shards(p);
  const bool both = weights.dweight != nullptr && weights.dbias != nullptr;
  const int64_t stride = both ? 2 * p.cols : p.cols;
  dispatch_row(p, [&]<class T, class H, int W>(T, H, Width<W>) {
    using C = compute_t<T>;
    C* const partial = static_cast<C*>(weights.partial);
    C* const dw = weights.dweight != nullptr ? partial : nullptr;
    C* const db = weights.dbias != nullptr ? partial + (both ? p.cols : 0) : nullptr;
    const dim3 block = backward_block<W>(p);
    if (shards > 0) {
      GPU_LAUNCH((norm_backward_kernel<T, H, W>), static_cast<unsigned>(shards / block.y), block, 0,
                 stream, p, dw, db, stride);
    }
    launch_sum_shards(p.dtype, dw, shards, stride, p.cols, weights.dweight, stream);
    launch_sum_shards(p.dtype, db, shards, stride, p.cols, weights.dbias, stream);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
