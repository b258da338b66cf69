// Backward on tensor cores, see attention_mma_cuda.h. As in attention_backward_fma_cuda.cu every
// gradient has one owner, and P and dS are computed once for dQ and once for dK and dV:
//
//   dq     a block per 64 queries of a head (and 128 columns), over the keys; rows of the results
//          are queries
//   dkdv   a block per 64 keys of a kv head (and 64 columns), over the heads of the group and their
//          blocks of 32 queries; rows of the results are keys: S^T = K Q^T, dP^T = V dO^T
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_mma_cuda.h"

namespace omniattn {
namespace {

using namespace gpu;

using Workers = Team<4>;
constexpr int kRows = 16 * 4;  // queries or keys that a block owns

// Of a query; those beyond the end have P = 0. The shift is that of the exponent, in which logits
// that are plain come in units of ln 2: a sink may have made them natural.
__device__ __forceinline__ RowStats<float> row_stats(const AttentionBackwardParams& params,
                                                     const Sequence& s, int64_t h, int64_t q) {
  const AttentionProblem& p = params.problem;
  if (q >= s.tq) return {-negative_infinity<float>(), 1, 0};
  RowStats<float> stats = stats_of<float>(params, row_index(p, s, h, q));
  if (is_plain(p.terms)) stats.shift *= exponent_factor<float>(p.score);
  return stats;
}

// Place of a pair in its tile, whether it is visible, and the factor of dropout.
struct Pair {
  int query, key;
  bool sees;
  float z;
  float factor;  // of the gradient of q.k
  RowStats<float> stats;
};

// For 8 pairs of this thread, pair(i): x from q.k to the weight of v, y from dP to the gradient of
// q.k (see PairGradient).
template <class F>
__device__ __forceinline__ void gradients(const AttentionProblem& p, const Tile& tile, float* slots,
                                          float (&x)[8], float (&y)[8], const F& pair) {
  if (is_plain(p.terms)) {
    const float pre = static_cast<float>(p.score.pre) * exponent_factor<float>(p.score);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Pair at = pair(i);
      const float e = exp2_approx(pre * x[i] - at.stats.shift);
      x[i] = at.sees ? e * at.z : 0;
      y[i] = at.sees ? e * (at.z * y[i] - at.stats.delta) : 0;
    }
  } else {
    constexpr int kStep = Workers::kWorkers;
    float* const other = slots + 8 * kStep;
    apply_in_loop<kStep>(other, y, [](int, float dp) { return dp; });
    apply_in_loop<kStep>(slots, x, [&](int i, float dot) {
      const Pair at = pair(i);
      float& slot = other[i * kStep + static_cast<int>(threadIdx.x)];
      const PairGradient<float> g =
          gradient_of(p, tile, at.query, at.key, at.sees, at.z, dot, slot, at.stats);
      slot = at.factor * g.dot;
      return g.weight;
    });
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = other[i * kStep + static_cast<int>(threadIdx.x)];
  }
}

// f(x, y, half, i) for parts of 8 elements of this lane in both results; i is the first one's
// number in its row.
template <int N, class F>
__device__ __forceinline__ void for_parts(float (&s)[N][4], float (&dp)[N][4], const F& f) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int part = 0; part < 2 * N; part += 8) {
      float x[8], y[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = s[(part + i) / 2][2 * half + i % 2];
        y[i] = dp[(part + i) / 2][2 * half + i % 2];
      }
      f(x, y, half, part);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        s[(part + i) / 2][2 * half + i % 2] = x[i];
        dp[(part + i) / 2][2 * half + i % 2] = y[i];
      }
    }
  }
}

// Column of element i of a row of 8-column results, for this lane.
__device__ __forceinline__ int column(int i) { return 8 * (i / 2) + 2 * (lane_id() % 4) + i % 2; }

// ---- dQ ----------------------------------------------------------------------------------------

// Columns of the gradients that a block sums up, for registers: wider ones take more blocks.
template <int kD>
constexpr int kDqColumns = kD <= 128 ? kD : 128;
constexpr int kDkdvColumns = 64;

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

