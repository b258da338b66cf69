// Decays and scores of a chunk in shared memory, and the triangular systems of delta updates.
#pragma once

#include "kernels/recurrence_mma/recurrence_mma_cuda.h"

namespace omniattn {
namespace {

// Row strides in shared memory without bank conflicts: of scores as right operands, of factors that
// are read in the layout of results, and of scores by columns.
constexpr int kScoreStride = kTokens + 8, kFactorStride = kTokens + 8, kColumnStride = kTokens + 4;

// Shared memory of a block. kKeys: the key width, padded with zeros.
template <int kKeys, bool kDelta>
struct MmaShared {
  struct Stage {  // tokens that are being copied, or used
    bf16 q[kTokens * kKeys], k[kTokens * kKeys], v[kTokens * kPanel];
  };
  Stage stages[2];
  alignas(16) bf16 P[2][kTokens * kScoreStride];              // pieces, by rows
  alignas(16) float N[kDelta ? kTokens * kColumnStride : 4];  // by columns, or by rows
  alignas(16) float between[kTokens * kFactorStride];         // decays from column to row
  float in[kTokens], beta[kTokens];

  // Decays from a token to the end.
  __device__ __forceinline__ const float* out() const {
    return between + (kTokens - 1) * kFactorStride;
  }
};

// Computes the decays of a chunk from w = exp(g) of each lane's token, 1 past the last one. Each
// warp has 8 rows.
template <class Shared>
__device__ __forceinline__ void set_decays(Shared& shared, float w, float beta) {
  const int lane = lane_index(), first = gpu::warp_id() * (kTokens / kWarps);
  float product = 1;
#pragma unroll 8
  for (int i = 1; i < first; ++i) {
    const float factor = __shfl_sync(0xffffffffu, w, i);
    if (i > lane) product *= factor;
  }
#pragma unroll
  for (int r = 0; r < kTokens / kWarps; ++r) {
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
template <int kPairs, int kKeys>
__device__ __forceinline__ void scores(float (&sums)[2 * kPairs][4], const bf16* rows,
                                       const bf16* keys, int row, int pair) {
  using Rows = gpu::SharedRows<bf16, kKeys>;
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
      gpu::mma<bf16>(sums[2 * n], a, {b[0], b[1]});
      gpu::mma<bf16>(sums[2 * n + 1], a, {b[2], b[3]});
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
__device__ __forceinline__ void store_pieces(const float (&sums)[2 * kPairs][4], Shared& shared,
                                             int row, int pair, float factor) {
  decayed<1, kPairs>(sums, shared, row, pair, [&](int i, int j, float x, float y) {
    uint32_t pieces[2];
    split(x * factor, y * factor, pieces);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      *reinterpret_cast<uint32_t*>(shared.P[n] + i * kScoreStride + j) = pieces[n];
    }
  });
}

// Stores decayed scores of k by columns or by rows.
template <bool kByColumns, int kPairs, class Shared>
__device__ __forceinline__ void store_factors(const float (&sums)[2 * kPairs][4], Shared& shared,
                                              int row, int pair) {
  constexpr int kI = kByColumns ? 1 : kColumnStride, kJ = kByColumns ? kColumnStride : 1;
  decayed<0, kPairs>(sums, shared, row, pair, [&](int i, int j, float x, float y) {
    shared.N[i * kI + j * kJ] = x;
    shared.N[i * kI + (j + 1) * kJ] = y;
  });
}

// Loads scores as a right operand: terms [16 step, 16 step + 16) of results [16 pair, 16 pair +
// 16), which are rows of scores, or their columns.
template <bool kByRow>
__device__ __forceinline__ void load_scores(uint32_t (&b)[4], const bf16* from, int step,
                                            int pair) {
  const int lane = lane_index();
  if constexpr (kByRow) {
    const int at = (lane / 16 * 8 + lane % 8) * kScoreStride + lane / 8 % 2 * 8;
    gpu::ldmatrix_x4(b, from + at + 16 * pair * kScoreStride + 16 * step);
  } else {
    const int at = lane % 16 * kScoreStride + lane / 16 * 8;
    gpu::ldmatrix_x4_trans(b, from + at + 16 * step * kScoreStride + 16 * pair);
  }
}
// True if a pair of tokens' tiles is on or below the diagonal of scores.
template <bool kByRow>
__device__ constexpr bool has_scores(int step, int pair) {
  return kByRow ? pair >= step : pair <= step;
}

// Solves e_i = error_i + sum_{j<i} N_ij u_j with u_i = -beta_i e_i by forward substitution in fp32,
// for the 16 columns of a warp, transposed; e overwrites the error.
template <class Shared>
__device__ __forceinline__ void solve(Tile (&e)[kTiles], Tile (&u)[kTiles], const Shared& shared) {
  const LanePlace at;
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    if (j % 8 == 0) __syncwarp();  // delays later loads, which would take registers
    const float* const own = e[j / 8] + j % 2;
    const float factor = -shared.beta[j];
    const int owner = at.lane - at.t + j % 8 / 2;
    const float low = __shfl_sync(0xffffffffu, own[0] * factor, owner);
    const float high = __shfl_sync(0xffffffffu, own[2] * factor, owner);
    const float* const column = shared.N + j * kColumnStride + 2 * at.t;
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
template <class Shared>
__device__ __forceinline__ void solve_gradient(Tile (&d)[kTiles], Tile (&de)[kTiles],
                                               const Shared& shared) {
  const LanePlace at;
#pragma unroll
  for (int i = kTokens - 1; i >= 0; --i) {
    const float* const own = d[i / 8] + i % 2;
    const float factor = -shared.beta[i];
    const int owner = at.lane - at.t + i % 8 / 2;
    const float low = __shfl_sync(0xffffffffu, own[0] * factor, owner);
    const float high = __shfl_sync(0xffffffffu, own[2] * factor, owner);
    const float* const row = shared.N + i * kColumnStride + 2 * at.t;
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
// head with the state, or its gradient, of a panel of columns of values.
template <int kKeys, bool kDelta>
struct PanelByMma {
  using Shared = MmaShared<kKeys, kDelta>;
  using Rows = TokenOperand<kKeys>;

  const Recurrence& p;
  const RecurrenceSequence& s;
  Shared& shared;
  const int64_t head, panel;   // first column of the block
  const int64_t first, width;  // first column of the warp; columns from there on
  const TokenRows<bf16> q, k, v;
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
  // Starts the copy of a chunk.
  __device__ __forceinline__ void copy(int64_t t, bool with_values) const {
    q.template copy<kKeys>(stage(t).q, t, s.count, p.key_width);
    k.template copy<kKeys>(stage(t).k, t, s.count, p.key_width);
    if (with_values) v.template copy<kPanel>(stage(t).v, t, s.count, p.value_width - panel);
    gpu::cp_async_commit();
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
    for (int step = 0; step < kTokenPairs; ++step) {
      const Left<2> left(rows[2 * step], rows[2 * step + 1]);
#pragma unroll
      for (int pair = 0; pair < kTokenPairs; ++pair) {
        if (!has_scores<kByRow>(step, pair)) continue;
        uint32_t b[4];
        load_scores<kByRow>(b, shared.P[1], step, pair);
        left.multiply(b, sums[2 * pair], sums[2 * pair + 1], 1);
        load_scores<kByRow>(b, shared.P[0], step, pair);
        left.multiply(b, sums[2 * pair], sums[2 * pair + 1]);
      }
    }
  }

  // Computes the decays, P times a factor, and N, by columns or by rows.
  template <bool kByColumns>
  __device__ __forceinline__ void find_scores(int64_t t, float w, float of_beta, float factor) {
    constexpr int kPairs = kDelta ? 2 : 1;
    const int warp = gpu::warp_id(), row = warp % 2 * 16, pair = kDelta ? 0 : warp / 2;
    const bool of_k = kDelta && warp >= 2;
    const bf16* const keys = stage(t).k;
    float sums[2 * kPairs][4];
    scores<kPairs, kKeys>(sums, of_k ? keys : stage(t).q, keys, row, pair);
    set_decays(shared, w, of_beta);
    __syncthreads();
    of_k ? store_factors<kByColumns, kPairs>(sums, shared, row, pair)
         : store_pieces<kPairs>(sums, shared, row, pair, factor);
  }
};

}  // namespace
}  // namespace omniattn
