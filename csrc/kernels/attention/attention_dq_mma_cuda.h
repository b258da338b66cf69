// dQ on tensor cores: one block per 64 queries of a head (and 128 columns) loops over the keys.
// Rows of the results are queries.
#pragma once

#include "kernels/attention/attention_backward_mma_cuda.h"

namespace omniattn::gpu {

// Columns of dQ that a block sums, limited by registers: wider heads take more blocks.
template <int kD>
constexpr int kDqColumns = kD <= 128 ? kD : 128;

template <int kD>
constexpr int kKeys = kD <= 64 ? 64 : 32;

template <class T, int kD>
struct DqShared {
  T q[kRows * kD], grad_out[kRows * kD];
  T k[2][kKeys<kD> * kD], v[2][kKeys<kD> * kD];
  KeyPlan<kRows, kKeys<kD>> plans[3];
  float slots[16 * Workers::kWorkers];
};

template <int kD>
__device__ __forceinline__ QueryItem dq_item(const AttentionProblem& p, int64_t item) {
  const int64_t columns = ceil_div(p.d, kDqColumns<kD>), blocks = ceil_div(p.tq, kRows);
  const int64_t head = item / columns / blocks;
  const Sequence s = sequence_of(p, head / p.hq);
  const Range queries = block(blocks - 1 - item / columns % blocks, kRows, s.tq);
  return {{s, head / p.hq, head % p.hq, queries.begin, 0, false}, queries};
}
template <int kD>
__device__ __forceinline__ int dq_column(const AttentionProblem& p, int64_t item) {
  return static_cast<int>(item % ceil_div(p.d, kDqColumns<kD>)) * kDqColumns<kD>;
}
template <int kD>
OMNIATTN_FN int64_t dq_items(const AttentionProblem& p) {
  return p.batch * p.hq * ceil_div(p.tq, kRows) * ceil_div(p.d, kDqColumns<kD>);
}

template <int kD, class Shared>
__device__ __forceinline__ void plan_dq(const AttentionProblem& p, Shared& shared) {
  int slot = 0;
  for (int64_t i = blockIdx.x; i < dq_items<kD>(p); i += gridDim.x) {
    const QueryItem item = dq_item<kD>(p, i);
    if (!is_empty(item.queries)) plan_keys<Workers>(p, item, shared.plans, slot);
  }
}

// Called by the workers: loads an item's queries and their dO, from {.., q, any key} on.
template <class T, int kD>
__device__ __forceinline__ void load_queries(const AttentionBackwardParams& params,
                                             const Tile& item, DqShared<T, kD>& shared) {
  using RowsD = SharedRows<T, kD>;
  const AttentionProblem& p = params.problem;
  const Sequence& s = item.sequence;
  RowsD{shared.q}.template load<kRows, Workers::kWorkers>(
      row_of<T>(p.q, s.entry, s.q + item.q, item.h), p.q.stride_t, s.tq - item.q, p.d);
  RowsD{shared.grad_out}.template load<kRows, Workers::kWorkers>(
      row_of<T>(params.grad_out, s.entry, s.q + item.q, item.h), params.grad_out.stride_t,
      s.tq - item.q, p.dv);
}

// Called by the workers: loads a tile of keys and values, or nothing at the end.
template <class T, int kD>
__device__ __forceinline__ void load_keys(const AttentionProblem& p,
                                          const KeyPlan<kRows, kKeys<kD>>& plan,
                                          DqShared<T, kD>& shared, int stage) {
  using RowsD = SharedRows<T, kD>;
  if (plan.block >= 0) {
    RowsD{shared.k[stage]}.template load<kKeys<kD>, Workers::kWorkers>(
        static_cast<const T*>(p.k.data) + plan.k, p.k.stride_t, plan.keys, p.d);
    RowsD{shared.v[stage]}.template load<kKeys<kD>, Workers::kWorkers>(
        static_cast<const T*>(p.v.data) + plan.v, p.v.stride_t, plan.keys, p.dv);
  }
  cp_async_commit();
}

// dp = the gradients of q.k of a worker's 16 queries from `first` on, from s = q.k and dp = dO.v.
template <int kD, int N>
__device__ __forceinline__ void gradients_of_queries(const AttentionProblem& p,
                                                     const KeyPlan<kRows, kKeys<kD>>& plan,
                                                     int first, const RowStats<float> (&stats)[2],
                                                     float* slots, float (&s)[N][4],
                                                     float (&dp)[N][4]) {
  const Tile tile{.sequence = plan.tile.sequence,
                  .b = plan.tile.b,
                  .h = plan.tile.h,
                  .q = plan.tile.q + first,
                  .k = plan.tile.k,
                  .masked = plan.tile.masked};
  const bool drops = p.dropout.threshold != 0;
  // Each lane holds half of the keys of row lane % 16.
  const uint32_t keep =
      drops ? kept_keys<32>(p, tile, lane_id() % 16, tile.k + lane_id() / 16 * 32) : 0;
  for_parts(s, dp, [&](float (&x)[8], float (&y)[8], int half, int part) {
    const int r = 8 * half + lane_id() / 4;
    const uint64_t visible = tile.masked ? plan.visible[first + r] : ~uint64_t{0};
    const uint32_t kept = __shfl_sync(0xffffffffu, keep, 16 * (part / 8) + r);
    gradients(p, tile, slots, x, y, [&](int e) {
      const int c = column(part + e);
      const float z = !drops              ? 1.0f
                      : bit(kept, c % 32) ? static_cast<float>(p.dropout.scale)
                                          : 0.0f;
      return Pair{r, c, bit(visible, c), z, 1.0f, stats[half]};
    });
  });
}

// Stores columns of dQ from `from` on, and their shares in the gradients of the heads' factors.
template <class T, int kD, int C>
__device__ __forceinline__ void store_dq(const AttentionBackwardParams& params, const Tile& item,
                                         const float (&dq)[C][4], int from) {
  const AttentionProblem& p = params.problem;
  const Sequence& s = item.sequence;
  const int first = 16 * warp_id() + lane_id() / 4;
  const float scale = gradient_scale<float>(p) * head_factor<float>(p, item.h);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t q = item.q + first + 8 * half;
    if (q < s.tq)
      store_row(dq, half, scale, row_of<T>(params.grad_q, s.entry, s.q + q, item.h) + from,
                p.d - from);
  }
  if (params.part_head_scale == nullptr) return;
  float* const parts = static_cast<float*>(params.part_head_scale) +
                       from / kDqColumns<kD> * stat_rows(p) + row_index(p, s, item.h, item.q);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = first + 8 * half;
    const bool inside = item.q + r < s.tq;
    const T* const q = row_of<T>(p.q, s.entry, s.q + item.q + (inside ? r : 0), item.h) + from;
    const float sum =
        reduce_row(row_dot(dq, half, q, p.d - from), [](float x, float y) { return x + y; });
    if (inside && lane_id() % 4 == 0) parts[r] = sum * gradient_scale<float>(p);
  }
}