template <class T, int kD, class Shared>
__device__ __forceinline__ void work_dq(const AttentionBackwardParams& params, Shared& shared) {
  constexpr int N = kKeys<kD> / 8;
  using RowsD = SharedRows<T, kD>;
  const AttentionProblem& p = params.problem;
  const int first = 16 * warp_id(), g = lane_id() / 4;
  int slot = 0;
  const auto load = [&](const auto& plan, int stage) {
    if (plan.block >= 0) {
      RowsD{shared.k[stage]}.template load<kKeys<kD>, Workers::kWorkers>(
          static_cast<const T*>(p.k.data) + plan.k, p.k.stride_t, plan.keys, p.d);
      RowsD{shared.v[stage]}.template load<kKeys<kD>, Workers::kWorkers>(
          static_cast<const T*>(p.v.data) + plan.v, p.v.stride_t, plan.keys, p.dv);
    }
    cp_async_commit();
  };
  for (int64_t i = blockIdx.x; i < dq_items<kD>(p); i += gridDim.x) {
    if (is_empty(dq_item<kD>(p, i).queries)) continue;
    const int from = dq_column<kD>(p, i);
    Workers::meet();  // the first plan is made; all have read the previous item
    const Tile& item = shared.plans[slot].tile;
    const Sequence& sequence = item.sequence;
    RowsD{shared.q}.template load<kRows, Workers::kWorkers>(
        row_of<T>(p.q, sequence.entry, sequence.q + item.q, item.h), p.q.stride_t,
        sequence.tq - item.q, p.d);
    RowsD{shared.grad_out}.template load<kRows, Workers::kWorkers>(
        row_of<T>(params.grad_out, sequence.entry, sequence.q + item.q, item.h),
        params.grad_out.stride_t, sequence.tq - item.q, p.dv);
    load(shared.plans[slot], 0);
    const RowStats<float> stats[2] = {row_stats(params, sequence, item.h, item.q + first + g),
                                      row_stats(params, sequence, item.h, item.q + first + g + 8)};
    float dq[kDqColumns<kD> / 8][4];
    clear(dq);
    for (int stage = 0; block_of(shared.plans[slot]) >= 0; stage ^= 1) {
      cp_async_wait<0>();
      Workers::meet();  // the tile has arrived; the next plan is made; the other stage has been
                        // read
      const auto& plan = shared.plans[slot];
      slot = next_plan(slot);
      load(shared.plans[slot], stage ^ 1);
      Tile tile = plan.tile;
      tile.q += first;
      float s[N][4], dp[N][4];
      multiply_rows(s, RowsD{shared.q}, first, RowsD{shared.k[stage]});
      multiply_rows(dp, RowsD{shared.grad_out}, first, RowsD{shared.v[stage]});
      const bool drops = p.dropout.threshold != 0;
      // Of half the keys of row lane % 16.
      const uint32_t keep =
          drops ? kept_keys<32>(p, tile, lane_id() % 16, tile.k + lane_id() / 16 * 32) : 0;
      for_parts(s, dp, [&](float (&x)[8], float (&y)[8], int half, int part) {
        const int r = 8 * half + g;
        const uint64_t visible = tile.masked ? plan.visible[first + r] : ~uint64_t{0};
        const uint32_t kept = __shfl_sync(0xffffffffu, keep, 16 * (part / 8) + r);
        gradients(p, tile, shared.slots, x, y, [&](int e) {
          const int c = column(part + e);
          const float z = !drops              ? 1.0f
                          : bit(kept, c % 32) ? static_cast<float>(p.dropout.scale)
                                              : 0.0f;
          return Pair{r, c, bit(visible, c), z, 1.0f, stats[half]};
        });
      });
      multiply_sum(dq, as_left<T>(dp), RowsD{shared.k[stage]}, from);
    }
    const Tile end = shared.plans[slot].tile;
    slot = next_plan(slot);
    cp_async_wait<0>();
    const float scale = gradient_scale<float>(p) * head_factor<float>(p, end.h);
    const Sequence& s = end.sequence;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t q = end.q + first + 8 * half + g;
      if (q < s.tq)
        store_row(dq, half, scale, row_of<T>(params.grad_q, s.entry, s.q + q, end.h) + from,
                  p.d - from);
    }
    if (params.part_head_scale == nullptr) continue;
    float* const parts = static_cast<float*>(params.part_head_scale) +
                         from / kDqColumns<kD> * stat_rows(p) + row_index(p, s, end.h, end.q);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = first + 8 * half + g;
      const bool inside = end.q + r < s.tq;
      const T* const q = row_of<T>(p.q, s.entry, s.q + end.q + (inside ? r : 0), end.h) + from;
      const float sum =
          reduce_row(row_dot(dq, half, q, p.d - from), [](float x, float y) { return x + y; });
      if (inside && lane_id() % 4 == 0) parts[r] = sum * gradient_scale<float>(p);
    }
  }
}

