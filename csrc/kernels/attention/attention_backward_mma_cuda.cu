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

// lse in log2 units and Delta of a query; those beyond the end have P = 0.
struct RowStats {
  float shift, delta;
};
__device__ __forceinline__ RowStats row_stats(const AttentionBackwardParams& params, int64_t b,
                                              int64_t h, int64_t q) {
  const AttentionProblem& p = params.problem;
  if (q >= p.tq) return {-negative_infinity<float>(), 0};
  const int64_t row = row_index(p, b, h, q);
  return {softmax_backward_shift(static_cast<const float*>(params.lse)[row]),
          static_cast<const float*>(params.workspace)[row]};
}

// Place of a pair in its tile, whether it is visible, and the factor of dropout.
struct Pair {
  int query, key;
  bool sees;
  float z;
  float factor;  // of the gradient of q.k
  RowStats stats;
};

// For 8 pairs of this thread, pair(i): x from q.k to the weight of v, y from dP to the gradient of
// q.k (see PairGradient).
template <class F>
__device__ __forceinline__ void gradients(const AttentionProblem& p, const Tile& tile, float* slots,
                                          float (&x)[8], float (&y)[8], const F& pair) {
  if (is_plain(p)) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Pair at = pair(i);
      const float e = exp2_approx(static_cast<float>(p.score.pre) * x[i] - at.stats.shift);
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
          gradient_of(p, tile, at.query, at.key, at.sees && tile.q + at.query < p.tq, at.z, dot,
                      slot, at.stats.shift, at.stats.delta);
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

struct DqItem {
  int64_t b, h;
  Range queries;
  int column;
};
template <int kD>
__device__ __forceinline__ DqItem dq_item(const AttentionProblem& p, int64_t item) {
  const int64_t columns = ceil_div(p.d, kDqColumns<kD>), blocks = ceil_div(p.tq, kRows);
  const int64_t head = item / columns / blocks;
  return {head / p.hq, head % p.hq, block(blocks - 1 - item / columns % blocks, kRows, p.tq),
          static_cast<int>(item % columns) * kDqColumns<kD>};
}
template <int kD>
OMNIATTN_FN int64_t dq_items(const AttentionProblem& p) {
  return p.batch * p.hq * ceil_div(p.tq, kRows) * ceil_div(p.d, kDqColumns<kD>);
}

template <int kD, class Shared>
__device__ __forceinline__ void plan_dq(const AttentionProblem& p, Shared& shared) {
  int slot = 0;
  for (int64_t i = blockIdx.x; i < dq_items<kD>(p); i += gridDim.x) {
    const DqItem item = dq_item<kD>(p, i);
    plan_keys<Workers>(p, item.b, item.h, item.queries, shared.plans, slot);
  }
}

template <class T, int kD, class Shared>
__device__ __forceinline__ void work_dq(const AttentionBackwardParams& params, Shared& shared) {
  constexpr int N = kKeys<kD> / 8;
  using RowsD = SharedRows<T, kD>;
  const AttentionProblem& p = params.problem;
  const int first = 16 * warp_id(), g = lane_id() / 4;
  int slot = 0;
  for (int64_t i = blockIdx.x; i < dq_items<kD>(p); i += gridDim.x) {
    const DqItem item = dq_item<kD>(p, i);
    const int64_t b = item.b, h = item.h, kv = kv_head(h, p.hq, p.hkv), q0 = item.queries.begin;
    const auto load = [&](int64_t n, int stage) {
      const int64_t key = n * kKeys<kD>;
      if (n >= 0) {
        RowsD{shared.k[stage]}.template load<kKeys<kD>, Workers::kWorkers>(
            row_of<T>(p.k, b, key, kv), p.k.stride_t, p.tk - key, p.d);
        RowsD{shared.v[stage]}.template load<kKeys<kD>, Workers::kWorkers>(
            row_of<T>(p.v, b, key, kv), p.v.stride_t, p.tk - key, p.dv);
      }
      cp_async_commit();
    };

    Workers::meet();  // the first plan is made; all have read the previous item
    int64_t n = block_of(shared.plans[slot]);
    RowsD{shared.q}.template load<kRows, Workers::kWorkers>(row_of<T>(p.q, b, q0, h), p.q.stride_t,
                                                            p.tq - q0, p.d);
    RowsD{shared.grad_out}.template load<kRows, Workers::kWorkers>(
        row_of<T>(params.grad_out, b, q0, h), params.grad_out.stride_t, p.tq - q0, p.dv);
    load(n, 0);
    const RowStats stats[2] = {row_stats(params, b, h, q0 + first + g),
                               row_stats(params, b, h, q0 + first + g + 8)};
    float dq[kDqColumns<kD> / 8][4];
    clear(dq);
    for (int stage = 0; n >= 0; stage ^= 1) {
      cp_async_wait<0>();
      Workers::meet();  // the tile has arrived; the next plan is made; the other stage has been
                        // read
      const auto& plan = shared.plans[slot];
      slot = next_plan(slot);
      const int64_t next = block_of(shared.plans[slot]);
      load(next, stage ^ 1);
      const Tile tile{b, h, q0 + first, n * kKeys<kD>, plan.tile.masked};
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
      multiply_sum(dq, as_left<T>(dp), RowsD{shared.k[stage]}, item.column);
      n = next;
    }
    slot = next_plan(slot);
    cp_async_wait<0>();
    const float scale = gradient_scale<float>(p) * head_factor<float>(p, h);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t q = q0 + first + 8 * half + g;
      if (q < p.tq)
        store_row(dq, half, scale, row_of<T>(params.grad_q, b, q, h) + item.column,
                  p.d - item.column);
    }
    if (params.part_head_scale == nullptr) continue;
    float* const parts = static_cast<float*>(params.part_head_scale) +
                         item.column / kDqColumns<kD> * query_rows(p) + row_index(p, b, h, q0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = first + 8 * half + g;
      const bool inside = q0 + r < p.tq;
      const T* const q = row_of<T>(p.q, b, inside ? q0 + r : q0, h) + item.column;
      const float sum = reduce_row(row_dot(dq, half, q, p.d - item.column),
                                   [](float x, float y) { return x + y; });
      if (inside && lane_id() % 4 == 0) {
        parts[r] = sum * gradient_scale<float>(p);
      }
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

// A tile of kQueries queries of a head.
struct QueryPlan {
  int64_t block, head;  // block -1: there is no further tile
  int32_t masked;
  uint64_t visible[kQueries];  // keys of each query, if masked
  RowStats stats[kQueries];

  // By the planner: the first tile with a visible pair from block n of head h on.
  __device__ __forceinline__ void make(const AttentionBackwardParams& params, int64_t b,
                                       int64_t key, Range blocks, int64_t h, int64_t n,
                                       int64_t last_head) {
    const AttentionProblem& p = params.problem;
    const int lane = lane_id();
    TileClass found = TileClass::skip;
    for (; h < last_head; ++h, n = blocks.begin) {
      for (; n < blocks.end; ++n) {
        found = tile_class(p, b, h, omniattn::block(n, kQueries, p.tq), {key, key + kRows});
        if (found != TileClass::skip) break;
      }
      if (found != TileClass::skip) break;
    }
    if (lane == 0) {
      block = found != TileClass::skip ? n : -1;
      head = h;
      masked = found == TileClass::partial;
    }
    if (found == TileClass::skip) return;
    const int64_t q = n * kQueries + lane;
    stats[lane] = row_stats(params, b, h, q);
    if (found == TileClass::partial) visible[lane] = q < p.tq ? row_bits(p, b, h, q, key) : 0;
  }
};

template <class T, int kD>
struct DkdvShared {
  T k[kRows * kD], v[kRows * kD];
  T q[2][kQueries * kD], grad_out[2][kQueries * kD];
  QueryPlan plans[3];
  float slots[16 * Workers::kWorkers];
};

struct DkdvItem {
  int64_t b, kv, key;
  int column;
};
OMNIATTN_FN int64_t dkdv_columns(const AttentionProblem& p) {
  return ceil_div(p.d > p.dv ? p.d : p.dv, kDkdvColumns);
}
__device__ __forceinline__ DkdvItem dkdv_item(const AttentionProblem& p, int64_t item) {
  const int64_t columns = dkdv_columns(p), blocks = ceil_div(p.tk, kRows);
  const int64_t head = item / columns / blocks;
  return {head / p.hkv, head % p.hkv, item / columns % blocks * kRows,
          static_cast<int>(item % columns) * kDkdvColumns};
}
OMNIATTN_FN int64_t dkdv_items(const AttentionProblem& p) {
  return p.batch * p.hkv * ceil_div(p.tk, kRows) * dkdv_columns(p);
}

template <class Shared>
__device__ __forceinline__ void plan_dkdv(const AttentionBackwardParams& params, Shared& shared) {
  const AttentionProblem& p = params.problem;
  int slot = 0;
  for (int64_t i = blockIdx.x; i < dkdv_items(p); i += gridDim.x) {
    const DkdvItem item = dkdv_item(p, i);
    const Range blocks =
        query_blocks(p.mask, item.b, block(item.key / kRows, kRows, p.tk), kQueries);
    int64_t h = item.kv * group_size(p), n = blocks.begin;
    const int64_t last = h + group_size(p);
    do {
      QueryPlan& plan = shared.plans[slot];
      plan.make(params, item.b, item.key, blocks, h, n, last);
      __syncwarp();
      h = plan.head;
      n = plan.block + 1;
      slot = next_plan(slot);
      Workers::meet();
    } while (n > 0);
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
  for (int64_t i = blockIdx.x; i < dkdv_items(p); i += gridDim.x) {
    const DkdvItem item = dkdv_item(p, i);
    const int64_t b = item.b;
    const auto load = [&](int64_t h, int64_t n, int stage) {
      const int64_t q = n * kQueries;
      if (n >= 0) {
        RowsD{shared.q[stage]}.template load<kQueries, Workers::kWorkers>(
            row_of<T>(p.q, b, q, h), p.q.stride_t, p.tq - q, p.d);
        RowsD{shared.grad_out[stage]}.template load<kQueries, Workers::kWorkers>(
            row_of<T>(params.grad_out, b, q, h), params.grad_out.stride_t, p.tq - q, p.dv);
      }
      cp_async_commit();
    };

    Workers::meet();  // the first plan is made; all have read the previous item
    int64_t n = block_of(shared.plans[slot]);
    RowsD{shared.k}.template load<kRows, Workers::kWorkers>(row_of<T>(p.k, b, item.key, item.kv),
                                                            p.k.stride_t, p.tk - item.key, p.d);
    RowsD{shared.v}.template load<kRows, Workers::kWorkers>(row_of<T>(p.v, b, item.key, item.kv),
                                                            p.v.stride_t, p.tk - item.key, p.dv);
    load(shared.plans[slot].head, n, 0);
    float dk[C][4], dv[C][4];
    clear(dk);
    clear(dv);
    for (int stage = 0; n >= 0; stage ^= 1) {
      cp_async_wait<0>();
      Workers::meet();  // the tile has arrived; the next plan is made; the other stage has been
                        // read
      const QueryPlan& plan = shared.plans[slot];
      slot = next_plan(slot);
      const int64_t next = block_of(shared.plans[slot]);
      load(shared.plans[slot].head, next, stage ^ 1);
      const Tile tile{b, plan.head, n * kQueries, item.key, plan.masked != 0};
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
          const auto factor = head_factor<float>(p, tile.h);
          return Pair{column(e), first + r, bit(sees, e), z, factor, plan.stats[column(e)]};
        });
      });
      multiply_sum(dv, as_left<T>(s), RowsD{shared.grad_out[stage]}, item.column);
      multiply_sum(dk, as_left<T>(dp), RowsD{shared.q[stage]}, item.column);
      n = next;
    }
    slot = next_plan(slot);
    cp_async_wait<0>();
    const auto scale = gradient_scale<float>(p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t key = item.key + first + 8 * half + g;
      if (key >= p.tk) continue;
      store_row(dk, half, scale, row_of<T>(params.grad_k, b, key, item.kv) + item.column,
                p.d - item.column);
      store_row(dv, half, 1.0f, row_of<T>(params.grad_v, b, key, item.kv) + item.column,
                p.dv - item.column);
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
  const HeadView& x = params.grad_out;
  const auto fits = [](int64_t size, int64_t stride) { return size <= 1 || stride % 8 == 0; };
  const AttentionProblem& p = params.problem;
  return takes_mma_path(p) && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
         fits(p.batch, x.stride_b) && fits(p.tq, x.stride_t) && fits(p.hq, x.stride_h);
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
