// dK and dV on tensor cores: one block per 64 keys of a kv head (and 64 columns) loops
// over the heads of the group and their blocks of 32 queries. Rows of the results are
// keys: S^T = K Q^T, dP^T = V dO^T.
#pragma once

#include "kernels/attention/attention_backward_mma_cuda.h"

namespace omniattn::gpu {

// Columns of dK and dV that a block sums, limited by registers: wider heads take more blocks.
inline constexpr int kDkdvColumns = 64;

inline constexpr int kQueries = 32;  // queries of a tile: a word of dropout per lane

// A tile of kQueries queries of a head, and the places of its rows.
struct QueryPlan {
  int64_t block;  // number of the block of queries; -1: no further tile
  Tile tile;
  int64_t q, grad_out, queries;  // offsets of their first rows, and the number of rows left
  uint64_t visible[kQueries];    // keys of each query, if masked
  RowStats<float> stats[kQueries];

  // Called by the planner for block n of the queries of `column`; n = -1 marks the end.
  __device__ __forceinline__ void make(const AttentionBackwardParams& params, const Tile& column,
                                       int64_t n, bool hides) {
    const AttentionProblem& p = params.problem;
    const int lane = lane_id();
    const Sequence& s = column.sequence;
    const int64_t b = column.b, h = column.h, first = n * kQueries;
    const bool masked = hides || first + kQueries > s.tq;
    if (lane == 0) {
      block = n;
      tile = {s, b, h, first, column.k, masked};
      q = s.entry * p.q.stride_b + (s.q + first) * p.q.stride_t + h * p.q.stride_h;
      grad_out = s.entry * params.grad_out.stride_b + (s.q + first) * params.grad_out.stride_t +
                 h * params.grad_out.stride_h;
      queries = s.tq - first;
    }
    if (n < 0) return;
    stats[lane] = row_stats(params, s, h, first + lane);
    if (masked) visible[lane] = row_bits(p, s, b, h, first + lane, column.k);
  }
};

template <class T, int kD>
struct DkdvShared {
  T k[kRows * kD], v[kRows * kD];
  T q[2][kQueries * kD], grad_out[2][kQueries * kD];
  QueryPlan plans[3];
  float slots[16 * Workers::kWorkers];
};

OMNIATTN_FN int64_t dkdv_columns(const AttentionProblem& p) {
  return ceil_div(p.d > p.dv ? p.d : p.dv, kDkdvColumns);
}
// A tile with the keys from `k` on and the heads that share them, the first of which is `h`. A tile
// past the end of a sequence has no keys.
__device__ __forceinline__ Tile dkdv_item(const AttentionProblem& p, int64_t item) {
  const int64_t blocks = ceil_div(p.tk, kRows), at = item / dkdv_columns(p), head = at / blocks;
  return {sequence_of(p, head / p.hkv), head / p.hkv, head % p.hkv * group_size(p), 0,
          at % blocks * kRows,          false};
}
OMNIATTN_FN int64_t dkdv_items(const AttentionProblem& p) {
  return p.batch * p.hkv * ceil_div(p.tk, kRows) * dkdv_columns(p);
}

template <class Shared>
__device__ __forceinline__ void plan_dkdv(const AttentionBackwardParams& params, Shared& shared) {
  const AttentionProblem& p = params.problem;
  int slot = 0;
  for (int64_t i = blockIdx.x; i < dkdv_items(p); i += gridDim.x) {
    Tile column = dkdv_item(p, i);
    const Sequence& s = column.sequence;
    if (column.k >= s.tk) continue;
    const Range keys = block(column.k / kRows, kRows, s.tk);
    const auto publish = [&](int64_t n, bool masked) {
      shared.plans[slot].make(params, column, n, masked);
      __syncwarp();
      slot = next_plan(slot);
      Workers::meet();
    };
    const int64_t end = column.h + group_size(p);
    for (; column.h < end; ++column.h) {
      auto cursor = cursor_of<Along::queries>(p, s, column.b, column.h, keys, kQueries);
      BlockSearch search{};
      const auto classify = [&](int64_t n) {
        return tile_class(p, s, column.b, column.h, block(n, kQueries, s.tq),
                          {column.k, column.k + kRows});
      };
      bool masked = false;
      for (int64_t n; (n = search.next(cursor, masked, classify)) >= 0;) publish(n, masked);
    }
    publish(-1, false);
  }
}

// Called by the workers: loads the keys and values of an item.
template <class T, int kD>
__device__ __forceinline__ void load_keys(const AttentionProblem& p, const Tile& item,
                                          DkdvShared<T, kD>& shared) {
  using RowsD = SharedRows<T, kD>;
  const Sequence& s = item.sequence;
  const int64_t kv = kv_head(item.h, p.hq, p.hkv), row = s.k + item.k, keys = s.tk - item.k;
  RowsD{shared.k}.template load<kRows, Workers::kWorkers>(row_of<T>(p.k, s.entry, row, kv),
                                                          p.k.stride_t, keys, p.d);
  RowsD{shared.v}.template load<kRows, Workers::kWorkers>(row_of<T>(p.v, s.entry, row, kv),
                                                          p.v.stride_t, keys, p.dv);
}

// Called by the workers: loads a tile of queries and their dO, or nothing at the end.
template <class T, int kD>
__device__ __forceinline__ void load_queries(const AttentionBackwardParams& params,
                                             const QueryPlan& plan, DkdvShared<T, kD>& shared,
                                             int stage) {
  using RowsD = SharedRows<T, kD>;
  const AttentionProblem& p = params.problem;
  if (plan.block >= 0) {
    RowsD{shared.q[stage]}.template load<kQueries, Workers::kWorkers>(
        static_cast<const T*>(p.q.data) + plan.q, p.q.stride_t, plan.queries, p.d);
    RowsD{shared.grad_out[stage]}.template load<kQueries, Workers::kWorkers>(
        static_cast<const T*>(params.grad_out.data) + plan.grad_out, params.grad_out.stride_t,
        plan.queries, p.dv);
  }
  cp_async_commit();
}

// Computes, for a worker's 16 keys from `first` on, s = the weights of v and dp = the gradients of
// q.k, from s = k.q and dp = v.dO.
template <int N>
__device__ __forceinline__ void gradients_of_keys(const AttentionProblem& p, const QueryPlan& plan,
                                                  int first, float* slots, float (&s)[N][4],
                                                  float (&dp)[N][4]) {
  const Tile& tile = plan.tile;
  const bool drops = p.dropout.threshold != 0;
  // Lane `lane` holds the bits of query `lane` for this worker's keys.
  const uint32_t keep = drops ? kept_keys<16>(p, tile, lane_id(), tile.k + first) : 0;
  for_parts(s, dp, [&](float (&x)[8], float (&y)[8], int half, int) {
    const int r = 8 * half + lane_id() / 4;
    uint32_t sees = 0, kept = 0;  // bit e: pair e
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int c = column(e);
      const bool visible = !tile.masked || bit(plan.visible[c], first + r);
      sees |= static_cast<uint32_t>(visible) << e;
      if (drops) kept |= (__shfl_sync(0xffffffffu, keep, c) >> r & 1) << e;
    }
    gradients(p, tile, slots, x, y, [&](int e) {
      const float z = !drops ? 1.0f : bit(kept, e) ? static_cast<float>(p.dropout.scale) : 0.0f;
      return Pair{column(e),
                  first + r,
                  bit(sees, e),
                  z,
                  head_factor<float>(p, tile.h),
                  plan.stats[column(e)]};
    });
  });
}

