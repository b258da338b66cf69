// Grouped products by tensor cores, see moe_cuda.h and moe_tile_cuda.h: 8 warps compute 64 x 32
// numbers each of a tile of 128 x 128, 64 deep at a time; the next 64 are copied meanwhile.
#include "kernels/moe/moe_tile_cuda.h"
#include "runtime/gpu_mma.h"

namespace omniattn {
namespace gpu {

// Operands whose elements are neighbours along k (k64 rows of the copies) or along rows and
// columns.
template <class T, bool kAAlongK, bool kBAlongK>
struct MoeMmaEngine {
  using Element = T;
  static constexpr int kRows = 128, kWidth = 8, kDepth = 64;
  // 68 KiB of shared memory and at most 128 registers per thread: two blocks on an sm_80.
  static constexpr int kBlocksPerSM = 2;

  struct Stage {
    T a[kRows * kDepth], b[kMoeTileColumns * kDepth];
  };
  union Shared {
    Stage stages[2];
    float sums[kRows * kMoeTileStride];
  };

  // 128 indices x kDepth; the rows in shared memory are indices, or steps of k.
  template <bool kAlongK>
  using Copy = SharedRows<T, kAlongK ? kDepth : 128>;

  template <bool kAlongK, class Operand>
  static __device__ __forceinline__ void load_stage(const Operand& from, int64_t k, T* to) {
    constexpr int kPieces = (kAlongK ? kDepth : 128) / 8;
#pragma unroll 1  // for registers
    for (int n = static_cast<int>(threadIdx.x); n < 128 * kDepth / 8; n += kMoeThreads) {
      const int row = n / kPieces, c = n % kPieces;
      const int i = kAlongK ? row : 8 * c;
      const int64_t at = k + (kAlongK ? 8 * c : row);
      const bool valid = from.has(i, at);
      cp_async_16(to + Copy<kAlongK>::offset(row, c), valid ? from.at(i, at) : from.data, valid);
    }
  }

  // Below, a lane's offset for pieces 2 n and 2 n + 1 is that for pieces 0 and 1, xor 16 n.
  // (opaque: one operation each time, instead of a register for each place.)
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
    // Rows [first, first + 16) and k [16 step, 16 step + 16) of the left operand.
    __device__ __forceinline__ void load_left(uint32_t (&a)[4], const Stage& stage, int first,
                                              int step) const {
      load<kAAlongK>(a, stage.a, left, first, step);
    }
    // Columns [first, first + 16) of the right one: those of two products of 8 columns.
    __device__ __forceinline__ void load_right(uint32_t (&b)[4], const Stage& stage, int first,
                                               int step) const {
      load<kBAlongK>(b, stage.b, right, first, step);
    }
  };

  // shared.sums = a b, for the rows that there are.
  template <class A, class B>
  static __device__ __forceinline__ void multiply(const A& a, const B& b, int64_t k, int rows,
                                                  Shared& shared) {
    const Lane lane;
    const int first_row = warp_id() / 4 * 64, first_column = warp_id() % 4 * 32;
    float acc[4][4][4];
#pragma unroll
    for (int m = 0; m < 4; ++m) clear(acc[m]);
    const auto load = [&](int64_t from) {
      Stage& stage = shared.stages[from / kDepth % 2];
      load_stage<kAAlongK>(a, from, stage.a);
      load_stage<kBAlongK>(b, from, stage.b);
      cp_async_commit();
    };
    if (k > 0) load(0);
    for (int64_t from = 0; from < k; from += kDepth) {
      cp_async_wait<0>();
      __syncthreads();  // this stage has arrived, the other one has been read
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
          shared.sums[row * kMoeTileStride + first_column + 8 * n + 2 * t + i % 2] = acc[m][n][i];
        }
      }
    }
    __syncthreads();
  }
};

template <bool kAAlongK, bool kBAlongK, class Params>
void enqueue_mma(DType dtype, const Params& p, Stream stream) {
  if (dtype == DType::bf16) {
    enqueue<MoeMmaEngine<bf16, kAAlongK, kBAlongK>>(p, stream);
  } else {
    enqueue<MoeMmaEngine<f16, kAAlongK, kBAlongK>>(p, stream);
  }
}

}  // namespace gpu

namespace {

template <class Params>
Status launch(const Params& p, Stream stream) {
  if (gpu::is_empty(p)) return nullptr;
  if (p.product.b.k_stride == 1) {
    gpu::enqueue_mma<true, true>(p.product.dtype, p, stream);
  } else {
    gpu::enqueue_mma<true, false>(p.product.dtype, p, stream);
  }
  return gpu::launch_status();
}

Status launch_weight_grad(const MoeWeightGrad& p, Stream stream) {
  if (gpu::is_empty(p)) return nullptr;
  gpu::enqueue_mma<false, false>(p.dtype, p, stream);
  return gpu::launch_status();
}

}  // namespace

const MoeProductKernels kMoeMma{.block_rows = 128,
                                .up = launch<MoeUpProduct>,
                                .up_backward = launch<MoeUpBackwardProduct>,
                                .project = launch<MoeProjectProduct>,
                                .weight_grad = launch_weight_grad};

}  // namespace omniattn
