// Computes weights, and gradients of q.k, from q.k and dP, for the elements of both backward
// kernels on tensor cores (attention_dq_mma_cuda.h, attention_dkdv_mma_cuda.h).
#pragma once

#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_mma_cuda.h"

namespace omniattn::gpu {

using Workers = Team<4>;
inline constexpr int kRows = 16 * 4;  // queries or keys owned by a block

// Statistics of a query; queries past the end have P = 0. Plain logits are in units of ln 2, and so
// is the shift, even if a sink makes the logits of the score natural.
__device__ __forceinline__ RowStats<float> row_stats(const AttentionBackwardParams& params,
                                                     const Sequence& s, int64_t h, int64_t q) {
  const AttentionProblem& p = params.problem;
  if (q >= s.tq) return {-negative_infinity<float>(), 1, 0};
  RowStats<float> stats = stats_of<float>(params, row_index(p, s, h, q));
  if (is_plain(p.terms)) stats.shift *= exponent_factor<float>(p.score);
  return stats;
}

// A pair's place in its tile, its visibility, and its dropout factor z.
struct Pair {
  int query, key;
  bool sees;
  float z;
  float factor;  // of the gradient of q.k
  RowStats<float> stats;
};

// Converts 8 pairs of this thread, given by pair(i): x from q.k to the weight of v, y from dP to
// the gradient of q.k (see PairGradient).
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

// Converts this lane's pairs of a plain tile, all visible: s from q.k to the weight of v, dp from
// dP to the gradient of q.k. stats(half, i) are those of the query of element i of row g + 8 half.
template <int N, class F>
__device__ __forceinline__ void plain_gradients(const PlainScore& score, float (&s)[N][4],
                                                float (&dp)[N][4], const F& stats) {
  const float factor = score.pre * score.unit;
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowStats<float>& query = stats(half, i);
      float& x = s[i / 2][2 * half + i % 2];
      float& y = dp[i / 2][2 * half + i % 2];
      x = exp2_approx(factor * x - query.shift);
      y = x * (y - query.delta);
    }
  }
}

// Calls f(x, y, half, i) for parts of 8 elements of this lane in both results; i is the column
// number of a part's first element.
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

// Column of element i in a row of 8-column results, for this lane.
__device__ __forceinline__ int column(int i) { return 8 * (i / 2) + 2 * (lane_id() % 4) + i % 2; }

}  // namespace omniattn::gpu