template <class T, int kD>
__global__ void __launch_bounds__(Workers::kThreads, 1)
    attention_dq_mma_kernel(const __grid_constant__ AttentionBackwardParams params) {
  auto& shared = *dynamic_shared<DqShared<T, kD>>();
  if (Workers::plans()) {
    plan_dq<kD>(params.problem, shared);
  } else {
    work_dq<T, kD>(params, shared);
  }
}

// ---- dK and dV ---------------------------------------------------------------------------------

constexpr int kQueries = 32;  // of a tile: a word of dropout per lane

// A tile of kQueries queries of a head, and where they lie.
struct QueryPlan {
  int64_t block;  // number of the block of queries; -1: there is no further tile
  Tile tile;
  int64_t q, grad_out, queries;  // elements before their first rows, and rows from there on
  uint64_t visible[kQueries];    // keys of each query, if masked
  RowStats<float> stats[kQueries];

  // By the planner: block n of the queries of `column`, or with n = -1 the end.
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
// Keys from `k` on of the heads that share them, the first of which is `h`. Beyond the end of a
// sequence there are none.
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
      QueryCursor cursor = query_cursor(p, s, column.b, column.h, keys, kQueries);
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

template <class T, int kD, class Shared>
__device__ __forceinline__ void work_dkdv(const AttentionBackwardParams& params, Shared& shared) {
  constexpr int N = kQueries / 8, C = kDkdvColumns / 8;
  using RowsD = SharedRows<T, kD>;
  const AttentionProblem& p = params.problem;
  const int lane = lane_id(), first = 16 * warp_id(), g = lane / 4;
  const bool drops = p.dropout.threshold != 0;
  int slot = 0;
  const auto load = [&](const QueryPlan& plan, int stage) {
    if (plan.block >= 0) {
      RowsD{shared.q[stage]}.template load<kQueries, Workers::kWorkers>(
          static_cast<const T*>(p.q.data) + plan.q, p.q.stride_t, plan.queries, p.d);
      RowsD{shared.grad_out[stage]}.template load<kQueries, Workers::kWorkers>(
          static_cast<const T*>(params.grad_out.data) + plan.grad_out, params.grad_out.stride_t,
          plan.queries, p.dv);
    }
    cp_async_commit();
  };
  for (int64_t i = blockIdx.x; i < dkdv_items(p); i += gridDim.x) {
    const Tile item = dkdv_item(p, i);
    const Sequence& sequence = item.sequence;
    const int64_t kv = kv_head(item.h, p.hq, p.hkv), keys = sequence.tk - item.k;
    const int from = static_cast<int>(i % dkdv_columns(p)) * kDkdvColumns;
    if (keys <= 0) continue;
    Workers::meet();  // the first plan is made; all have read the previous item
    const int64_t row = sequence.k + item.k;
    RowsD{shared.k}.template load<kRows, Workers::kWorkers>(row_of<T>(p.k, sequence.entry, row, kv),
                                                            p.k.stride_t, keys, p.d);
    RowsD{shared.v}.template load<kRows, Workers::kWorkers>(row_of<T>(p.v, sequence.entry, row, kv),
                                                            p.v.stride_t, keys, p.dv);
    load(shared.plans[slot], 0);
    float dk[C][4], dv[C][4];
    clear(dk);
    clear(dv);
    for (int stage = 0; block_of(shared.plans[slot]) >= 0; stage ^= 1) {
      cp_async_wait<0>();
      Workers::meet();  // the tile has arrived; the next plan is made; the other stage has been
                        // read
      const QueryPlan& plan = shared.plans[slot];
      const Tile& tile = plan.tile;
      slot = next_plan(slot);
      load(shared.plans[slot], stage ^ 1);
      float s[N][4], dp[N][4];
      multiply_rows(s, RowsD{shared.k}, first, RowsD{shared.q[stage]});
      multiply_rows(dp, RowsD{shared.v}, first, RowsD{shared.grad_out[stage]});
      // Of query `lane` and this worker's keys.
      const uint32_t keep = drops ? kept_keys<16>(p, tile, lane, tile.k + first) : 0;
      for_parts(s, dp, [&](float (&x)[8], float (&y)[8], int half, int) {
        const int r = 8 * half + g;
        uint32_t sees = 0, kept = 0;  // bit e: pair e
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int c = column(e);
          const bool visible = !tile.masked || bit(plan.visible[c], first + r);
          sees |= static_cast<uint32_t>(visible) << e;
          if (drops) kept |= (__shfl_sync(0xffffffffu, keep, c) >> r & 1) << e;
        }
        gradients(p, tile, shared.slots, x, y, [&](int e) {
          const float z = !drops ? 1.0f : bit(kept, e) ? static_cast<float>(p.dropout.scale) : 0.0f;
          return Pair{column(e),
                      first + r,
                      bit(sees, e),
                      z,
                      head_factor<float>(p, tile.h),
                      plan.stats[column(e)]};
        });
      });
      multiply_sum(dv, as_left<T>(s), RowsD{shared.grad_out[stage]}, from);
      multiply_sum(dk, as_left<T>(dp), RowsD{shared.q[stage]}, from);
    }
    const Tile end = shared.plans[slot].tile;
    slot = next_plan(slot);
    cp_async_wait<0>();
    const auto scale = gradient_scale<float>(p);
    const Sequence& s = end.sequence;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t key = end.k + first + 8 * half + g;
      if (key >= s.tk) continue;
      store_row(dk, half, scale, row_of<T>(params.grad_k, s.entry, s.k + key, kv) + from,
                p.d - from);
      store_row(dv, half, 1.0f, row_of<T>(params.grad_v, s.entry, s.k + key, kv) + from,
                p.dv - from);
    }
  }
}

