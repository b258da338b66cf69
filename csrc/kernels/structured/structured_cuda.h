// Shared by the CUDA kernels of structured state-space models.
#pragma once

#include "runtime/gpu.h"

namespace omniattn {
namespace {

// Sums each of kCount numbers over the threads, in a fixed order. All threads can then read the
// sums in `shared`, which has kCount kThreads elements; kThreads is a power of two.
template <unsigned kThreads, int kCount, class C>
__device__ __forceinline__ void block_sums(C* shared, const C (&x)[kCount]) {
  const unsigned thread = threadIdx.x;
  for (int i = 0; i < kCount; ++i) shared[i * kThreads + thread] = x[i];
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread >= half) continue;
    for (int i = 0; i < kCount; ++i) {
      shared[i * kThreads + thread] += shared[i * kThreads + thread + half];
    }
  }
  __syncthreads();
}

}  // namespace
}  // namespace omniattn
