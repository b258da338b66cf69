// Chunks with one decay for all channels, or none: decays and scores.
#pragma once

#include "kernels/recurrence_mma/recurrence_mma_panel_cuda.h"

namespace omniattn {
namespace {

constexpr int kHeadTokens = 32;  // of a chunk
static_assert(recurrence_chunk(false) == kHeadTokens && kHeadTokens == kLanes);
// Row stride, without bank conflicts, of factors that are read in the layout of results.
constexpr int kFactorStride = kHeadTokens + 8;

// Shared memory of a block. kKeys: the key width, padded with zeros.
template <class T, int kKeys, bool kDelta>
struct HeadShared : Scores<kHeadTokens, kDelta> {
  struct Stage {  // tokens that are being copied, or used
    alignas(16) T q[kHeadTokens * kKeys], k[kHeadTokens * kKeys], v[kHeadTokens * kPanel];
  };
  Stage stages[2];
  alignas(16) float between[kHeadTokens * kFactorStride];  // decays from column to row
  float in[kHeadTokens];

  // Decays from a token to the end.
  __device__ __forceinline__ const float* out() const {
    return between + (kHeadTokens - 1) * kFactorStride;
  }
};

// Computes the decays of a chunk from w = exp(g) of each lane's token, 1 past the last one. Each
// warp has 8 rows.
template <class Shared>
__device__ __forceinline__ void set_decays(Shared& shared, float w, float beta) {
  const int lane = lane_index(), first = gpu::warp_id() * (kHeadTokens / kWarps);
  float product = 1;
#pragma unroll 8
  for (int i = 1; i < first; ++i) {
    const float factor = __shfl_sync(0xffffffffu, w, i);
    if (i > lane) product *= factor;
  }
#pragma unroll
  for (int r = 0; r < kHeadTokens / kWarps; ++r) {
    const int i = first + r;
    const float factor = __shfl_sync(0xffffffffu, w, i);
    if (i > lane) product *= factor;
    shared.between[i * kFactorStride + lane] = product;
    if (lane == 0) shared.in[i] = product * w;
  }
  if (first == 0) shared.beta[lane] = beta;
}

// Scores of tokens [row, row + 16) with the keys up to them, q k^T or k k^T, in kPairs pairs of
// tiles of 8 keys from `pair` on.
template <int kPairs, int kKeys, class T>
__device__ __forceinline__ void scores(float (&sums)[2 * kPairs][4], const T* rows, const T* keys,
                                       int row, int pair) {
  using Rows = gpu::SharedRows<T, kKeys>;
  const int lane = lane_index();
  const int a_at = gpu::opaque(Rows::offset(row + lane % 16, lane / 16));
  const int b_at = gpu::opaque(Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2));
  gpu::clear(sums);
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    uint32_t a[4];
    gpu::ldmatrix_x4(a, rows + (a_at ^ 16 * step));
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      if (16 * (pair + n) > row) continue;
      uint32_t b[4];
      gpu::ldmatrix_x4(b, keys + 16 * (pair + n) * kKeys + (b_at ^ 16 * step));
      gpu::mma<T>(sums[2 * n], a, {b[0], b[1]});
      gpu::mma<T>(sums[2 * n + 1], a, {b[2], b[3]});
    }
  }
}

// Calls f(i, j, x, y) for the decayed scores x, y of row i with columns j and j + 1; those
// of columns that are not below i + kDiagonal are 0.
template <int kDiagonal, int kPairs, class Shared, class F>
__device__ __forceinline__ void decayed(const float (&sums)[2 * kPairs][4], const Shared& shared,
                                        int row, int pair, const F& f) {
  const LanePlace at;
#pragma unroll
  for (int n = 0; n < 2 * kPairs; ++n) {
    if (16 * pair + 8 * n >= row + 16) continue;
    const int j = 16 * pair + 8 * n + 2 * at.t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + at.g + 8 * half;
      const float* const factor = shared.between + i * kFactorStride + j;
      f(i, j, j < i + kDiagonal ? sums[n][2 * half] * factor[0] : 0.0f,
        j + 1 < i + kDiagonal ? sums[n][2 * half + 1] * factor[1] : 0.0f);
    }
  }
}