template <class T, int kD>
__device__ __forceinline__ void work_dq(const AttentionBackwardParams& params,
                                        const PlainScore& score, DqShared<T, kD>& shared) {
  constexpr int N = kKeys<kD> / 8;
  using RowsD = SharedRows<T, kD>;
  const AttentionProblem& p = params.problem;
  const int first = 16 * warp_id(), g = lane_id() / 4;
  int slot = 0;
  for (int64_t i = blockIdx.x; i < dq_items<kD>(p); i += gridDim.x) {
    if (is_empty(dq_item<kD>(p, i).queries)) continue;
    const int from = dq_column<kD>(p, i);
    Workers::meet();  // the first plan is made; all have read the previous item
    const Tile& item = shared.plans[slot].tile;
    load_queries(params, item, shared);
    load_keys(p, shared.plans[slot], shared, 0);
    const RowStats<float> stats[2] = {
        row_stats(params, item.sequence, item.h, item.q + first + g),
        row_stats(params, item.sequence, item.h, item.q + first + g + 8)};
    float dq[kDqColumns<kD> / 8][4];
    clear(dq);
    for (int stage = 0; block_of(shared.plans[slot]) >= 0; stage ^= 1) {
      cp_async_wait<0>();
      // The tile has arrived, the next plan is made, the other stage has been read.
      Workers::meet();
      const auto& plan = shared.plans[slot];
      slot = next_plan(slot);
      load_keys(p, shared.plans[slot], shared, stage ^ 1);
      float s[N][4], dp[N][4];
      multiply_rows(s, RowsD{shared.q}, first, RowsD{shared.k[stage]});
      multiply_rows(dp, RowsD{shared.grad_out}, first, RowsD{shared.v[stage]});
      if (score.plain && !plan.tile.masked) {
        plain_gradients(score, s, dp,
                        [&](int half, int) -> const RowStats<float>& { return stats[half]; });
      } else {
        gradients_of_queries<kD>(p, plan, first, stats, shared.slots, s, dp);
      }
      multiply_sum(dq, as_left<T>(dp), RowsD{shared.k[stage]}, from);
    }
    const Tile end = shared.plans[slot].tile;
    slot = next_plan(slot);
    cp_async_wait<0>();
    store_dq<T, kD>(params, end, dq, from);
  }
}

template <class T, int kD>
__global__ void __launch_bounds__(Workers::kThreads, 1)
    attention_dq_mma_kernel(const __grid_constant__ AttentionBackwardParams params,
                            const __grid_constant__ PlainScore score) {
  auto& shared = *dynamic_shared<DqShared<T, kD>>();
  if (Workers::plans()) {
    plan_dq<kD>(params.problem, shared);
  } else {
    work_dq(params, score, shared);
  }
}

}  // namespace omniattn::gpu
