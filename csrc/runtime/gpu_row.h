// Rows on the GPU: 16-byte accesses, reductions over a row by one block or one warp, and sweeps
// over a row that keep its elements in registers for the next sweep.
//
// The blockDim.x threads with one threadIdx.y share a row. Either blockDim.x is 32 and each warp of
// the block has its own row, or blockDim.y is 1.
#pragma once

#include "runtime/dispatch.h"
#include "runtime/gpu.h"

namespace omniattn::gpu {

__host__ __device__ inline bool aligned_16(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

// W adjacent elements of a row, as stored.
template <class T, int W>
struct alignas(sizeof(T) * W) Pack {
  T v[W];

  __device__ __forceinline__ compute_t<T> operator[](int j) const { return gpu::widen(v[j]); }
};

// Elements in 16 bytes.
template <class T>
inline constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

// A Pack, seen as 16-byte pieces.
template <class T, int W>
struct Pieces {
  static constexpr int kCount = static_cast<int>(sizeof(T)) * W / 16;
  static_assert(kCount * 16 == static_cast<int>(sizeof(T)) * W);
  uint4 v[kCount];
};

// Loads and stores of global memory take one instruction per 16 bytes of a Pack, or one if W is 1.
template <int W, class T>
__device__ __forceinline__ Pack<T, W> load(const T* p) {
  if constexpr (W == 1) {
    return {{*p}};
  } else {
    Pieces<T, W> pieces;
#pragma unroll
    for (int i = 0; i < pieces.kCount; ++i) pieces.v[i] = reinterpret_cast<const uint4*>(p)[i];
    return __builtin_bit_cast(Pack<T, W>, pieces);
  }
}
// Loads from memory that no kernel writes meanwhile. The compiler may move these loads over stores,
// so that several are in flight.
template <int W, class T>
__device__ __forceinline__ Pack<T, W> load_constant(const T* p) {
  if constexpr (W == 1) {
    return load<1>(p);
  } else {
    Pieces<T, W> pieces;
#pragma unroll
    for (int i = 0; i < pieces.kCount; ++i) {
      pieces.v[i] = __ldg(reinterpret_cast<const uint4*>(p) + i);
    }
    return __builtin_bit_cast(Pack<T, W>, pieces);
  }
}
template <int W, class T>
__device__ __forceinline__ void store(T* p, const Pack<T, W>& x) {
  if constexpr (W == 1) {
    *p = x.v[0];
  } else {
    using Parts = Pieces<T, W>;
    const auto pieces = __builtin_bit_cast(Parts, x);
#pragma unroll
    for (int i = 0; i < pieces.kCount; ++i) store_16(reinterpret_cast<uint4*>(p) + i, pieces.v[i]);
  }
}

// Calls f(i, k) for the elements i, ..., i + W - 1 of this thread. The first kKept calls are
// unrolled and have k = 0, 1, ..., so that f can keep its values in registers as array[k]; all
// later calls have k = kKept. n is a multiple of W.
template <int W, int kKept, class F>
__device__ __forceinline__ void sweep_row(int64_t n, const F& f) {
  const int64_t step = static_cast<int64_t>(blockDim.x) * W;
  int64_t i = static_cast<int64_t>(threadIdx.x) * W;
#pragma unroll
  for (int k = 0; k < kKept; ++k, i += step) {
    if (i < n) f(i, k);
  }
  for (; i < n; i += step) f(i, kKept);
}

template <int W>
struct Width {};

// Number of elements of p before the first 16-byte boundary, where sizeof(T) * W is 16.
template <int W, class T>
__device__ __forceinline__ int64_t elements_to_boundary(const T* p) {
  return -static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) / sizeof(T)) & (W - 1);
}

