// Rotary position embedding on CUDA, see rope.h. The threads of a token walk over its heads; a
// thread turns W pairs at a time, whose 2 W elements it reads and writes as 16-byte pieces.
#include "kernels/rope/rope_cuda.h"

#include "runtime/gpu_row.h"
#include "semantics/rope.h"

namespace omniattn {
namespace {

using gpu::Pack;
using gpu::Width;

constexpr unsigned kThreads = 256;

// Turns pairs n, ..., n + W - 1 of one head.
template <class T, int W>
__device__ __forceinline__ void rotate(const T* in, T* out, const Pack<compute_t<T>, W>& cos,
                                       const Pack<compute_t<T>, W>& sin, int64_t n,
                                       const RopeParams& p) {
  using C = compute_t<T>;
  // The first and second pieces hold x and y of the pairs, or the pairs one after another.
  const int64_t first = p.start + (p.interleaved ? 2 * n : n);
  const int64_t second = first + (p.interleaved ? W : p.half);
  const Pack<T, W> a = gpu::load<W>(in + first), b = gpu::load<W>(in + second);
  Pack<T, W> turned_a, turned_b;
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const C s = p.inverse ? -sin[j] : sin[j];
    if (p.interleaved) {
      const auto part = [&](int i) { return i < W ? a[i] : b[i - W]; };
      const auto put = [&](int i, T v) { (i < W ? turned_a.v[i] : turned_b.v[i - W]) = v; };
      const C x = part(2 * j), y = part(2 * j + 1);
      put(2 * j, gpu::narrow<T>(rope_x(x, y, cos[j], s)));
      put(2 * j + 1, gpu::narrow<T>(rope_y(x, y, cos[j], s)));
    } else {
      turned_a.v[j] = gpu::narrow<T>(rope_x(a[j], b[j], cos[j], s));
      turned_b.v[j] = gpu::narrow<T>(rope_y(a[j], b[j], cos[j], s));
    }
  }
  gpu::store(out + first, turned_a);
  gpu::store(out + second, turned_b);
}

template <class T, int W>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(const __grid_constant__ RopeParams p, int64_t batch) {
  using C = compute_t<T>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t item = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t packs = p.half / W, rest = (p.dim - 2 * p.half) / W;
  for (; item < batch * p.tokens; item += step) {
    const int64_t b = item / p.tokens, t = item - b * p.tokens;
    const int64_t position =
        p.positions != nullptr ? p.positions[b * p.positions_batch + t * p.positions_token] : t;
    GPU_REQUIRE(position >= 0 && position < p.rows,
                "rope: positions must be in [0, P), the rows of the tables");
    const C* const cos = static_cast<const C*>(p.cos) + b * p.cos_batch + position * p.cos_row;
    const C* const sin = static_cast<const C*>(p.sin) + b * p.sin_batch + position * p.sin_row;
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
