// RMSNorm and rotary embedding of heads on CUDA, see norm_rope.h. A warp processes one head at a
// time; its second sweep reads the head from the caches.
#include "kernels/rope/norm_rope.h"

#include "kernels/norm/rounded_cuda.h"
#include "kernels/rope/rope_turn_cuda.h"
#include "kernels/sums/sums.h"

namespace omniattn {
namespace {

using gpu::Pack;
using gpu::Width;

constexpr unsigned kWarps = 8;
constexpr int64_t kMaxShards = 2048;  // warps that keep sums of dweight; enough to fill a large GPU

// Calls take(i, v) for the elements i, ..., i + W - 1 of this thread, over a whole head; v are the
// values from get(i, v) with the rotary dimensions rotated. `sign` is -1 for the negative angle.
template <int W, class C, class Get, class Take>
__device__ __forceinline__ void turn_head(const RopeParams& p, const gpu::RopeToken<C>& token,
                                          C sign, const Get& get, const Take& take) {
  const int64_t packs = p.half / W, rest = (p.dim - 2 * p.half) / W;
  C a[W], b[W];
  for (int64_t i = threadIdx.x; i < packs; i += 32) {
    const gpu::RopeParts at = gpu::rope_parts<W>(p, i * W);
    get(at.first, a);
    get(at.second, b);
    gpu::turn_pairs<W>(p.interleaved, gpu::load_constant<W>(token.cos + i * W),
                       gpu::load_constant<W>(token.sin + i * W), sign, a, b);
    take(at.first, a);
    take(at.second, b);
  }
  for (int64_t i = threadIdx.x; i < rest; i += 32) {
    const int64_t n = i * W < p.start ? i * W : i * W + 2 * p.half;
    get(n, a);
    take(n, a);
  }
}

// weight + offset, or 1 if there is no weight.
template <int W, class T>
__device__ __forceinline__ void load_scale(const void* weight, double offset, int64_t i,
                                           compute_t<T> (&out)[W]) {
  if (weight != nullptr) gpu::load_wide<W>(static_cast<const T*>(weight) + i, out);
#pragma unroll
  for (int j = 0; j < W; ++j) {
    out[j] = weight != nullptr ? out[j] + static_cast<compute_t<T>>(offset) : compute_t<T>(1);
  }
}

template <class C>
__device__ __forceinline__ C warp_sum(C x) {
  return gpu::warp_reduce(x, [](C a, C b) { return a + b; });
}

template <class T, int W>
__global__ void __launch_bounds__(32 * kWarps)
    norm_rope_forward_kernel(const __grid_constant__ NormRopeParams p, int64_t rows) {
  using C = compute_t<T>;
  const RopeTensor& tensor = p.rope.tensors[0];
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.y; row < rows; row += step) {
    const auto token = gpu::rope_token<C>(p.rope, row / tensor.heads);
    const int64_t h = row % tensor.heads;
    const T* const x = static_cast<const T*>(tensor.in) + token.entry * tensor.in_batch +
                       token.token * tensor.in_token + h * tensor.in_head;
    T* const y = static_cast<T*>(tensor.out) + token.entry * tensor.out_batch +
                 token.token * tensor.out_token + h * tensor.out_head;
    C squares = 0;
    for (int64_t i = threadIdx.x * W; i < p.rope.dim; i += 32 * W) {
      C v[W];
      gpu::load_wide<W>(x + i, v);
#pragma unroll
      for (int j = 0; j < W; ++j) squares += v[j] * v[j];
    }
    const C mean = warp_sum(squares) / static_cast<C>(p.rope.dim);
    const C rstd = C(1) / sqrt(mean + static_cast<C>(p.eps));
    turn_head<W>(
        p.rope, token, C(1),
        [&](int64_t i, C(&v)[W]) {
          C scale[W];
          gpu::load_wide<W>(x + i, v);
          load_scale<W, T>(p.weight, p.offset, i, scale);
#pragma unroll
          for (int j = 0; j < W; ++j) {
            const C normed = rounded_if<T>(p.cast_first, v[j] * rstd);
            v[j] = rounded_if<T>(p.cast_first, normed * scale[j]);
          }
        },
        [&](int64_t i, const C(&v)[W]) { gpu::store_narrow<W>(v, y + i); });
    if (threadIdx.x == 0) static_cast<C*>(p.rstd)[row] = rstd;
  }
}

// Shard s has the rows s, s + shards, ... and one row of `partial`. Each thread keeps the sums of
// the elements that it computes.
template <class T, int W>
__global__ void __launch_bounds__(32 * kWarps)
    norm_rope_backward_kernel(const __grid_constant__ NormRopeBackwardParams p, int64_t rows,
                              compute_t<T>* partial) {
  using C = compute_t<T>;
  const RopeTensor& tensor = p.rope.tensors[0];
  const int64_t shard = blockIdx.x * int64_t{kWarps} + threadIdx.y;
  const int64_t shards = static_cast<int64_t>(gridDim.x) * kWarps;
  C* const sums = partial != nullptr ? partial + shard * p.rope.dim : nullptr;
  for (int64_t i = threadIdx.x; sums != nullptr && i < p.rope.dim; i += 32) sums[i] = 0;
  __syncwarp();
  for (int64_t row = shard; row < rows; row += shards) {
    const auto token = gpu::rope_token<C>(p.rope, row / tensor.heads);
    const int64_t h = row % tensor.heads;
    const T* const gy = static_cast<const T*>(tensor.in) + token.entry * tensor.in_batch +
                        token.token * tensor.in_token + h * tensor.in_head;
    const T* const x = static_cast<const T*>(p.x) + token.entry * p.x_batch +
                       token.token * p.x_token + h * p.x_head;
    T* const dx = static_cast<T*>(tensor.out) + token.entry * tensor.out_batch +
                  token.token * tensor.out_token + h * tensor.out_head;
    const C rstd = static_cast<const C*>(p.rstd)[row];
    const auto grad = [&](int64_t i, C(&v)[W]) { gpu::load_wide<W>(gy + i, v); };
    C v[W], scale[W], m_x = 0;
    turn_head<W>(p.rope, token, C(-1), grad, [&](int64_t i, const C(&g)[W]) {
      gpu::load_wide<W>(x + i, v);
      load_scale<W, T>(p.weight, p.offset, i, scale);
#pragma unroll
      for (int j = 0; j < W; ++j) m_x += g[j] * scale[j] * v[j];
    });
    const C slope = warp_sum(m_x) / static_cast<C>(p.rope.dim) * rstd * rstd;
    turn_head<W>(p.rope, token, C(-1), grad, [&](int64_t i, const C(&g)[W]) {
      gpu::load_wide<W>(x + i, v);
      load_scale<W, T>(p.weight, p.offset, i, scale);
      if (sums != nullptr) {
        auto sum = gpu::load<W>(sums + i);
#pragma unroll
        for (int j = 0; j < W; ++j) sum.v[j] += g[j] * (v[j] * rstd);
        gpu::store(sums + i, sum);
      }
#pragma unroll
      for (int j = 0; j < W; ++j) v[j] = (g[j] * scale[j] - v[j] * slope) * rstd;
      gpu::store_narrow<W>(v, dx + i);
    });
  }
}

int64_t row_count(const RopeParams& p, int64_t batch) {
  return batch * p.tokens * p.tensors[0].heads;
}

template <class F>
void dispatch_heads(const RopeParams& p, const void* weight, const void* x, int64_t x_strides,
                    const F& f) {
  gpu::dispatch_width(
      p.dtype,
      [&]<class T, int W>(T, Width<W>) {
        const auto fits = [](auto... strides) { return ((strides % W == 0) && ...); };
        const RopeTensor& t = p.tensors[0];
        return fits(p.dim, p.start, p.half, p.cos_batch, p.cos_row, p.sin_batch, p.sin_row,
                    t.in_batch, t.in_token, t.in_head, t.out_batch, t.out_token, t.out_head,
                    x_strides) &&
               gpu::aligned_16(p.cos) && gpu::aligned_16(p.sin) && gpu::aligned_16(t.in) &&
               gpu::aligned_16(t.out) && gpu::aligned_16(weight) && gpu::aligned_16(x);
      },
      f);
}

}  // namespace

