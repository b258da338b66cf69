// Rotary position embedding on CUDA, see rope.h. A token's threads loop over its heads; a thread
// rotates W pairs at a time, and reads and writes their 2 W elements as 16-byte pieces.
#include "kernels/rope/rope.h"

#include "kernels/rope/rope_turn_cuda.h"

namespace omniattn {
namespace {

using gpu::Pack;
using gpu::Width;

constexpr unsigned kThreads = 256;

// Rotates pairs n, ..., n + W - 1 of one head.
template <class T, int W>
__device__ __forceinline__ void rotate(const T* in, T* out, const Pack<compute_t<T>, W>& cos,
                                       const Pack<compute_t<T>, W>& sin, int64_t n,
                                       const RopeParams& p) {
  using C = compute_t<T>;
  const gpu::RopeParts at = gpu::rope_parts<W>(p, n);
  C a[W], b[W];
  gpu::load_wide<W>(in + at.first, a);
  gpu::load_wide<W>(in + at.second, b);
  gpu::turn_pairs<W>(p.interleaved, cos, sin, p.inverse ? C(-1) : C(1), a, b);
  gpu::store_narrow<W>(a, out + at.first);
  gpu::store_narrow<W>(b, out + at.second);
}

template <class T, int W>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(const __grid_constant__ RopeParams p, int64_t batch) {
  using C = compute_t<T>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t item = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t packs = p.half / W, rest = (p.dim - 2 * p.half) / W;
  for (; item < batch * p.tokens; item += step) {
    const auto [b, t, cos, sin] = gpu::rope_token<C>(p, item);
    for (int32_t k = 0; k < p.tensor_count; ++k) {
      const RopeTensor& x = p.tensors[k];
      const T* const in = static_cast<const T*>(x.in) + b * x.in_batch + t * x.in_token;
      T* const out = static_cast<T*>(x.out) + b * x.out_batch + t * x.out_token;
      for (int64_t i = threadIdx.x; i < x.heads * packs; i += blockDim.x) {
        const int64_t head = i / packs, n = (i - head * packs) * W;
        const Pack<C, W> c = gpu::load_constant<W>(cos + n), s = gpu::load_constant<W>(sin + n);
        rotate<T, W>(in + head * x.in_head, out + head * x.out_head, c, s, n, p);
      }
      if (out == in) continue;
      for (int64_t i = threadIdx.x; i < x.heads * rest; i += blockDim.x) {
        const int64_t head = i / rest, m = (i - head * rest) * W;
        const int64_t n = m < p.start ? m : m + 2 * p.half;
        gpu::store(out + head * x.out_head + n, gpu::load<W>(in + head * x.in_head + n));
      }
    }
  }
}

}  // namespace

Status launch_rope(const RopeParams& p, int64_t batch, Stream stream) {
  int64_t heads = 0;
  for (int32_t k = 0; k < p.tensor_count; ++k) heads = max(heads, p.tensors[k].heads);
  if (batch * p.tokens == 0 || heads == 0 || p.dim == 0) return nullptr;
  const auto vectorised = [&]<class T, int W>(T, Width<W>) {
    const auto fits = [](auto... strides) { return ((strides % W == 0) && ...); };
    bool all = fits(p.dim, p.start, p.half, p.cos_batch, p.cos_row, p.sin_batch, p.sin_row) &&
               gpu::aligned_16(p.cos) && gpu::aligned_16(p.sin);
    for (int32_t k = 0; k < p.tensor_count; ++k) {
      const RopeTensor& x = p.tensors[k];
      all = all && gpu::aligned_16(x.in) && gpu::aligned_16(x.out) &&
            fits(x.in_batch, x.in_token, x.in_head, x.out_batch, x.out_token, x.out_head);
    }
    return all;
  };
  gpu::dispatch_width(p.dtype, vectorised, [&]<class T, int W>(T, Width<W>) {
    const dim3 block = gpu::row_block(heads * (p.dim / 2 / W), 1, kThreads);
    const unsigned grid = gpu::row_grid(batch * p.tokens, block);
    GPU_LAUNCH((rope_kernel<T, W>), grid, block, 0, stream, p, batch);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
