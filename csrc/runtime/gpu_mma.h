// Tensor cores (mma.sync m16n8k16) on 16-bit operands in shared memory. Lane 4 g + t holds columns
// 2 t and 2 t + 1 of rows g and g + 8 of a 16 x 8 result.
#pragma once

#include "runtime/gpu.h"

namespace omniattn::gpu {

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / 32; }

template <class T>
struct StridedRows {
  const T* data;
  int64_t stride, count, width;

  __device__ __forceinline__ bool has(int r, int c) const { return r < count && c < width; }
  __device__ __forceinline__ const T* at(int r, int c) const { return data + r * stride + c; }
};

// Rows of kD elements in shared memory. Piece c (16 bytes) of row r is stored at place c ^ r % 8,
// so that the 8 rows that ldmatrix reads at once are in different banks.
template <class T, int kD>
struct SharedRows {
  T* data;

  static __device__ __forceinline__ int offset(int row, int c) {
    return row * kD + 8 * (c ^ row % 8);
  }

  // Starts the copy of kRows rows by kThreads threads. Elements c to c + 7 of row r come from
  // from.at(r, c); they are zeros if from.has(r, c) is false, where from.data is any readable
  // address. The loop is not unrolled: the addresses would take the registers of the products.
  template <int kRows, int kThreads, class Source>
  __device__ __forceinline__ void load(const Source& from) const {
    constexpr int kPieces = kD / 8;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kPieces; i += kThreads) {
      const int r = i / kPieces, c = i % kPieces;
      const bool valid = from.has(r, 8 * c);
      cp_async_16(data + offset(r, c), valid ? from.at(r, 8 * c) : from.data, valid);
    }
  }
  // Starts the copy of the first `count` rows of `from`, `width` elements each.
  template <int kRows, int kThreads>
  __device__ __forceinline__ void load(const T* from, int64_t stride, int64_t count,
                                       int64_t width) const {
    load<kRows, kThreads>(StridedRows<T>{from, stride, count, width});
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
