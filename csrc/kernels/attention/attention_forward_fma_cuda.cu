// Forward for any dtype and head size, see attention_params.h. A block computes 64 queries of one
// head for a chunk of the columns of V; wider values take more blocks, each of which repeats the
// softmax.
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_distance_cuda.h"
#include "runtime/dispatch.h"

namespace omniattn {
namespace {

using namespace gpu;

// Unnormalised weights, which add their part of the denominator to `sum`.
template <class A>
__device__ __forceinline__ A soft_weight(A exponent, A& sum) {
  const A weight = exp2(exponent);
  sum += weight;
  return weight;
}
template <class A>
__device__ __forceinline__ A pick_weight(A logit, A shift, A& sum) {
  if (logit == negative_infinity<A>()) return A(0);  // hidden
  const A power = shifted_power(logit, shift).value;
  sum += abs(power);
  return max(A(0), power);
}

template <class T>
OMNIATTN_FN int64_t forward_blocks(const AttentionProblem& p) {
  return p.batch * p.hq * ceil_div(p.tq, kTile) * chunks_of<compute_t<T>>(p.dv);
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_forward_fma_kernel(const __grid_constant__ AttentionForwardParams params) {
  using A = compute_t<T>;
  constexpr int kColumns = kChunkColumns<A>;
  const int tx = thread_x(), ty = thread_y();
  auto& shared = *dynamic_shared<FmaShared<A>>();
  const AttentionProblem& p = params.problem;
  const int64_t chunks = chunks_of<A>(p.dv), blocks = ceil_div(p.tq, kTile);
  for (int64_t item = blockIdx.x; item < forward_blocks<T>(p); item += gridDim.x) {
    const int64_t first = item % chunks * kChunk<A>, head = item / chunks / blocks;
    const Sequence s = sequence_of(p, head / p.hq);
    Tile tile{s, head / p.hq, head % p.hq, item / chunks % blocks * kTile, 0, false};
    if (tile.q >= s.tq) continue;
    const int64_t kv = kv_head(tile.h, p.hq, p.hkv);
    const auto q = queries_of<T>(p.q, s, tile.h, tile.q);
    A m[4], l[4], o[4][kColumns];  // l: this thread's part, over its columns
    clear(o);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      m[i] = is_softpick(p.score) ? A(0) : initial_maximum<A>(p, tile.h);
      l[i] = tx == 0 && is_softmax(p.score) ? softmax_initial_sum(m[i]) : A(0);
    }

    for (Tiles<Along::keys> tiles(p, tile); tiles.next(tile);) {
      A x[4][4];  // logits, then weights
      shared.bits.load(p, tile);
      products_of<T>(p, tile, shared, x);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * ty + i;
        A top = m[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int c = tx + 16 * j;
          x[i][j] = score_of(p, tile, r, c, x[i][j], shared.bits.sees(tile, r, c));
          if (!divides_rows(p.score)) x[i][j] = weight_at(p.score, x[i][j]).value;
          top = max(top, x[i][j]);
        }
        if (divides_rows(p.score)) {
          top = reduce_row(top, [](A a, A b) { return max(a, b); });
          const A shift = softmax_shift(top), exponent = exponent_factor<A>(p.score);
          const A alpha = exp2(exponent * (m[i] - shift));
          m[i] = top;
          l[i] *= alpha;
#pragma unroll
          for (int j = 0; j < kColumns; ++j) o[i][j] *= alpha;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            x[i][j] = is_softpick(p.score) ? pick_weight(x[i][j], shift, l[i])
                                           : soft_weight(exponent * (x[i][j] - shift), l[i]);
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int c = tx + 16 * j;
          shared.tile[c * kLeading + r] = x[i][j] * shared.bits.template factor<A>(p, r, c);
        }
      }
      multiply_tile(shared.tile, q.count, keys_of<T>(p.v, s, kv, tile.k), first, p.dv, shared, o);
    }

    A factor[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      l[i] = reduce_row(l[i], [](A a, A b) { return a + b; });
      factor[i] = row_factor(p.score, l[i]);
      const int64_t query = tile.q + 4 * ty + i;
      if (first == 0 && tx == 0 && query < s.tq) {
        store_lse(params, row_index(p, s, tile.h, query), row_lse(p.score, m[i], l[i], log(l[i])));
      }
    }
    store_rows(o, factor, row_of<T>(params.out, s.entry, s.q + tile.q, tile.h), params.out.stride_t,
               q.count, first, p.dv);
  }
}

}  // namespace

Status launch_attention(const AttentionForwardParams& params, Stream stream) {
  dispatch(params.problem.dtype, [&]<class T>(T) {
    GPU_LAUNCH(attention_forward_fma_kernel<T>, item_grid(forward_blocks<T>(params.problem)),
               kFmaThreads, sizeof(FmaShared<compute_t<T>>), stream, params);
  });
  return launch_status();
}

}  // namespace omniattn
