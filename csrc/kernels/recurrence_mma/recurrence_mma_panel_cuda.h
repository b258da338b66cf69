// Scores of a chunk in shared memory, the triangular systems of delta updates, and what all walks
// over chunks have in common.
#pragma once

#include "kernels/recurrence_mma/recurrence_mma_cuda.h"

namespace omniattn {
namespace {

// Scores of a chunk: those of q as two pieces by rows, and those of k (delta) by columns for the
// forward, by rows for the backward. Strides have no bank conflicts.
template <int kCount, bool kDelta>
struct Scores {
  static constexpr int kTokens = kCount, kScoreStride = kTokens + 8, kColumnStride = kTokens + 4;
  alignas(16) bf16 P[2][kTokens * kScoreStride];
  alignas(16) float N[kDelta ? kTokens * kColumnStride : 4];
  float beta[kTokens];
};

// Loads scores as a right operand: terms [16 step, 16 step + 16) of results [16 pair, 16 pair +
// 16), which are rows of scores, or their columns.
template <bool kByRow, int kStride>
__device__ __forceinline__ void load_scores(uint32_t (&b)[4], const bf16* from, int step,
                                            int pair) {
  const int lane = lane_index();
  if constexpr (kByRow) {
    const int at = (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;
    gpu::ldmatrix_x4(b, from + at + 16 * pair * kStride + 16 * step);
  } else {
    const int at = lane % 16 * kStride + lane / 16 * 8;
    gpu::ldmatrix_x4_trans(b, from + at + 16 * step * kStride + 16 * pair);
  }
}
// True if a pair of tokens' tiles is on or below the diagonal of scores.
template <bool kByRow>
__device__ constexpr bool has_scores(int step, int pair) {
  return kByRow ? pair >= step : pair <= step;
}

// Solves e_i = error_i + sum_{j<i} N_ij u_j with u_i = -beta_i e_i by forward substitution in fp32,
// for the 16 columns of a warp, transposed; e overwrites the error.
template <class Shared, int kTiles>
__device__ __forceinline__ void solve(Tile (&e)[kTiles], Tile (&u)[kTiles], const Shared& shared) {
  const LanePlace at;
#pragma unroll
  for (int j = 0; j < Shared::kTokens; ++j) {
    if (j % 8 == 0) __syncwarp();  // delays later loads, which would take registers
    const float* const own = e[j / 8] + j % 2;
    const float factor = -shared.beta[j];
    const int owner = at.lane - at.t + j % 8 / 2;
    const float low = __shfl_sync(0xffffffffu, own[0] * factor, owner);
    const float high = __shfl_sync(0xffffffffu, own[2] * factor, owner);
    const float* const column = shared.N + j * Shared::kColumnStride + 2 * at.t;
#pragma unroll
    for (int n = j / 8; n < kTiles; ++n) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (n == j / 8 && 2 * at.t + b <= j % 8) continue;  // a token up to j
        e[n][b] += column[8 * n + b] * low;
        e[n][2 + b] += column[8 * n + b] * high;
      }
    }
    if (at.lane == owner) u[j / 8][j % 2] = low, u[j / 8][2 + j % 2] = high;
  }
}
// The gradient: d_j = dx_j + sum_{i>j} N_ij de_i with de_i = -beta_i d_i; d overwrites dx. N is
// stored by rows.
template <class Shared, int kTiles>
__device__ __forceinline__ void solve_gradient(Tile (&d)[kTiles], Tile (&de)[kTiles],
                                               const Shared& shared) {
  const LanePlace at;
#pragma unroll
  for (int i = Shared::kTokens - 1; i >= 0; --i) {
    const float* const own = d[i / 8] + i % 2;
    const float factor = -shared.beta[i];
    const int owner = at.lane - at.t + i % 8 / 2;
    const float low = __shfl_sync(0xffffffffu, own[0] * factor, owner);
    const float high = __shfl_sync(0xffffffffu, own[2] * factor, owner);
    const float* const row = shared.N + i * Shared::kColumnStride + 2 * at.t;
#pragma unroll
    for (int n = 0; n <= i / 8; ++n) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (n == i / 8 && 2 * at.t + b >= i % 8) continue;  // a token from i on
        d[n][b] += row[8 * n + b] * low;
        d[n][2 + b] += row[8 * n + b] * high;
      }
    }
    if (at.lane == owner) de[i / 8][i % 2] = low, de[i / 8][2 + i % 2] = high;
  }
}

