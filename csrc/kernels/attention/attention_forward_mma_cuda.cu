// Forward on tensor cores, see attention_params.h and attention_mma_cuda.h: FlashAttention-2 (arXiv
// 2307.08691). A block computes 64 queries of one head against 64 keys at a time (32 for D > 128,
// for lack of shared memory); meanwhile the next keys and values are copied.
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_mma_cuda.h"

namespace omniattn {
namespace {

using namespace gpu;

// 5 warps with the planner: 255 registers per thread, of which the products, the outputs and the
// softmax take up to 254. (9 warps could have 168, because an SM has four register files.)
using Workers = Team<4>;
constexpr int kQueries = 16 * 4;
template <int kD>
constexpr int kKeys = kD <= 128 ? 64 : 32;

template <class T, int kD>
struct ForwardShared {
  T q[kQueries * kD];
  T k[2][kKeys<kD> * kD], v[2][kKeys<kD> * kD];
  KeyPlan<kQueries, kKeys<kD>> plans[3];
  float slots[8 * Workers::kWorkers];  // for apply_in_loop
};

// Under a causal mask the last queries have the most keys, so they come first.
__device__ __forceinline__ QueryItem item_of(const AttentionProblem& p, int64_t item) {
  const int64_t blocks = ceil_div(p.tq, kQueries), head = item / blocks;
  const Sequence s = sequence_of(p, head / p.hq);
  const Range queries = block(blocks - 1 - item % blocks, kQueries, s.tq);
  return {{s, head / p.hq, head % p.hq, queries.begin, 0, false}, queries};
}
OMNIATTN_FN int64_t item_count(const AttentionProblem& p) {
  return p.batch * p.hq * ceil_div(p.tq, kQueries);
}

template <class Shared>
__device__ __forceinline__ void plan_items(const AttentionProblem& p, Shared& shared) {
  int slot = 0;
  for (int64_t i = blockIdx.x; i < item_count(p); i += gridDim.x) {
    const QueryItem item = item_of(p, i);
    if (!is_empty(item.queries)) plan_keys<Workers>(p, item, shared.plans, slot);
  }
}

// Online softmax of a worker's rows.
template <int C>
struct Rows {
  float o[C][4];
  float m[2], l[2];  // of rows g and g + 8; l: this lane's part, over its columns
};

// Turns logits into probabilities times the dropout factors, for the worker's rows from `first` on.
// `slots` has 8 numbers per thread.
template <class Plan, int N, int C>
__device__ __forceinline__ void softmax_tile(const AttentionProblem& p, const Plan& plan, int first,
                                             float* slots, float (&s)[N][4], Rows<C>& rows) {
  Tile tile = plan.tile;
  tile.q += first;
  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  const auto column = [&](int i) { return 8 * (i / 2) + 2 * t + i % 2; };
  const bool drops = p.dropout.threshold != 0;
  // Each lane holds half of the keys of row lane % 16.
  const uint32_t keep = drops ? kept_keys<32>(p, tile, lane % 16, tile.k + lane / 16 * 32) : 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = 8 * half + g;
    const uint64_t sees = tile.masked ? plan.visible[first + r] : ~uint64_t{0};
    float x[2 * N];
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) x[i] = s[i / 2][2 * half + i % 2];
    if (is_plain(p.terms)) {
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) x[i] *= static_cast<float>(p.score.pre);
    } else {
#pragma unroll
      for (int part = 0; part < 2 * N; part += 8) {
        float some[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) some[i] = x[part + i];
        apply_in_loop<Workers::kWorkers>(slots, some, [&](int i, float dot) {
          const int c = column(part + i);
          const float logit = logit_of(p, tile, r, c, dot, bit(sees, c)).value;
          return is_softmax(p.score) ? logit : weight_at(p.score, logit).value;
        });
#pragma unroll
        for (int i = 0; i < 8; ++i) x[part + i] = some[i];
      }
    }
    if (is_softmax(p.score)) {
      float top = rows.m[half];
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) {
        if (tile.masked && !bit(sees, column(i))) x[i] = negative_infinity<float>();
        top = max(top, x[i]);
      }
      top = reduce_row(top, [](float a, float b) { return max(a, b); });
      const float shift = softmax_shift(top);
      float old = rows.m[half] - shift;
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) x[i] -= shift;
      if (p.score.natural) {
        old *= static_cast<float>(kLog2E);
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) x[i] *= static_cast<float>(kLog2E);
      }
      const float alpha = exp2_approx(old);
      float sum = alpha * rows.l[half];
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) {
        x[i] = exp2_approx(x[i]);
        sum += x[i];
      }
      rows.m[half] = top;
      rows.l[half] = sum;
