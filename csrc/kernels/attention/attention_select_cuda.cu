// Finds for each query the key with the largest logit, the first among equal ones, see
// attention_params.h: by FMA for any dtype and head size. A block processes 64 queries of one head
// over all keys; each thread keeps the best of its columns, and the threads of a row compare theirs
// at the end.
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_distance_cuda.h"
#include "runtime/dispatch.h"

namespace omniattn {
namespace {

using namespace gpu;

OMNIATTN_FN int64_t select_blocks(const AttentionProblem& p) {
  return p.batch * p.hq * ceil_div(p.tq, kTile);
}

// Best key so far; NaN is never chosen.
template <class A>
struct Best {
  A top;
  int64_t key;

  __device__ __forceinline__ void meet(A logit, int64_t at) {
    if (logit > top || (logit == top && key >= 0 && at >= 0 && at < key)) {
      top = logit;
      key = at;
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_select_fma_kernel(const __grid_constant__ AttentionSelectParams params) {
  using A = compute_t<T>;
  const int tx = thread_x(), ty = thread_y();
  auto& shared = *dynamic_shared<FmaShared<A>>();
  const AttentionProblem& p = params.problem;
  const int64_t blocks = ceil_div(p.tq, kTile);
  for (int64_t item = blockIdx.x; item < select_blocks(p); item += gridDim.x) {
    const int64_t head = item / blocks, b = head / p.hq, h = head % p.hq;
    const Sequence s = sequence_of(p, b);
    Tile tile{s, b, h, item % blocks * kTile, 0, false};
    Best<A> best[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) best[i] = {negative_infinity<A>(), -1};
    for (Tiles<Along::keys> tiles(p, tile); tiles.next(tile);) {
      A x[4][4];
      __syncthreads();
      shared.bits.load(p, tile);
      products_of<T>(p, tile, shared, x);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * ty + i;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int c = tx + 16 * j;
          const bool sees = shared.bits.sees(tile, r, c);
          best[i].meet(score_of(p, tile, r, c, x[i][j], sees), tile.k + c);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int bits = 8; bits > 0; bits /= 2) {
        const A top = __shfl_xor_sync(0xffffffffu, best[i].top, bits);
        best[i].meet(top, __shfl_xor_sync(0xffffffffu, best[i].key, bits));
      }
      const int64_t q = tile.q + 4 * ty + i;
      if (tx != 0 || q >= s.tq) continue;
      params.index[row_index(p, s, h, q)] = best[i].key;
      static_cast<A*>(params.top)[row_index(p, s, h, q)] = from_logit(p.score, best[i].top);
    }
  }
}

}  // namespace

Status launch_attention_select(const AttentionSelectParams& params, Stream stream) {
  dispatch(params.problem.dtype, [&]<class T>(T) {
    GPU_LAUNCH(attention_select_fma_kernel<T>, item_grid(select_blocks(params.problem)),
               kFmaThreads, sizeof(FmaShared<compute_t<T>>), stream, params);
  });
  return launch_status();
}

}  // namespace omniattn