template <class T, int kD>
__global__ void __launch_bounds__(Workers::kThreads, 1)
    attention_dkdv_mma_kernel(const __grid_constant__ AttentionBackwardParams params) {
  auto& shared = *dynamic_shared<DkdvShared<T, kD>>();
  if (Workers::plans()) {
    plan_dkdv(params, shared);
  } else {
    work_dkdv<T, kD>(params, shared);
  }
}

}  // namespace

bool takes_mma_path(const AttentionBackwardParams& params) {
  const AttentionProblem& p = params.problem;
  if (!takes_mma_path(p)) return false;
  int64_t shared_bytes = 0;
  dispatch_mma(p, [&]<class T, int kD>(T, Head<kD>) {
    shared_bytes = max(sizeof(DqShared<T, kD>), sizeof(DkdvShared<T, kD>));
  });
  return shared_bytes <= shared_memory_limit() && has_aligned_queries(p, params.grad_out);
}

Status launch_attention_gradients_mma(const AttentionBackwardParams& params, Stream stream) {
  const AttentionProblem& p = params.problem;
  dispatch_mma(p, [&]<class T, int kD>(T, Head<kD>) {
    GPU_LAUNCH((attention_dq_mma_kernel<T, kD>), item_grid(dq_items<kD>(p)), Workers::kThreads,
               (sizeof(DqShared<T, kD>)), stream, params);
    if (p.tk == 0) return;
    GPU_LAUNCH((attention_dkdv_mma_kernel<T, kD>), item_grid(dkdv_items(p)), Workers::kThreads,
               (sizeof(DkdvShared<T, kD>)), stream, params);
  });
  return launch_status();
}

}  // namespace omniattn
