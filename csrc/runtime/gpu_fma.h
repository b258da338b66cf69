// Products of tiles of 64 rows by FMA, for any dtype. There are 256 threads:
// thread (ty, tx) = (t / 16, t % 16) computes rows 4 ty + i and columns tx + 16 j of a result.
// Operands pass through shared memory 16 elements of k at a time, widened to the compute type.
#pragma once

#include "runtime/gpu.h"

namespace omniattn::gpu {

inline constexpr int kFmaThreads = 256;
inline constexpr int kFmaRows = 64;
inline constexpr int kDepth = 16;
inline constexpr int kLeading = kFmaRows + 4;  // row stride in shared memory, avoids bank conflicts

__device__ __forceinline__ int thread_x() { return static_cast<int>(threadIdx.x) % 16; }
__device__ __forceinline__ int thread_y() { return static_cast<int>(threadIdx.x) / 16; }

template <class A, int M, int N>
__device__ __forceinline__ void clear(A (&acc)[M][N]) {
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) acc[i][j] = 0;
  }
}

// acc[i][j] += sum of x[c][4 ty + i] y[c][tx + 16 j] over c < 16; x has row stride kLeading.
template <class A, int N>
__device__ __forceinline__ void multiply_staged(const A* x, const A* y, int ldy, A (&acc)[4][N]) {
  x += 4 * thread_y();
  y += thread_x();
#pragma unroll 4
  for (int c = 0; c < kDepth; ++c) {
    A a[4], b[N];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = x[c * kLeading + i];
#pragma unroll
    for (int j = 0; j < N; ++j) b[j] = y[c * ldy + 16 * j];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) acc[i][j] += a[i] * b[j];
    }
  }
}

}  // namespace omniattn::gpu