// For rows of any length and alignment, at 16 bytes per access: f(i, Width<1>{}) for the first
// `head` elements, f(i, Width<W>{}) for the packs i, ..., i + W - 1 that follow, and
// f(i, Width<1>{}) for the remainder.
template <int W, class F>
__device__ __forceinline__ void sweep_unaligned_row(int64_t n, int64_t head, const F& f) {
  const int64_t thread = threadIdx.x, threads = blockDim.x, end = n - (n - head) % W;
  for (int64_t i = thread; i < head; i += threads) f(i, Width<1>{});
#pragma unroll 4
  for (int64_t i = head + thread * W; i < end; i += threads * W) f(i, Width<W>{});
  if (end + thread < n) f(end + thread, Width<1>{});
}

// Reduces over all lanes of a warp, in a fixed order; every lane gets the result.
template <class C, class F>
__device__ __forceinline__ C warp_reduce(C x, const F& combine) {
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, bits));
  return x;
}

// Reduces over the threads of a row. All threads of the block must take part.
template <class C, class F>
__device__ __forceinline__ C row_reduce(C x, C identity, const F& combine) {
  x = warp_reduce(x, combine);
  if (blockDim.x == 32) return x;
  GPU_SHARED(C, parts, 32);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) parts[warp] = x;
  __syncthreads();
  const bool used = lane < static_cast<int>(blockDim.x) / 32;
  const C total = warp_reduce(used ? parts[lane] : identity, combine);
  __syncthreads();  // the next reduction reuses the array
  return total;
}

template <class C>
__device__ __forceinline__ C row_sum(C x) {
  return row_reduce(x, C(0), [](C a, C b) { return a + b; });
}
// Ignores NaN.
template <class C>
__device__ __forceinline__ C row_max(C x) {
  return row_reduce(x, C(-INFINITY), [](C a, C b) { return fmax(a, b); });
}

// Column sums over the rows of one shard: in registers for the elements that the sweep keeps there,
// in the shard's row of `partial` for the others.
template <class C, int W, int kKept>
struct ColumnSums {
  C* partial;  // (cols) or null
  C kept[kKept][W] = {};

  __device__ __forceinline__ void add(int64_t i, int k, int j, C x, bool first_row) {
    if (k < kKept) {
      kept[k][j] += x;
    } else if (partial != nullptr) {
      partial[i + j] = first_row ? x : partial[i + j] + x;
    }
  }
  __device__ __forceinline__ void store(int64_t i, int k) const {
    if (k == kKept || partial == nullptr) return;
    Pack<C, W> sums;
#pragma unroll
    for (int j = 0; j < W; ++j) sums.v[j] = kept[k][j];
    gpu::store(partial + i, sums);
  }
};

// Shape of a block for rows of `packs` Packs: the fewest threads, at most max_threads, that keep
// the whole row in registers at `kept` Packs each. Short rows share a block, so that an SM can hold
// its full number of warps.
inline dim3 row_block(int64_t packs, int kept, unsigned max_threads) {
  constexpr unsigned kShortRows = 4;
  if (packs <= 32 * kept) return dim3(32, kShortRows);
  unsigned threads = 64;
  while (threads < max_threads && static_cast<int64_t>(threads) * kept < packs) threads *= 2;
  return dim3(threads);
}

// Number of blocks for `rows` rows, block.y each; kernels loop over the grid for larger counts.
inline unsigned row_grid(int64_t rows, dim3 block) {
  constexpr int64_t kMaxGrid = 0x7fffffff;
  return static_cast<unsigned>(min((rows + block.y - 1) / block.y, kMaxGrid));
}

// Calls f(T{}, Width<W>{}) with the dtype and the widest possible access. vectorised(T{},
// Width<W>{}) returns true if all pointers and strides allow 16 bytes.
template <class V, class F>
void dispatch_width(DType dtype, const V& vectorised, const F& f) {
  dispatch(dtype, [&]<class T>(T) {
    constexpr Width<kVectorWidth<T>> wide{};
    if (vectorised(T{}, wide)) {
      f(T{}, wide);
    } else {
      f(T{}, Width<1>{});
    }
  });
}

}  // namespace omniattn::gpu
