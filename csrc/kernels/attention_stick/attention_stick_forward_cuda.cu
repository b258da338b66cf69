// Forward of attention whose weights break a stick (see semantics/stick_breaking.h), for any dtype
// and head size. Threads and owners of results are those of attention_forward_fma_cuda.cu, but a
// block, of 64 queries of a head and a chunk of columns, walks its keys from the last to the first.
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_distance_cuda.h"
#include "kernels/attention_stick/attention_stick_cuda.h"
#include "runtime/dispatch.h"

namespace omniattn {
namespace {

// Moves a tile to the last tile that is left.
__device__ __forceinline__ bool last_tile(Tiles<Along::keys>& tiles, Tile& tile) {
  bool found = false;
  for (Range left = tiles.blocks.left; !found && !is_empty(left); tiles.blocks.left = left) {
    --left.end;
    tiles.blocks.left = {left.end, left.end + 1};
    found = tiles.next(tile);
  }
  return found;
}

template <class T>
OMNIATTN_FN int64_t forward_blocks(const AttentionProblem& p) {
  return p.batch * p.hq * ceil_div(p.tq, kTile) * chunks_of<compute_t<T>>(p.dv);
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_stick_forward_kernel(const __grid_constant__ AttentionForwardParams params) {
  using A = compute_t<T>;
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
    A o[4][kChunkColumns<A>];
    clear(o);
    ExactSum<A> beyond[4] = {};
    for (Tiles<Along::keys> tiles(p, tile); last_tile(tiles, tile);) {
      A x[4][4];
      shared.bits.load(p, tile);
      products_of<T>(p, tile, shared, x);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * ty + i;
        A share[4], cost[4], after[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int c = tx + 16 * j;
          const A z = score_of(p, tile, r, c, x[i][j], shared.bits.sees(tile, r, c));
          const StickKey<A> key = stick_key(z);
          share[j] = key.share;
          cost[j] = key.cost;
        }
        const A sum = sum_costs(cost, after), rest = beyond[i].total();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int c = tx + 16 * j;
          shared.tile[c * kLeading + r] =
              share[j] * exp(-(rest + after[j])) * shared.bits.template factor<A>(p, r, c);
        }
        beyond[i].add(sum);
      }
      multiply_tile(shared.tile, s.tq - tile.q, keys_of<T>(p.v, s, kv, tile.k), first, p.dv, shared,
                    o);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t query = tile.q + 4 * ty + i;
      if (first == 0 && tx == 0 && query < s.tq) {
        store_lse(params, row_index(p, s, tile.h, query),
                  row_lse(p.score, beyond[i].value, beyond[i].error, A(0)));
      }
    }
    store_rows(o, {1, 1, 1, 1}, row_of<T>(params.out, s.entry, s.q + tile.q, tile.h),
               params.out.stride_t, s.tq - tile.q, first, p.dv);
  }
}

}  // namespace

Status launch_attention_stick(const AttentionForwardParams& params, Stream stream) {
  dispatch(params.problem.dtype, [&]<class T>(T) {
    GPU_LAUNCH(attention_stick_forward_kernel<T>, item_grid(forward_blocks<T>(params.problem)),
               kFmaThreads, sizeof(FmaShared<compute_t<T>>), stream, params);
  });
  return launch_status();
}

}  // namespace omniattn
