// Shared by the CUDA kernels of the rotary embedding: a token's rows of the tables, and the
// rotation of W pairs, whose 2 W elements form two contiguous parts of W.
#pragma once

#include "kernels/rope/rope.h"
#include "runtime/gpu_row.h"
#include "semantics/rope.h"

namespace omniattn::gpu {

template <class C>
struct RopeToken {
  int64_t entry, token;
  const C *cos, *sin;
};

template <class C>
__device__ __forceinline__ RopeToken<C> rope_token(const RopeParams& p, int64_t item) {
  const int64_t b = item / p.tokens, t = item - b * p.tokens;
  const int64_t position =
      p.positions != nullptr ? p.positions[b * p.positions_batch + t * p.positions_token] : t;
  GPU_REQUIRE(position >= 0 && position < p.rows,
              "apply_rotary, qk_norm_rotary: positions must be in [0, P), the rows of cos and sin");
  return {b, t, static_cast<const C*>(p.cos) + b * p.cos_batch + position * p.cos_row,
          static_cast<const C*>(p.sin) + b * p.sin_batch + position * p.sin_row};
}

// Offsets of the two parts of pairs n, ..., n + W - 1: all x and all y, or if interleaved the first
// and the second half of the pairs.
struct RopeParts {
  int64_t first, second;
};
template <int W>
__device__ __forceinline__ RopeParts rope_parts(const RopeParams& p, int64_t n) {
  const int64_t first = p.start + (p.interleaved ? 2 * n : n);
  return {first, first + (p.interleaved ? W : p.half)};
}

// Rotates the parts a and b of W pairs; `sign` is -1 for the negative angle.
template <int W, class C>
__device__ __forceinline__ void turn_pairs(bool interleaved, const Pack<C, W>& cos,
                                           const Pack<C, W>& sin, C sign, C (&a)[W], C (&b)[W]) {
  C turned_a[W], turned_b[W];
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const C s = sign * sin[j];
    if (interleaved) {
      const auto part = [&](int i) { return i < W ? a[i] : b[i - W]; };
      const auto put = [&](int i, C v) { (i < W ? turned_a[i] : turned_b[i - W]) = v; };
      const C x = part(2 * j), y = part(2 * j + 1);
      put(2 * j, rope_x(x, y, cos[j], s));
      put(2 * j + 1, rope_y(x, y, cos[j], s));
    } else {
      turned_a[j] = rope_x(a[j], b[j], cos[j], s);
      turned_b[j] = rope_y(a[j], b[j], cos[j], s);
    }
  }
#pragma unroll
  for (int j = 0; j < W; ++j) {
    a[j] = turned_a[j];
    b[j] = turned_b[j];
  }
}

// Loads W adjacent elements, in the compute type.
template <int W, class T>
__device__ __forceinline__ void load_wide(const T* p, compute_t<T> (&out)[W]) {
  const Pack<T, W> pack = load<W>(p);
#pragma unroll
  for (int j = 0; j < W; ++j) out[j] = pack[j];
}
template <int W, class T>
__device__ __forceinline__ void store_narrow(const compute_t<T> (&x)[W], T* p) {
  Pack<T, W> pack;
#pragma unroll
  for (int j = 0; j < W; ++j) pack.v[j] = gpu::narrow<T>(x[j]);
  store(p, pack);
}

}  // namespace omniattn::gpu
