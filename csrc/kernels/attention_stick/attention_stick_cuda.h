// Shared by forward and backward of attention whose weights break a stick: the costs of the keys of
// a row, on 16 threads, and sums of them.
#pragma once

#include "runtime/gpu_fma.h"

namespace omniattn {
namespace {

using namespace gpu;

// sigmoid(z) and softplus(z).
template <class A>
struct StickKey {
  A share, cost;
};
template <class A>
__device__ __forceinline__ StickKey<A> stick_key(A z) {
  const A e = exp(z < A(0) ? z : -z), share = A(1) / (A(1) + e);
  return {z < A(0) ? e * share : share, (z < A(0) ? A(0) : z) + log1p(e)};
}

// Sums over the 16 threads of a row: of each thread and those after it or, if kStep is negative,
// before it.
template <int kStep, class A>
__device__ __forceinline__ A row_scan(A x) {
  const int tx = thread_x(), first = static_cast<int>(threadIdx.x) % 32 - tx;
#pragma unroll
  for (int step = 1; step < 16; step *= 2) {
    const int from = tx + kStep * step;
    const bool inside = 0 <= from && from < 16;
    const A other = __shfl_sync(0xffffffffu, x, first + (inside ? from : tx));
    if (inside) x += other;
  }
  return x;
}
// x of the thread `tx` of this row.
template <class A>
__device__ __forceinline__ A from_thread(A x, int tx) {
  return __shfl_sync(0xffffffffu, x, static_cast<int>(threadIdx.x) % 32 - thread_x() + tx);
}

// after[j] = sum of the costs of all keys of the row after key tx + 16 j; returns the sum of all.
// Forward and backward compute it in the same way.
template <class A>
__device__ __forceinline__ A sum_costs(const A (&cost)[4], A (&after)[4]) {
  A sum = 0;
#pragma unroll
  for (int j = 3; j >= 0; --j) {
    const A from_here = row_scan<1>(cost[j]);
    const A later = from_thread(from_here, min(thread_x() + 1, 15));
    after[j] = sum + (thread_x() < 15 ? later : A(0));
    sum += from_thread(from_here, 0);
  }
  return sum;
}

}  // namespace
}  // namespace omniattn
