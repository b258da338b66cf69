// Attention weights from q, k and lse, or sums of them, see attention_weights_cpu.cpp: by FMA for
// any dtype and head size. A block computes 64 keys of one head of the result over the blocks of
// queries that see them, one query head after another, and sums in this order.
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_distance_cuda.h"
#include "runtime/dispatch.h"

namespace omniattn {
namespace {

using namespace gpu;

OMNIATTN_FN int64_t weights_blocks(const AttentionWeightsParams& w) {
  return w.problem.batch * weights_heads(w) * ceil_div(w.problem.tk, kTile);
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_weights_fma_kernel(const __grid_constant__ AttentionWeightsParams w) {
  using A = compute_t<T>;
  const int tx = thread_x(), ty = thread_y();
  auto& shared = *dynamic_shared<FmaShared<A>>();
  const AttentionProblem& p = w.problem;
  const int64_t blocks = ceil_div(p.tk, kTile), heads = weights_heads(w), summed = heads_summed(w);
  for (int64_t item = blockIdx.x; item < weights_blocks(w); item += gridDim.x) {
    const int64_t key = item % blocks * kTile, head = item / blocks, b = head / heads;
    const Sequence s = sequence_of(p, b);
    A sum[4] = {};
    for (int64_t n = 0; n < summed; ++n) {
      const int64_t h = head % heads * summed + n;
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
          const A lse = static_cast<const A*>(w.lse)[row];
          const A shift = is_softmax(p.score) ? lse_in_logits(p.score, lse) : A(0);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int c = tx + 16 * j;
            const A logit = score_of(p, tile, r, c, x[i][j], shared.bits.sees(tile, r, c));
            const A weight = is_softmax(p.score) ? exp2(exponent * (logit - shift))
                                                 : weight_at(p.score, logit).value;
            sum[j] += weight;
            if (w.column_sums || !inside || key + c >= s.tk) continue;
            const int64_t at = (head * p.tq + tile.q + r) * p.tk + key + c;
            if (w.group_sums) {
              static_cast<A*>(w.out)[at] += weight;
            } else {
              static_cast<T*>(w.out)[at] = gpu::narrow<T>(weight);
            }
          }
        }
      }
    }
    if (w.column_sums) {
      store_column_sums(sum, shared, s.tk - key, static_cast<A*>(w.out) + head * p.tk + key);
    }
  }
}

}  // namespace

Status launch_attention_weights(const AttentionWeightsParams& params, Stream stream) {
  dispatch(params.problem.dtype, [&]<class T>(T) {
    GPU_LAUNCH(attention_weights_fma_kernel<T>, item_grid(weights_blocks(params)), kFmaThreads,
               sizeof(FmaShared<compute_t<T>>), stream, params);
  });
  return launch_status();
}

}  // namespace omniattn
