// Products of tiles: a block of kGemmThreads threads computes Gemm::kRows x kGemmColumns sums over
// k and leaves them in shared memory, where the kernel continues with them. Gemm is GemmByMma
// (gpu_gemm_mma.h) or GemmByFma (gpu_gemm_fma.h); a kernel is a template over it:
//
//   auto& shared = *dynamic_shared<typename Gemm::Shared>();
//   Gemm::multiply(a, b, k, rows, shared);
//   for_row_parts<Gemm::kWidth>(rows, columns, lanes, [&](int r, int c) {
//     ... reads kWidth sums from shared.sums + r * kGemmStride + c on ...
//   });
//   __syncthreads();  // before the next tile
//
// Only the first `rows` rows of sums are defined.
#pragma once

#include "runtime/gpu.h"

namespace omniattn::gpu {

inline constexpr int kGemmThreads = 256;
inline constexpr int kGemmColumns = 128;
inline constexpr int kGemmStride = kGemmColumns + 4;  // row stride of sums, avoids bank conflicts

// An operand of a tile: rows (left operand) or columns (right operand) i of k elements each,
// contiguous along k if along_k(), else along i.
template <class X>
concept GemmOperand = requires(const X& x, int i, int64_t k) {
  *x.at(i, k);        // the address of an element
  bool(x.has(i, k));  // true if the element exists; otherwise it counts as 0
  bool(x.along_k());
  *x.data;  // any readable address
};
// An operand that is contiguous along i.
template <class X>
concept GemmOperandAcross = GemmOperand<X> && requires(const X& x) {
  bool(x.has_step());  // true if adjacent k are step() elements apart
  int64_t(x.step());
};

// Splits each row of a tile among `lanes` threads, which take W adjacent elements at a time.
template <int W, class F>
__device__ __forceinline__ void for_row_parts(int64_t rows, int64_t cols, int lanes, const F& f) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int r = thread / lanes; r < rows; r += kGemmThreads / lanes) {
    for (int c = thread % lanes * W; c < cols; c += lanes * W) f(r, c);
  }
}

}  // namespace omniattn::gpu
