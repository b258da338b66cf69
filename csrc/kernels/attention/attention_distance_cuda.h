// Terms of a tile's scores by the distance of query and key, q_i.r and k_j.w with rows r and w of k
// - i (see DistanceRows), and their gradients, by FMA. Query r and key c of a tile read the row at
// place c - r + 63 of its band of distances.
#pragma once

#include "kernels/attention/attention_fma_cuda.h"

namespace omniattn::gpu {

// k - i of query q and key k of a sequence.
__device__ __forceinline__ int64_t distance_of(const AttentionProblem& p, const Sequence& s,
                                               int64_t q, int64_t k) {
  return k - q - (s.tk - s.tq) + p.relative_shift;
}

// Rows of a head, for distances from `first` on.
template <class A>
struct BandRows {
  const AttentionProblem& p;
  const DistanceRows& rows;
  int64_t h, first;

  __device__ __forceinline__ A at(int64_t n, int64_t c) const {
    const int64_t row = row_of_distance(rows, first + n);
    return c < p.d ? static_cast<const A*>(rows.data)[(row * p.hq + h) * p.d + c] : A(0);
  }
};
template <class A>
__device__ __forceinline__ BandRows<A> band_of(const AttentionProblem& p, const DistanceRows& rows,
                                               const Tile& tile) {
  return {p, rows, tile.h, distance_of(p, tile.sequence, tile.q + kTile - 1, tile.k)};
}

// acc[i][j] += own row . row of the pair, where own rows are queries or keys. Begins and ends with
// a barrier; overwrites shared.tile.
template <bool kOfQuery, class A, class Rows>
__device__ __forceinline__ void multiply_band(const BandRows<A>& band, const Rows& own,
                                              FmaShared<A>& shared, A (&acc)[4][4]) {
  constexpr int kPlaces = 2 * kTile;
  static_assert(kDepth * kPlaces <= kTile * kLeading);
  const int thread = static_cast<int>(threadIdx.x), tx = thread_x(), ty = thread_y();
  for (int64_t c = 0; c < band.p.d; c += kDepth) {
    __syncthreads();
    stage_columns(own, c, band.p.d, shared.x);
    for (int n = thread; n < kDepth * kPlaces; n += kFmaThreads) {
      shared.tile[n % kDepth * kPlaces + n / kDepth] = band.at(n / kDepth, c + n % kDepth);
    }
    __syncthreads();
#pragma unroll 1
    for (int k = 0; k < kDepth; ++k) {
      const A* const x = shared.x + k * kLeading;
      const A* const y = shared.tile + k * kPlaces + kTile - 1;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int r = 4 * ty + i, n = tx + 16 * j;
          acc[i][j] += x[kOfQuery ? r : n] * y[n - r];
        }
      }
    }
  }
  __syncthreads();
}

// acc[i][j] = q.k of a tile's pairs, including the terms of their distances. Begins with a barrier.
template <class T>
__device__ __forceinline__ void products_of(const AttentionProblem& p, const Tile& tile,
                                            FmaShared<compute_t<T>>& shared,
                                            compute_t<T> (&acc)[4][4]) {
  using A = compute_t<T>;
  const Sequence& s = tile.sequence;
  const auto q = queries_of<T>(p.q, s, tile.h, tile.q);
  const auto k = keys_of<T>(p.k, s, kv_head(tile.h, p.hq, p.hkv), tile.k);
  multiply_rows(q, k, p.d, shared, acc);
  if (p.relative_keys.data != nullptr) {
    multiply_band<true>(band_of<A>(p, p.relative_keys, tile), q, shared, acc);
  }
  if (p.relative_queries.data != nullptr) {
    multiply_band<false>(band_of<A>(p, p.relative_queries, tile), k, shared, acc);
  }
}

// acc[i][j] += sum over n < count of value(n, 4 ty + i) y(n, first + tx + 16 j), where a value of 0
// hides y. Begins and ends with a barrier.
template <class A, class Value, class Y>
__device__ __forceinline__ void multiply_values(int count, const Value& value, const Y& y,
                                                int64_t first, FmaShared<A>& shared,
                                                A (&acc)[4][kChunkColumns<A>]) {
  constexpr int kColumns = kChunk<A>;
  const int thread = static_cast<int>(threadIdx.x), tx = thread_x(), ty = thread_y();
  for (int n = 0; n < count; n += kDepth) {
    __syncthreads();
    for (int k = thread; k < kDepth * kColumns; k += kFmaThreads) {
      shared.y[k] = y(n + k / kColumns, first + k % kColumns);
    }
    __syncthreads();
#pragma unroll 1
    for (int k = 0; k < kDepth; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const A x = value(n + k, 4 * ty + i);
        if (x == A(0)) continue;
#pragma unroll
        for (int j = 0; j < kChunkColumns<A>; ++j) {
          acc[i][j] += x * shared.y[k * kColumns + tx + 16 * j];
        }
      }
    }
  }
  __syncthreads();
}

// acc += rows of a band times values of a tile, for own rows that are queries or keys. The tile is
// indexed by the other position first, then by the own position.
template <bool kOfQuery, class A>
__device__ __forceinline__ void add_band_rows(const BandRows<A>& band, const A* tile, int64_t first,
                                              FmaShared<A>& shared, A (&acc)[4][kChunkColumns<A>]) {
  const auto value = [&](int n, int own) {
    const int other = kOfQuery ? own + n - (kTile - 1) : own - n + (kTile - 1);
    return other >= 0 && other < kTile ? tile[other * kLeading + own] : A(0);
  };
  multiply_values(
      2 * kTile, value, [&](int n, int64_t c) { return band.at(n, c); }, first, shared, acc);
}

}  // namespace omniattn::gpu