// Common parts of a forward and a backward over a sequence: a block walks over the chunks of one
// head with the state, or its gradient, of a panel of columns of values. A derived class computes
// the scores and the operands of a chunk with the decays of a call:
//
//   start()               before the first chunk
//   copy(t, with_values)  starts the copy of a chunk
//   gates(t)              loads the numbers of this lane's token of a chunk
//   prepare(t, gates, x)  makes the operands, P times x, and N; a barrier must follow for the
//   scores query, probe, key(t)  operands with which a state is read and updated in, out(token)
//   factors that these operands lack decay_state()         decays a state over the chunk
template <class T, int kKeys, class SharedMemory>
struct PanelByMma {
  using Element = T;
  using Shared = SharedMemory;
  static constexpr int kTokens = Shared::kTokens, kTiles = kTokens / 8;

  const Recurrence& p;
  const RecurrenceSequence& s;
  Shared& shared;
  const int64_t head, panel;   // first column of the block
  const int64_t first, width;  // first column of the warp; columns from there on
  const TokenRows<T> q, k, v;
  const TokenRows<float> g, beta;
  const float scale;
  PanelState<kKeys> state;

  __device__ PanelByMma(const Recurrence& params, const RecurrenceSequence& sequence)
      : p(params),
        s(sequence),
        shared(*gpu::dynamic_shared<Shared>()),
        head(blockIdx.x % p.value_heads),
        panel(static_cast<int64_t>(blockIdx.y) * kPanel),
        first(panel + 16 * gpu::warp_id()),
        width(p.value_width - first),
        q(p.q, s, p.key_head_of(head)),
        k(p.k, s, p.key_head_of(head)),
        v(p.v, s, head, panel),
        g(p.g, s, head),
        beta(p.beta, s, head),
        scale(static_cast<float>(p.scale)),
        state{p, head, first} {}

  __device__ __forceinline__ auto& stage(int64_t t) const { return shared.stages[t / kTokens % 2]; }
  // Starts the copies of q, k and v, without committing them.
  __device__ __forceinline__ void copy_rows(int64_t t, bool with_values) const {
    auto& to = stage(t);
    q.template copy<kKeys, kTokens>(to.q, t, s.count, p.key_width);
    k.template copy<kKeys, kTokens>(to.k, t, s.count, p.key_width);
    if (with_values) {
      v.template copy<kPanel, kTokens>(to.v, t, s.count, p.value_width - panel);
    }
  }
  // Row stride of o, dv and the like, and place of a token's row at the warp's first column.
  __device__ __forceinline__ int64_t stride() const { return p.value_heads * p.value_width; }
  __device__ __forceinline__ int64_t place(int64_t t) const {
    return (s.batch * p.steps + s.begin + t) * stride() + head * p.value_width + first;
  }
  // Row of a skip (N, Hv, V) or of its gradient, at the warp's first column.
  template <class X>
  __device__ __forceinline__ auto* skip_row(X* skip) const {
    using Row = std::conditional_t<std::is_const_v<X>, const float, float>;
    return static_cast<Row*>(skip) + (s.index * p.value_heads + head) * p.value_width + first;
  }
  // sums += factor skip rows
  __device__ __forceinline__ void add_skipped(Tile (&sums)[kTiles], const Tile (&rows)[kTiles],
                                              float factor) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float of_row = column_of(i) < width ? factor * skip_row(p.skip)[column_of(i)] : 0;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) sums[n][i] += of_row * rows[n][i];
    }
  }

  // sums^T += P rows, or P^T rows; `rows` are transposed, too.
  template <bool kByRow>
  __device__ __forceinline__ void add_scores(const Tile (&rows)[kTiles],
                                             Tile (&sums)[kTiles]) const {
#pragma unroll
    for (int step = 0; step < kTiles / 2; ++step) {
      const Left<2> left(rows[2 * step], rows[2 * step + 1]);
#pragma unroll
      for (int pair = 0; pair < kTiles / 2; ++pair) {
        if (!has_scores<kByRow>(step, pair)) continue;
        left.template multiply<2>(
            sums[2 * pair], sums[2 * pair + 1], [&](uint32_t (&b)[4], int piece) {
              load_scores<kByRow, Shared::kScoreStride>(b, shared.P[piece], step, pair);
            });
      }
    }
  }
};

// Calls f with the dtype, the padded key width and the update of a call.
template <class F>
void with_rows(const Recurrence& p, const F& f) {
  const auto with_update = [&]<class T, int kKeys>() {
    p.delta ? f.template operator()<T, kKeys, true>() : f.template operator()<T, kKeys, false>();
  };
  const auto with_keys = [&]<class T>(T) {
    p.key_width <= 64 ? with_update.template operator()<T, 64>()
                      : with_update.template operator()<T, 128>();
  };
  p.dtype == DType::bf16 ? with_keys(bf16{}) : with_keys(f16{});
}

// Blocks of a walk: value heads of sequences, panels of columns.
inline dim3 panels_of(const Recurrence& p, int64_t items) {
  return dim3(blocks(items * p.value_heads), blocks(ceil_div(p.value_width, int64_t{kPanel})));
}

}  // namespace
}  // namespace omniattn
