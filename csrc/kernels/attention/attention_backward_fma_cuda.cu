// Backward for any dtype and head size, see attention_params.h. Every gradient has one owner, so
// that sums have a fixed order without atomics; in return each kernel recomputes P and dS:
//
//   delta   a warp per query row: rowsum(dO * O) - dlse
//   dq      a block per 64 queries of a head and chunk of columns, over the keys
//   dkdv    a block per 64 keys of a kv head and chunk of columns, over the heads and queries
//
// The gradients of bias, table, sinks and head scales are in attention_terms_cuda.cu, those of rows
// of distances in attention_distance_cuda.cu.
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_gradient_tile_cuda.h"
#include "runtime/dispatch.h"
#include "runtime/gpu_row.h"

namespace omniattn {
namespace {

using namespace gpu;

constexpr int kDeltaRows = 8;  // per block, one warp each

template <class T>
__global__ void __launch_bounds__(32 * kDeltaRows)
    attention_delta_kernel(const __grid_constant__ AttentionBackwardParams params) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; row < query_rows(p); row += step) {
    const int64_t q = row % p.tq, h = row / p.tq % p.hq;
    const Sequence s = sequence_of(p, row / p.tq / p.hq);
    if (q >= s.tq) continue;
    const int64_t stat = row_index(p, s, h, q);
    const T* const out = row_of<T>(params.out, s.entry, s.q + q, h);
    const T* const grad = row_of<T>(params.grad_out, s.entry, s.q + q, h);
    A sum = 0;
    for (int64_t c = threadIdx.x; c < p.dv; c += 32)
      sum += gpu::widen(out[c]) * gpu::widen(grad[c]);
    sum = warp_reduce(sum, [](A x, A y) { return x + y; });
    if (params.grad_lse != nullptr) sum -= static_cast<const A*>(params.grad_lse)[stat];
    if (threadIdx.x != 0) continue;
    static_cast<A*>(params.workspace)[stat] = sum;
    if (params.part_sinks != nullptr) {
      const RowStats<A> stats = stats_of<A>(params, stat);
      const A distance = initial_maximum<A>(p, h) - stats.shift;
      static_cast<A*>(params.part_sinks)[stat] =
          -stats.factor * exp2(exponent_factor<A>(p.score) * distance) * sum;
    }
  }
}

template <class T>
OMNIATTN_FN int64_t dq_blocks(const AttentionProblem& p) {
  return p.batch * p.hq * ceil_div(p.tq, kTile) * chunks_of<compute_t<T>>(p.d);
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_dq_fma_kernel(const __grid_constant__ AttentionBackwardParams params) {
  using A = compute_t<T>;
  auto& shared = *dynamic_shared<GradientShared<A>>();
  const AttentionProblem& p = params.problem;
  const int64_t chunks = chunks_of<A>(p.d), blocks = ceil_div(p.tq, kTile);
  for (int64_t item = blockIdx.x; item < dq_blocks<T>(p); item += gridDim.x) {
    const int64_t first = item % chunks * kChunk<A>, head = item / chunks / blocks;
    const Sequence s = sequence_of(p, head / p.hq);
    Tile tile{s, head / p.hq, head % p.hq, item / chunks % blocks * kTile, 0, false};
    if (tile.q >= s.tq) continue;
    A dq[4][kChunkColumns<A>];
    clear(dq);
    for (Tiles<Along::keys> tiles(p, tile); tiles.next(tile);) {
      gradient_tile<T, Sum::keys>(
          params, tile, shared, [&](int at, const PairGradient<A>& g) { shared.tile[at] = g.dot; });
      const int64_t kv = kv_head(tile.h, p.hq, p.hkv);
      multiply_tile(shared.tile, s.tq - tile.q, keys_of<T>(p.k, s, kv, tile.k), first, p.d, shared,
                    dq);
      if (p.relative_keys.data != nullptr) {
        add_band_rows<true>(band_of<A>(p, p.relative_keys, tile), shared.tile, first, shared, dq);
      }
    }
    const auto q = queries_of<T>(p.q, s, tile.h, tile.q);
    const A scale = gradient_scale<A>(p) * head_factor<A>(p, tile.h);
    store_rows(dq, {scale, scale, scale, scale},
               row_of<T>(params.grad_q, s.entry, s.q + tile.q, tile.h), params.grad_q.stride_t,
               q.count, first, p.d);
    if (params.part_head_scale == nullptr) continue;
    A* const parts = static_cast<A*>(params.part_head_scale) + item % chunks * stat_rows(p) +
                     row_index(p, s, tile.h, tile.q);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * thread_y() + i;
      A sum = 0;
#pragma unroll
      for (int j = 0; j < kChunkColumns<A>; ++j) {
        const int64_t c = first + thread_x() + 16 * j;
        if (r < q.count && c < p.d) sum += gpu::widen(q.data[r * q.stride + c]) * dq[i][j];
      }
      sum = reduce_row(sum, [](A x, A y) { return x + y; });
      if (thread_x() == 0 && r < q.count) {
        parts[r] = sum * gradient_scale<A>(p);
      }
    }
  }
}

