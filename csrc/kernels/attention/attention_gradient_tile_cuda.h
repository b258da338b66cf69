// Gradients of the pairs of a tile. Every kernel of the backward recomputes them and
// derives its own gradient from them.
#pragma once

#include "kernels/attention/attention_distance_cuda.h"

namespace omniattn::gpu {

// Computes q.k into shared.tile and dP into shared.other, where each thread has its own pairs:
// query r = 4 ty + i and key c = tx + 16 j. Begins and ends with a barrier.
template <class T, Sum kSum>
__device__ __forceinline__ void products_of_pairs(const AttentionBackwardParams& params,
                                                  const Tile& tile,
                                                  GradientShared<compute_t<T>>& shared) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t kv = kv_head(tile.h, p.hq, p.hkv);
  const int tx = thread_x(), ty = thread_y();
  const auto keep = [&](const A(&acc)[4][4], A* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[place<kSum>(4 * ty + i, tx + 16 * j)] = acc[i][j];
    }
  };
  A acc[4][4];
  __syncthreads();
  shared.bits.load(p, tile);
  const Sequence& s = tile.sequence;
  products_of<T>(p, tile, shared, acc);
  keep(acc, shared.tile);
  multiply_rows(queries_of<T>(params.grad_out, s, tile.h, tile.q), keys_of<T>(p.v, s, kv, tile.k),
                p.dv, shared, acc);
  keep(acc, shared.other);
  __syncthreads();
}

// Calls f(at, r, c, stats) for this thread's pairs (query r = 4 ty + i, key
// c = tx + 16 j); q.k is in shared.tile and dP in shared.other, both at index `at`. Begins
// with a barrier. The loop is not unrolled, which would need more registers than there
// are; q.k and dP stay at these indices meanwhile.
template <class T, Sum kSum, class F>
__device__ __forceinline__ void pairs_of_tile(const AttentionBackwardParams& params,
                                              const Tile& tile,
                                              GradientShared<compute_t<T>>& shared, const F& f) {
  using A = compute_t<T>;
  products_of_pairs<T, kSum>(params, tile, shared);
  const Sequence& s = tile.sequence;
  const int tx = thread_x(), ty = thread_y();
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * ty + i;
    const int64_t row = row_index(params.problem, s, tile.h, min(tile.q + r, s.tq - 1));
    const RowStats<A> stats = stats_of<A>(params, row);
#pragma unroll 1
    for (int c = tx; c < kTile; c += 16) {
      f(place<kSum>(r, c), r, c, stats);
    }
  }
}

// Calls f(at, gradient) for the pairs of pairs_of_tile.
template <class T, Sum kSum, class F>
__device__ __forceinline__ void gradient_tile(const AttentionBackwardParams& params,
                                              const Tile& tile,
                                              GradientShared<compute_t<T>>& shared, const F& f) {
  using A = compute_t<T>;
  pairs_of_tile<T, kSum>(params, tile, shared, [&](int at, int r, int c, const RowStats<A>& stats) {
    f(at, pair_gradient(params.problem, tile, r, c, shared.bits.sees(tile, r, c),
                        shared.bits.template factor<A>(params.problem, r, c), shared.tile[at],
                        shared.other[at], stats));
  });
}

}  // namespace omniattn::gpu