// Stores columns of dK and dV from `from` on.
template <class T, int C>
__device__ __forceinline__ void store_dkdv(const AttentionBackwardParams& params, const Tile& item,
                                           int64_t kv, const float (&dk)[C][4],
                                           const float (&dv)[C][4], int from) {
  const AttentionProblem& p = params.problem;
  const Sequence& s = item.sequence;
  const auto scale = gradient_scale<float>(p);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t key = item.k + 16 * warp_id() + 8 * half + lane_id() / 4;
    if (key >= s.tk) continue;
    store_row(dk, half, scale, row_of<T>(params.grad_k, s.entry, s.k + key, kv) + from, p.d - from);
    store_row(dv, half, 1.0f, row_of<T>(params.grad_v, s.entry, s.k + key, kv) + from, p.dv - from);
  }
}

template <class T, int kD>
__device__ __forceinline__ void work_dkdv(const AttentionBackwardParams& params,
                                          const PlainScore& score, DkdvShared<T, kD>& shared) {
  constexpr int N = kQueries / 8, C = kDkdvColumns / 8;
  using RowsD = SharedRows<T, kD>;
  const AttentionProblem& p = params.problem;
  const int first = 16 * warp_id();
  int slot = 0;
  for (int64_t i = blockIdx.x; i < dkdv_items(p); i += gridDim.x) {
    const Tile item = dkdv_item(p, i);
    if (item.k >= item.sequence.tk) continue;
    const int64_t kv = kv_head(item.h, p.hq, p.hkv);
    const int from = static_cast<int>(i % dkdv_columns(p)) * kDkdvColumns;
    Workers::meet();  // the first plan is made; all have read the previous item
    load_keys(p, item, shared);
    load_queries(params, shared.plans[slot], shared, 0);
    float dk[C][4], dv[C][4];
    clear(dk);
    clear(dv);
    for (int stage = 0; block_of(shared.plans[slot]) >= 0; stage ^= 1) {
      cp_async_wait<0>();
      // The tile has arrived, the next plan is made, the other stage has been read.
      Workers::meet();
      const QueryPlan& plan = shared.plans[slot];
      slot = next_plan(slot);
      load_queries(params, shared.plans[slot], shared, stage ^ 1);
      float s[N][4], dp[N][4];
      multiply_rows(s, RowsD{shared.k}, first, RowsD{shared.q[stage]});
      multiply_rows(dp, RowsD{shared.v}, first, RowsD{shared.grad_out[stage]});
      if (score.plain && !plan.tile.masked) {
        plain_gradients(score, s, dp, [&](int, int e) -> const RowStats<float>& {
          return plan.stats[column(e)];
        });
      } else {
        gradients_of_keys(p, plan, first, shared.slots, s, dp);
      }
      multiply_sum(dv, as_left<T>(s), RowsD{shared.grad_out[stage]}, from);
      multiply_sum(dk, as_left<T>(dp), RowsD{shared.q[stage]}, from);
    }
    const Tile end = shared.plans[slot].tile;
    slot = next_plan(slot);
    cp_async_wait<0>();
    store_dkdv<T>(params, end, kv, dk, dv, from);
  }
}

template <class T, int kD>
__global__ void __launch_bounds__(Workers::kThreads, 1)
    attention_dkdv_mma_kernel(const __grid_constant__ AttentionBackwardParams params,
                              const __grid_constant__ PlainScore score) {
  auto& shared = *dynamic_shared<DkdvShared<T, kD>>();
  if (Workers::plans()) {
    plan_dkdv(params, shared);
  } else {
    work_dkdv(params, score, shared);
  }
}

}  // namespace omniattn::gpu