#pragma unroll
      for (int c = 0; c < C; ++c) {
        rows.o[c][2 * half] *= alpha;
        rows.o[c][2 * half + 1] *= alpha;
      }
    }
    const uint32_t kept[2] = {__shfl_sync(0xffffffffu, keep, r),
                              __shfl_sync(0xffffffffu, keep, 16 + r)};
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) {
      const int c = column(i);
      if (drops) x[i] = bit(kept[i / 8], c % 32) ? x[i] * static_cast<float>(p.dropout.scale) : 0;
      s[i / 2][2 * half + i % 2] = x[i];
    }
  }
}

// softmax_tile of logits score.pre s, where score.pre > 0, all visible and kept.
template <int N, int C>
__device__ __forceinline__ void plain_softmax_tile(const PlainScore& score, float (&s)[N][4],
                                                   Rows<C>& rows) {
  const float pre = score.pre, unit = score.unit;
  const auto larger = [](float a, float b) { return max(a, b); };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = s[0][2 * half];
#pragma unroll
    for (int i = 1; i < 2 * N; ++i) top = max(top, s[i / 2][2 * half + i % 2]);
    top = max(rows.m[half], pre * reduce_row(top, larger));
    const float shift = softmax_shift(top) * unit;
    const float alpha = exp2_approx(rows.m[half] * unit - shift);
    float sum = alpha * rows.l[half];
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) {
      float& x = s[i / 2][2 * half + i % 2];
      x = exp2_approx(pre * unit * x - shift);
      sum += x;
    }
    rows.m[half] = top;
    rows.l[half] = sum;
#pragma unroll
    for (int c = 0; c < C; ++c) {
      rows.o[c][2 * half] *= alpha;
      rows.o[c][2 * half + 1] *= alpha;
    }
  }
}