// Stores decayed scores of q as two pieces by rows, times a factor.
template <int kPairs, class Shared>
__device__ __forceinline__ void store_scores(const float (&sums)[2 * kPairs][4], Shared& shared,
                                             int row, int pair, float factor) {
  decayed<1, kPairs>(sums, shared, row, pair, [&](int i, int j, float x, float y) {
    uint32_t pieces[2];
    split(x * factor, y * factor, pieces);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      *reinterpret_cast<uint32_t*>(shared.P[n] + i * Shared::kScoreStride + j) = pieces[n];
    }
  });
}

// Stores decayed scores of k by columns or by rows.
template <bool kByColumns, int kPairs, class Shared>
__device__ __forceinline__ void store_factors(const float (&sums)[2 * kPairs][4], Shared& shared,
                                              int row, int pair) {
  constexpr int kStride = Shared::kColumnStride;
  constexpr int kI = kByColumns ? 1 : kStride, kJ = kByColumns ? kStride : 1;
  decayed<0, kPairs>(sums, shared, row, pair, [&](int i, int j, float x, float y) {
    shared.N[i * kI + j * kJ] = x;
    shared.N[i * kI + (j + 1) * kJ] = y;
  });
}

// One decay for all channels, or none, with the interface of recurrence_mma_panel_cuda.h.
template <class T, int kKeys, bool kDelta, bool kBackward>
struct HeadPanel : PanelByMma<T, kKeys, HeadShared<T, kKeys, kDelta>> {
  using Base = PanelByMma<T, kKeys, HeadShared<T, kKeys, kDelta>>;
  using Base::p, Base::s, Base::shared, Base::g, Base::beta, Base::state;
  using Rows = TokenOperand<T, kKeys>;
  using Base::Base;
  struct Gates {
    float g, beta;
  };

  __device__ __forceinline__ void start() const {}
  __device__ __forceinline__ void copy(int64_t t, bool with_values) const {
    this->copy_rows(t, with_values);
    gpu::cp_async_commit();
  }
  __device__ __forceinline__ Gates gates(int64_t t) const {
    return {g.of_lane(t, s.count, 0), beta.of_lane(t, s.count, 1)};
  }
  __device__ __forceinline__ Rows query(int64_t t) const { return Rows(this->stage(t).q); }
  __device__ __forceinline__ Rows probe(int64_t t) const { return Rows(this->stage(t).k); }
  __device__ __forceinline__ Rows key(int64_t t) const { return Rows(this->stage(t).k); }
  __device__ __forceinline__ float in(int token) const { return shared.in[token]; }
  __device__ __forceinline__ float out(int token) const { return shared.out()[token]; }
  __device__ __forceinline__ void decay_state() { state.decay(shared.in[kHeadTokens - 1]); }

  // Without queries, of delta updates, it computes N only.
  template <bool kQueries = true>
  __device__ __forceinline__ void prepare(int64_t t, const Gates& gates, float factor) {
    constexpr int kPairs = kDelta && kQueries ? 2 : 1;
    const int warp = gpu::warp_id(), row = warp % 2 * 16, pair = kPairs == 2 ? 0 : warp / 2;
    const bool of_k = !kQueries || (kDelta && warp >= 2);
    const float w = exp(gates.g);
    const T* const keys = this->stage(t).k;
    float sums[2 * kPairs][4];
    scores<kPairs, kKeys>(sums, of_k ? keys : this->stage(t).q, keys, row, pair);
    set_decays(shared, w, gates.beta);
    __syncthreads();
    of_k ? store_factors<!kBackward, kPairs>(sums, shared, row, pair)
         : store_scores<kPairs>(sums, shared, row, pair, factor);
  }
};

}  // namespace
}  // namespace omniattn
