// Tensor cores (mma.sync m16n8k16) on 16-bit operands in shared memory. Lane 4 g + t holds columns
// 2 t and 2 t + 1 of rows g and g + 8 of a 16 x 8 result.
#pragma once

#include "runtime/gpu.h"

namespace omniattn::gpu {

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / 32; }

// Rows of kD elements in shared memory. Piece c (16 bytes) of row r is stored at place c ^ r % 8,
// so that the 8 rows that ldmatrix reads at once are in different banks.
template <class T, int kD>
struct SharedRows {
  T* data;

  static __device__ __forceinline__ int offset(int row, int c) {
    return row * kD + 8 * (c ^ row % 8);
  }

  // Starts the copy of kRows rows by kThreads threads, of which the first `count` rows of `from`
  // and `width` elements of each exist; the others are zeros. Each thread steps from row to row of
  // one column, which takes a few instructions per copy where all rows exist.
  template <int kRows, int kThreads>
  __device__ __forceinline__ void load(const T* from, int64_t stride, int64_t count,
                                       int64_t width) const {
    constexpr int kPieces = kD / 8, kStep = kThreads / kPieces;
    static_assert(kThreads % kPieces == 0 && kRows % kStep == 0);
    const int first = static_cast<int>(threadIdx.x) / kPieces;
    const int c = static_cast<int>(threadIdx.x) % kPieces;
    const bool valid = 8 * c < width;
    if (count >= kRows) {
      const T* at = from + first * stride + (valid ? 8 * c : 0);
#pragma unroll(kD > 128 ? 2 : 8)  // the products of wide rows need the registers
      for (int r = 0; r < kRows; r += kStep, at += kStep * stride) {
        cp_async_16(data + offset(first + r, c), at, valid);
      }
    } else {
#pragma unroll 1
      for (int r = first; r < kRows; r += kStep) {
        const bool has = valid && r < count;
        cp_async_16(data + offset(r, c), has ? from + r * stride + 8 * c : from, has);
      }
    }
  }
};

template <class T>
__device__ __forceinline__ void mma(float (&acc)[4], const uint32_t (&a)[4],
                                    const uint32_t (&b)[2]) {
  if constexpr (TypeTraits<T>::kDType == DType::bf16) {
    mma_bf16(acc, a, b);
  } else {
    mma_f16(acc, a, b);
  }
}

template <int N>
__device__ __forceinline__ void clear(float (&acc)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
}

}  // namespace omniattn::gpu