template <class T>
OMNIATTN_FN int64_t dkdv_blocks(const AttentionProblem& p) {
  return p.batch * p.hkv * ceil_div(p.tk, kTile) * chunks_of<compute_t<T>>(p.d > p.dv ? p.d : p.dv);
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_dkdv_fma_kernel(const __grid_constant__ AttentionBackwardParams params) {
  using A = compute_t<T>;
  auto& shared = *dynamic_shared<GradientShared<A>>();
  const AttentionProblem& p = params.problem;
  const int64_t chunks = chunks_of<A>(max(p.d, p.dv)), blocks = ceil_div(p.tk, kTile);
  for (int64_t item = blockIdx.x; item < dkdv_blocks<T>(p); item += gridDim.x) {
    const int64_t first = item % chunks * kChunk<A>, head = item / chunks / blocks;
    const int64_t b = head / p.hkv, kv = head % p.hkv, key = item / chunks % blocks * kTile;
    const Sequence s = sequence_of(p, b);
    if (key >= s.tk) continue;
    A dk[4][kChunkColumns<A>], dv[4][kChunkColumns<A>];
    clear(dk);
    clear(dv);
    for (int64_t h = kv * group_size(p); h < (kv + 1) * group_size(p); ++h) {
      const A factor = head_factor<A>(p, h);
      Tile tile{s, b, h, 0, key, false};
      for (Tiles<Along::queries> tiles(p, tile); tiles.next(tile);) {
        gradient_tile<T, Sum::queries>(params, tile, shared, [&](int at, const PairGradient<A>& g) {
          shared.tile[at] = g.weight;
          shared.other[at] = factor * g.dot;
        });
        multiply_tile(shared.tile, s.tk - key, queries_of<T>(params.grad_out, s, h, tile.q), first,
                      p.dv, shared, dv);
        multiply_tile(shared.other, s.tk - key, queries_of<T>(p.q, s, h, tile.q), first, p.d,
                      shared, dk);
        if (p.relative_queries.data != nullptr) {
          add_band_rows<false>(band_of<A>(p, p.relative_queries, tile), shared.other, first, shared,
                               dk);
        }
      }
    }
    const auto scale = gradient_scale<A>(p);
    store_rows(dk, {scale, scale, scale, scale}, row_of<T>(params.grad_k, s.entry, s.k + key, kv),
               params.grad_k.stride_t, s.tk - key, first, p.d);
    store_rows(dv, {1, 1, 1, 1}, row_of<T>(params.grad_v, s.entry, s.k + key, kv),
               params.grad_v.stride_t, s.tk - key, first, p.dv);
  }
}

}  // namespace

Status launch_attention_delta(const AttentionBackwardParams& params, Stream stream) {
  dispatch(params.problem.dtype, [&]<class T>(T) {
    GPU_LAUNCH(attention_delta_kernel<T>,
               item_grid(ceil_div(query_rows(params.problem), kDeltaRows)), dim3(32, kDeltaRows), 0,
               stream, params);
  });
  return launch_status();
}

Status launch_attention_gradients(const AttentionBackwardParams& params, Stream stream) {
  const AttentionProblem& p = params.problem;
  dispatch(p.dtype, [&]<class T>(T) {
    constexpr size_t kBytes = sizeof(GradientShared<compute_t<T>>);
    GPU_LAUNCH(attention_dq_fma_kernel<T>, item_grid(dq_blocks<T>(p)), kFmaThreads, kBytes, stream,
               params);
    if (p.tk == 0) return;
    GPU_LAUNCH(attention_dkdv_fma_kernel<T>, item_grid(dkdv_blocks<T>(p)), kFmaThreads, kBytes,
               stream, params);
  });
  return launch_status();
}

}  // namespace omniattn
