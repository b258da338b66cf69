// The product of gpu_gemm.h by FMA in the compute type, for any dtype and alignment. Tiles are
// 64 x 128; each thread computes 4 x 8 elements.
#pragma once

#include "runtime/gpu_fma.h"
#include "runtime/gpu_gemm.h"

namespace omniattn::gpu {

template <class T>
struct GemmByFma {
  using Element = T;
  using C = compute_t<T>;
  static constexpr int kRows = kFmaRows, kWidth = 1, kBlocksPerSM = 1;
  static_assert(kGemmThreads == kFmaThreads);

  struct Stage {
    C a[kDepth * kLeading], b[kDepth * kGemmStride];
  };
  union Shared {
    Stage stage;
    C sums[kRows * kGemmStride];
  };

  // to[c][i] = element k + c of index i. Threads are assigned in the order of elements in memory.
  template <int kCount, class Operand>
  static __device__ __forceinline__ void load_stage(const Operand& from, int64_t k, C* to,
                                                    int stride) {
    const bool along_k = from.along_k();
#pragma unroll
    for (int n = 0; n < kCount * kDepth / kGemmThreads; ++n) {
      const int at = static_cast<int>(threadIdx.x) + n * kGemmThreads;
      const int i = along_k ? at / kDepth : at % kCount;
      const int c = along_k ? at % kDepth : at / kCount;
      to[c * stride + i] = from.has(i, k + c) ? gpu::widen(*from.at(i, k + c)) : C(0);
    }
  }

  // shared.sums = a b, for the first `rows` rows.
  template <GemmOperand A, GemmOperand B>
  static __device__ __forceinline__ void multiply(const A& a, const B& b, int64_t k, int rows,
                                                  Shared& shared) {
    constexpr int kColumns = kGemmColumns / 16;
    const int x = thread_x(), y = thread_y();
    C acc[4][kColumns];
    clear(acc);
    for (int64_t from = 0; from < k; from += kDepth) {
      load_stage<kRows>(a, from, shared.stage.a, kLeading);
      load_stage<kGemmColumns>(b, from, shared.stage.b, kGemmStride);
      __syncthreads();
      if (4 * y < rows) multiply_staged(shared.stage.a, shared.stage.b, kGemmStride, acc);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        shared.sums[(4 * y + i) * kGemmStride + x + 16 * j] = acc[i][j];
      }
    }
    __syncthreads();
  }
};

}  // namespace omniattn::gpu
