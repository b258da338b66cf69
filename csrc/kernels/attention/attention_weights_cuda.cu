// The attention weights, from q, k and lse, or their sums over the queries, see
// attention_weights_cpu.cpp: by FMA for any dtype and head size. A block computes 64 keys of one
// head over the blocks of queries that see them, and sums them in that order.
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_distance_cuda.h"
#include "runtime/dispatch.h"

namespace omniattn {
namespace {

using namespace gpu;

OMNIATTN_FN int64_t weights_blocks(const AttentionProblem& p) {
  return p.batch * p.hq * ceil_div(p.tk, kTile);
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_weights_fma_kernel(const __grid_constant__ AttentionWeightsParams params) {
  using A = compute_t<T>;
  const int tx = thread_x(), ty = thread_y();
  auto& shared = *dynamic_shared<FmaShared<A>>();
  const AttentionProblem& p = params.problem;
  const int64_t blocks = ceil_div(p.tk, kTile);
  for (int64_t item = blockIdx.x; item < weights_blocks(p); item += gridDim.x) {
    const int64_t key = item % blocks * kTile, head = item / blocks;
    const int64_t b = head / p.hq, h = head % p.hq;
    const Sequence s = sequence_of(p, b);
    A sum[4] = {};
    Tile tile{s, b, h, 0, key, false};
    for (Tiles<Along::queries> tiles(p, tile); tiles.next(tile);) {
      A x[4][4];
      __syncthreads();
      shared.bits.load(p, tile);
      products_of<T>(p, tile, shared, x);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * ty + i;
        const bool inside = tile.q + r < s.tq;
        const int64_t row = row_index(p, s, h, inside ? tile.q + r : tile.q);
        const A exponent = exponent_factor<A>(p.score);
        const A lse = static_cast<const A*>(params.lse)[row];
        const A shift = is_softmax(p.score) ? lse_in_logits(p.score, lse) : A(0);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int c = tx + 16 * j;
          const A logit = score_of(p, tile, r, c, x[i][j], shared.bits.sees(tile, r, c));
          const A weight = is_softmax(p.score) ? exp2(exponent * (logit - shift))
                                               : weight_at(p.score, logit).value;
          sum[j] += weight;
          if (params.weights != nullptr && inside && key + c < s.tk) {
            static_cast<T*>(params.weights)[row * p.tk + key + c] = gpu::narrow<T>(weight);
          }
        }
      }
    }
    if (params.sums != nullptr) {
      store_column_sums(sum, shared, s.tk - key, static_cast<A*>(params.sums) + head * p.tk + key);
    }
  }
}

}  // namespace

Status launch_attention_weights(const AttentionWeightsParams& params, Stream stream) {
  dispatch(params.problem.dtype, [&]<class T>(T) {
    GPU_LAUNCH(attention_weights_fma_kernel<T>, item_grid(weights_blocks(params.problem)),
               kFmaThreads, sizeof(FmaShared<compute_t<T>>), stream, params);
  });
  return launch_status();
}

}  // namespace omniattn
