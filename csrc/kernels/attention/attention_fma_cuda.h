// Products of tiles by FMA for kernels with any dtype and head size, see runtime/gpu_fma.h.
#pragma once

#include "kernels/score_program/score_program_cuda.h"
#include "runtime/gpu_fma.h"

namespace omniattn::gpu {

// Number of columns of an output that one block computes, limited by registers.
template <class A>
inline constexpr int kChunk = sizeof(A) == 8 ? 64 : 128;
template <class A>
inline constexpr int kChunkColumns = kChunk<A> / 16;  // per thread

// At least one, since a block also writes results that do not depend on columns.
template <class A>
OMNIATTN_FN int64_t chunks_of(int64_t columns) {
  return columns > kChunk<A> ? ceil_div(columns, kChunk<A>) : 1;
}

template <class A>
struct FmaShared {
  A x[kDepth * kLeading];
  A y[kDepth * (kChunk<A> + 4)];
  A tile[kTile * kLeading];
  TileBits bits;
};

// Up to 64 rows in global memory; rows from `count` on read as zero.
template <class T>
struct GlobalRows {
  using Type = T;
  const T* data;
  int64_t stride, count;

  __device__ __forceinline__ bool has(int64_t r) const { return r < count; }
  __device__ __forceinline__ T at(int64_t r, int64_t c) const { return data[r * stride + c]; }
};
// 64 rows at any addresses, listed in shared memory; null rows read as zero.
template <class T>
struct PickedRows {
  using Type = T;
  const T* const* row;
  int64_t count;

  __device__ __forceinline__ bool has(int64_t r) const { return row[r] != nullptr; }
  __device__ __forceinline__ T at(int64_t r, int64_t c) const { return row[r][c]; }
};
// Queries of a sequence from `first` on, in q or a tensor like it; keys likewise, in k or v.
template <class T>
__device__ __forceinline__ GlobalRows<T> queries_of(const HeadView& x, const Sequence& s, int64_t h,
                                                    int64_t first) {
  return {row_of<T>(x, s.entry, s.q + first, h), x.stride_t, s.tq - first};
}
template <class T>
__device__ __forceinline__ GlobalRows<T> keys_of(const HeadView& x, const Sequence& s, int64_t h,
                                                 int64_t first) {
  return {row_of<T>(x, s.entry, s.k + first, h), x.stride_t, s.tk - first};
}

// True if some row 4 ty + i of this thread is below `count`; otherwise it has nothing to compute.
__device__ __forceinline__ bool has_rows(int64_t count) { return 4 * thread_y() < count; }

// to[c][r] = rows[r][first + c], zero outside.
template <class Rows>
__device__ __forceinline__ void stage_columns(const Rows& rows, int64_t first, int64_t width,
                                              compute_t<typename Rows::Type>* to) {
  using A = compute_t<typename Rows::Type>;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int n = 0; n < kTile * kDepth / kFmaThreads; ++n) {
    const int i = thread + n * kFmaThreads, r = i / kDepth, c = i % kDepth;
    const bool inside = rows.has(r) && first + c < width;
    to[c * kLeading + r] = inside ? gpu::widen(rows.at(r, first + c)) : A(0);
  }
}

// acc[i][j] = row 4 ty + i of x times row tx + 16 j of y; rows have `width` elements. Begins with a
// barrier unless width is 0.
template <class A, class X, class Y>
__device__ __forceinline__ void multiply_rows(const X& x, const Y& y, int64_t width,
                                              FmaShared<A>& shared, A (&acc)[4][4]) {
  clear(acc);
  for (int64_t c = 0; c < width; c += kDepth) {
    __syncthreads();
    stage_columns(x, c, width, shared.x);
    stage_columns(y, c, width, shared.y);
    __syncthreads();
    if (has_rows(x.count)) multiply_staged(shared.x, shared.y, kLeading, acc);
  }
}

// acc[i][j] += sum over n < 64 of tile[n][4 ty + i] y[n][first + tx + 16 j] for rows below `rows`.
// Begins and ends with a barrier: the tile may be written before and after.
template <class A, class Rows>
__device__ __forceinline__ void multiply_tile(const A* tile, int64_t rows, const Rows& y,
                                              int64_t first, int64_t width, FmaShared<A>& shared,
                                              A (&acc)[4][kChunkColumns<A>]) {
  constexpr int kColumns = kChunk<A>, kStride = kColumns + 4;
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  for (int n = 0; n < kTile && n < y.count; n += kDepth) {
    if (n > 0) __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth * kColumns / kFmaThreads; ++k) {
      const int i = thread + k * kFmaThreads;
      const int r = i / kColumns, c = i % kColumns;
      const bool inside = y.has(n + r) && first + c < width;
      shared.y[r * kStride + c] = inside ? gpu::widen(y.at(n + r, first + c)) : A(0);
    }
    __syncthreads();
    if (has_rows(rows)) multiply_staged(tile + n * kLeading, shared.y, kStride, acc);
  }
  __syncthreads();
}

// to[4 ty + i][first + tx + 16 j] = factor[i] * acc[i][j]
template <class T>
__device__ __forceinline__ void store_rows(
    const compute_t<T> (&acc)[4][kChunkColumns<compute_t<T>>], const compute_t<T> (&factor)[4],
    T* to, int64_t stride, int64_t rows, int64_t first, int64_t width) {
  const int x = thread_x(), y = thread_y();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * y + i;
    if (r >= rows) continue;
#pragma unroll
    for (int j = 0; j < kChunkColumns<compute_t<T>>; ++j) {
      const int64_t c = first + x + 16 * j;
      if (c < width) to[r * stride + c] = gpu::narrow<T>(factor[i] * acc[i][j]);
    }
  }
}

// to[c] = sum of sum[j] over the threads of column c = tx + 16 j < count, in a fixed order. Begins
// with a barrier.
template <class A>
__device__ __forceinline__ void store_column_sums(const A (&sum)[4], FmaShared<A>& shared,
                                                  int64_t count, A* to) {
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 4; ++j) shared.tile[thread_y() * kLeading + thread_x() + 16 * j] = sum[j];
  __syncthreads();
  const int c = static_cast<int>(threadIdx.x);
  if (c >= kTile || c >= count) return;
  A total = 0;
  for (int y = 0; y < 16; ++y) total += shared.tile[y * kLeading + c];
  to[c] = total;
}

// Reduces over the 16 threads that share a row.
template <class A, class F>
__device__ __forceinline__ A reduce_row(A x, const F& f) {
#pragma unroll
  for (int bits = 8; bits > 0; bits /= 2) x = f(x, __shfl_xor_sync(0xffffffffu, x, bits));
  return x;
}

// Gradients of a tile.

template <class A>
struct GradientShared : FmaShared<A> {
  A other[kTile * kLeading];
};

// Index of a pair's values in a tile, for sums over the queries or over the keys.
enum class Sum { queries, keys };
template <Sum kSum>
__device__ __forceinline__ int place(int query, int key) {
  return kSum == Sum::queries ? query * kLeading + key : key * kLeading + query;
}

}  // namespace omniattn::gpu
