// Forward over selected keys for any dtype and head size, see selected_attention.h. A block
// computes up to 64 rows (query, head) that share a list, for a chunk of the columns of V; it walks
// the list 64 keys at a time and stages them, from any addresses, through shared memory.
#include "kernels/selected_attention/selected_attention_tile_cuda.h"
#include "runtime/dispatch.h"

namespace omniattn {
namespace {

using namespace gpu;

template <class T>
OMNIATTN_FN int64_t forward_blocks(const SelectedForwardParams& params) {
  const AttentionProblem& p = params.attention.problem;
  return selected_items(params.lists, p) * row_tiles(params.lists, p) *
         chunks_of<compute_t<T>>(p.dv);
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    selected_forward_fma_kernel(const __grid_constant__ SelectedForwardParams params) {
  using A = compute_t<T>;
  constexpr int kColumns = kChunkColumns<A>;
  const int tx = thread_x(), ty = thread_y();
  auto& shared = *dynamic_shared<SelectedShared<T>>();
  Picked<T>& at = shared.at;
  const SelectedLists& s = params.lists;
  const AttentionProblem& p = params.attention.problem;
  const int64_t chunks = chunks_of<A>(p.dv), tiles = row_tiles(s, p);
  for (int64_t n = blockIdx.x; n < forward_blocks<T>(params); n += gridDim.x) {
    const int64_t first = n % chunks * kChunk<A>;
    const SelectedItem item = item_of_call(s, p, n / chunks / tiles);
    if (is_empty(item.queries)) continue;
    __syncthreads();
    pick_rows(p, {}, item, n / chunks % tiles, at);
    __syncthreads();
    A m[4], l[4], o[4][kColumns];  // l: this thread's part, over its columns
    clear(o);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      m[i] = initial_maximum<A>(p, larger(0, at.head[4 * ty + i]));
      l[i] = tx == 0 ? softmax_initial_sum(m[i]) : A(0);
    }
    for (int64_t keys = 0; keys < key_tiles(s); ++keys) {
      A x[4][4];  // logits, then weights
      pick_keys(s, p, item, keys, at);
      __syncthreads();
      multiply_rows(PickedRows<T>{at.q, kTile}, PickedRows<T>{at.k, kTile}, p.d, shared, x);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * ty + i;
        A top = m[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int c = tx + 16 * j;
          x[i][j] = logit_of(p, Tile{}, r, c, x[i][j], sees(s, p, at, r, c)).value;
          top = max(top, x[i][j]);
        }
        top = reduce_row(top, [](A a, A b) { return max(a, b); });
        const A shift = softmax_shift(top), exponent = exponent_factor<A>(p.score);
        const A alpha = exp2(exponent * (m[i] - shift));
        m[i] = top;
        l[i] *= alpha;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) o[i][j] *= alpha;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int c = tx + 16 * j;
          const A weight = exp2(exponent * (x[i][j] - shift));
          l[i] += weight;
          shared.tile[c * kLeading + r] =
              sees(s, p, at, r, c) ? weight * kept(p, item.b, at, r, c) : A(0);
        }
      }
      multiply_tile(shared.tile, kTile, PickedRows<T>{at.v, kTile}, first, p.dv, shared, o);
    }
    A factor[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * ty + i;
      const A sum = reduce_row(l[i], [](A a, A b) { return a + b; });
      factor[i] = row_factor(p.score, sum);
      if (tx == 0 && first == 0 && at.query[r] >= 0) {
        store_lse(params.attention, stat_of(p, item.b, at, r),
                  row_lse(p.score, m[i], sum, log(sum)));
      }
    }
    store_picked<T>(o, factor, at, first, p.dv, [&](int64_t query, int64_t head) {
      return row_of<T>(params.attention.out, item.b, query, head);
    });
  }
}

}  // namespace

Status launch_selected_forward(const SelectedForwardParams& params, Stream stream) {
  dispatch(params.attention.problem.dtype, [&]<class T>(T) {
    GPU_LAUNCH(selected_forward_fma_kernel<T>, item_grid(forward_blocks<T>(params)), kFmaThreads,
               sizeof(SelectedShared<T>), stream, params);
  });
  return launch_status();
}

}  // namespace omniattn