Status launch_norm_rope(const NormRopeParams& p, int64_t batch, Stream stream) {
  const int64_t rows = row_count(p.rope, batch);
  if (rows == 0) return nullptr;
  const dim3 block(32, kWarps);
  dispatch_heads(p.rope, p.weight, nullptr, 0, [&]<class T, int W>(T, Width<W>) {
    GPU_LAUNCH((norm_rope_forward_kernel<T, W>), gpu::row_grid(rows, block), block, 0, stream, p,
               rows);
  });
  return gpu::launch_status();
}

int64_t norm_rope_backward_shards(const NormRopeBackwardParams& p, int64_t batch) {
  const int64_t rows = row_count(p.rope, batch), warps = int64_t{kWarps};
  return (min(rows, kMaxShards) + warps - 1) / warps * warps;
}

Status launch_norm_rope_backward(const NormRopeBackwardParams& p, int64_t batch, void* partial,
                                 void* dweight, Stream stream) {
  const int64_t rows = row_count(p.rope, batch), shards = norm_rope_backward_shards(p, batch);
  const int64_t strides = p.x_batch | p.x_token | p.x_head;  // W divides all if it divides this
  dispatch_heads(p.rope, p.weight, p.x, strides, [&]<class T, int W>(T, Width<W>) {
    if (shards > 0) {
      GPU_LAUNCH((norm_rope_backward_kernel<T, W>), static_cast<unsigned>(shards / kWarps),
                 dim3(32, kWarps), 0, stream, p, rows, static_cast<compute_t<T>*>(partial));
    }
    launch_sum_shards(TypeTraits<compute_t<T>>::kDType, partial, shards, p.rope.dim, p.rope.dim,
                      dweight, stream);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
