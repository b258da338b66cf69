// The product of gpu_gemm.h by tensor cores: 8 warps compute 64 x 32 elements each of a tile of 128
// x 128, in steps of 64 along k, while the next 64 are being copied.
#pragma once

#include "runtime/gpu_gemm.h"
#include "runtime/gpu_mma.h"

namespace omniattn::gpu {

// kAAlongK, kBAlongK: true if the operand is contiguous along k. Contiguous elements exist in whole
// groups of eight, aligned to 16 bytes.
template <class T, bool kAAlongK, bool kBAlongK>
struct GemmByMma {
  using Element = T;
  static constexpr int kRows = 128, kWidth = 8, kDepth = 64;
  // 68 KiB of shared memory and at most 128 registers per thread: two blocks per SM of sm_80.
  static constexpr int kBlocksPerSM = 2;

  struct Stage {
    T a[kRows * kDepth], b[kGemmColumns * kDepth];
  };
  union Shared {
    struct {
      Stage stages[2];
      const T* rows[2][128];  // first elements of the operands' indices, if along k
    };
    float sums[kRows * kGemmStride];
  };

  // Copy of 128 indices x kDepth in shared memory; a row is an index or a step of k.
  template <bool kAlongK>
  using Copy = SharedRows<T, kAlongK ? kDepth : 128>;

  // An index that exists, for i. What is computed for an index that does not exist is not used.
  template <GemmOperand Operand>
  static __device__ __forceinline__ int existing(const Operand& from, int i) {
    return from.has(i, 0) ? i : 0;
  }
  // Starts the copy of kDepth steps of k, for operands along k. Steps past the end are zeros.
  template <GemmOperand Operand>
  static __device__ __forceinline__ void load_along(const Operand& from, const T* const* rows,
                                                    int64_t k, T* to) {
    constexpr int kPieces = kDepth / 8;
    const int first = static_cast<int>(threadIdx.x) / kPieces;
    const int c = static_cast<int>(threadIdx.x) % kPieces;
    const bool valid = from.has(0, k + 8 * c);
    const int64_t at = valid ? k + 8 * c : 0;
#pragma unroll
    for (int r = 0; r < 128; r += kGemmThreads / kPieces) {
      cp_async_16(to + Copy<true>::offset(first + r, c), rows[first + r] + at, valid);
    }
  }
  // The same for operands across k.
  template <GemmOperandAcross Operand>
  static __device__ __forceinline__ void load_across(const Operand& from, int64_t k, T* to) {
    constexpr int kPieces = 128 / 8, kStep = kGemmThreads / kPieces;
    const int first = static_cast<int>(threadIdx.x) / kPieces;
    const int c = static_cast<int>(threadIdx.x) % kPieces;
    const int i = existing(from, 8 * c);
    if (from.has(0, k + kDepth - 1) && from.has_step()) {
      const T* at = from.at(i, k + first);
#pragma unroll
      for (int r = 0; r < kDepth; r += kStep, at += kStep * from.step()) {
        cp_async_16(to + Copy<false>::offset(first + r, c), at);
      }
    } else {
#pragma unroll 1  // for registers
      for (int r = first; r < kDepth; r += kStep) {
        const bool valid = from.has(0, k + r);
        cp_async_16(to + Copy<false>::offset(r, c), from.at(i, valid ? k + r : k), valid);
      }
    }
  }
  template <bool kAlongK, class Operand>
  static __device__ __forceinline__ void load(const Operand& from, const T* const* rows, int64_t k,
                                              T* to) {
    if constexpr (kAlongK) {
      load_along(from, rows, k, to);
    } else {
      load_across(from, k, to);
    }
  }

  // A lane's offset for pieces 2 n and 2 n + 1 is its offset for pieces 0 and 1, xor 16 n. opaque()
  // turns this into one operation per use instead of one register per piece.
  struct Lane {
    int left, right;

    __device__ __forceinline__ Lane() {
      const int lane = lane_id(), low = lane % 16, high = lane / 16;
      const int swapped = high * 8 + lane % 8, other = lane / 8 % 2;
      left = kAAlongK ? Copy<true>::offset(low, high) : Copy<false>::offset(swapped, other);
      right = kBAlongK ? Copy<true>::offset(swapped, other) : Copy<false>::offset(low, high);
    }
    template <bool kAlongK>
    static __device__ __forceinline__ void load(uint32_t (&x)[4], const T* from, int at, int first,
                                                int step) {
      if constexpr (kAlongK) {
        ldmatrix_x4(x, from + first * kDepth + (opaque(at) ^ 16 * step));
      } else {
        ldmatrix_x4_trans(x, from + 16 * step * 128 + (opaque(at) ^ first));
      }
    }
    // Loads rows [first, first + 16), k [16 step, 16 step + 16) of the left operand.
    __device__ __forceinline__ void load_left(uint32_t (&a)[4], const Stage& stage, int first,
                                              int step) const {
      load<kAAlongK>(a, stage.a, left, first, step);
    }
    // Loads columns [first, first + 16) of the right operand, for two products of 8 columns.
    __device__ __forceinline__ void load_right(uint32_t (&b)[4], const Stage& stage, int first,
                                               int step) const {
      load<kBAlongK>(b, stage.b, right, first, step);
    }
  };

  // shared.sums = a b, for the first `rows` rows.
  template <GemmOperand A, GemmOperand B>
  static __device__ __forceinline__ void multiply(const A& a, const B& b, int64_t k, int rows,
                                                  Shared& shared) {
    const Lane lane;
    const int first_row = warp_id() / 4 * 64, first_column = warp_id() % 4 * 32;
    float acc[4][4][4];
#pragma unroll
    for (int m = 0; m < 4; ++m) clear(acc[m]);
    const auto load = [&](int64_t from) {
      Stage& stage = shared.stages[from / kDepth % 2];
      GemmByMma::load<kAAlongK>(a, shared.rows[0], from, stage.a);
      GemmByMma::load<kBAlongK>(b, shared.rows[1], from, stage.b);
      cp_async_commit();
    };
    if (k > 0) {
      const int i = static_cast<int>(threadIdx.x);
      static_assert(kGemmThreads == 2 * 128);
      if (kAAlongK && i < 128) shared.rows[0][i] = a.at(existing(a, i), 0);
      if (kBAlongK && i >= 128) shared.rows[1][i - 128] = b.at(existing(b, i - 128), 0);
      if (kAAlongK || kBAlongK) __syncthreads();
      load(0);
    }
    for (int64_t from = 0; from < k; from += kDepth) {
      cp_async_wait<0>();
      __syncthreads();  // this stage has arrived, and all threads have read the other one
      if (from + kDepth < k) load(from + kDepth);
      const Stage& stage = shared.stages[from / kDepth % 2];
#pragma unroll
      for (int step = 0; step < kDepth / 16; ++step) {
        uint32_t right[2][4];
        lane.load_right(right[0], stage, first_column, step);
        lane.load_right(right[1], stage, first_column + 16, step);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          if (first_row + 16 * m >= rows) continue;
          uint32_t left[4];
          lane.load_left(left, stage, first_row + 16 * m, step);
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            mma<T>(acc[m][n], left, {right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]});
          }
        }
      }
    }
    __syncthreads();
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = first_row + 16 * m + g + i / 2 * 8;
          shared.sums[row * kGemmStride + first_column + 8 * n + 2 * t + i % 2] = acc[m][n][i];
        }
      }
    }
    __syncthreads();
  }
};

}  // namespace omniattn::gpu