template <class T, int kD, class Shared>
__device__ __forceinline__ void work_items(const AttentionForwardParams& params,
                                           const PlainScore& score, Shared& shared) {
  constexpr int N = kKeys<kD> / 8;
  const AttentionProblem& p = params.problem;
  const SharedRows<T, kD> q_rows{shared.q};
  const int first = 16 * warp_id();
  int slot = 0;
  const auto load = [&](const HeadView& x, int64_t offset, int64_t width, int64_t keys, T* to) {
    if (keys > 0) {
      SharedRows<T, kD>{to}.template load<kKeys<kD>, Workers::kWorkers>(
          static_cast<const T*>(x.data) + offset, x.stride_t, keys, width);
    }
    cp_async_commit();
  };
  const auto load_keys = [&](const auto& plan, int stage) {
    const int64_t keys = plan.block >= 0 ? plan.keys : 0;
    load(p.k, plan.k, p.d, keys, shared.k[stage]);
    load(p.v, plan.v, p.dv, keys, shared.v[stage]);
  };
  for (int64_t i = blockIdx.x; i < item_count(p); i += gridDim.x) {
    if (is_empty(item_of(p, i).queries)) continue;
    Workers::meet();  // the first plan is made; all have read the previous item
    const Tile& item = shared.plans[slot].tile;
    const Sequence& s = item.sequence;
    q_rows.template load<kQueries, Workers::kWorkers>(row_of<T>(p.q, s.entry, s.q + item.q, item.h),
                                                      p.q.stride_t, s.tq - item.q, p.d);
    load_keys(shared.plans[slot], 0);
    Rows<kD / 8> rows;
    clear(rows.o);
    rows.m[0] = rows.m[1] = initial_maximum<float>(p, item.h);
    rows.l[0] = rows.l[1] = lane_id() % 4 == 0 ? softmax_initial_sum(rows.m[0]) : 0;
    for (int stage = 0; block_of(shared.plans[slot]) >= 0; stage ^= 1) {
      cp_async_wait<1>();
      Workers::meet();  // K has arrived; the next plan is made; the other stage has been read
      const auto& plan = shared.plans[slot];
      slot = next_plan(slot);
      load_keys(shared.plans[slot], stage ^ 1);
      float x[N][4];
      multiply_rows(x, q_rows, first, SharedRows<T, kD>{shared.k[stage]});
      if (score.plain && score.pre > 0 && !plan.tile.masked) {
        plain_softmax_tile(score, x, rows);
      } else {
        softmax_tile(p, plan, first, shared.slots, x, rows);
      }
      const LeftOperand<N> weights = as_left<T>(x);
      cp_async_wait<2>();
      Workers::workers_meet();  // V has arrived
      multiply_sum(rows.o, weights, SharedRows<T, kD>{shared.v[stage]}, 0);
    }
    const Tile end = shared.plans[slot].tile;
    slot = next_plan(slot);
    cp_async_wait<0>();

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float l = reduce_row(rows.l[half], [](float x, float y) { return x + y; });
      const int64_t q = end.q + first + 8 * half + lane_id() / 4;
      if (q >= end.sequence.tq) continue;
      if (lane_id() % 4 == 0) {
        store_lse(params, row_index(p, end.sequence, end.h, q),
                  row_lse(p.score, rows.m[half], l, log(l)));
      }
      store_row(rows.o, half, row_factor(p.score, l),
                row_of<T>(params.out, end.sequence.entry, end.sequence.q + q, end.h), p.dv);
    }
  }
}

template <class T, int kD>
__global__ void __launch_bounds__(Workers::kThreads, 1)
    attention_forward_mma_kernel(const __grid_constant__ AttentionForwardParams params,
                                 const __grid_constant__ PlainScore score) {
  auto& shared = *dynamic_shared<ForwardShared<T, kD>>();
  if (Workers::plans()) {
    plan_items(params.problem, shared);
  } else {
    work_items<T, kD>(params, score, shared);
  }
}

}  // namespace

bool takes_mma_path(const AttentionProblem& p) {
  const auto size_fits = [](int64_t d) { return d > 0 && d <= 256 && d % 8 == 0; };
  if (size_of(p.dtype) != 2 || !size_fits(p.d) || !size_fits(p.dv)) return false;
  if (has_distance_rows(p)) return false;
  int64_t shared_bytes = 0;
  dispatch_mma(p,
               [&]<class T, int kD>(T, Head<kD>) { shared_bytes = sizeof(ForwardShared<T, kD>); });
  return shared_bytes <= shared_memory_limit() && has_aligned_queries(p, p.q) &&
         has_aligned_keys(p, p.k) && has_aligned_keys(p, p.v);
}

Status launch_attention_mma(const AttentionForwardParams& params, Stream stream) {
  dispatch_mma(params.problem, [&]<class T, int kD>(T, Head<kD>) {
    GPU_LAUNCH((attention_forward_mma_kernel<T, kD>), item_grid(item_count(params.problem)),
               Workers::kThreads, (sizeof(ForwardShared<T, kD>)), stream, params,
               plain_score(params.problem));
  });
  return launch_status();
}

}  // namespace omniattn
