// Gradients of rows on tensor cores, see recurrence_mma_rows_cuda.h, with one decay for all
// channels, or none.
#include "kernels/recurrence_mma/recurrence_mma_rows_cuda.h"

#include "kernels/recurrence_mma/recurrence_mma_scores_cuda.h"

namespace omniattn {
namespace {

template <class T, int kKeys>
struct RowsShared {
  static constexpr int kTokens = kHeadTokens;
  static constexpr int kScoreStride = Scores<kTokens, false>::kScoreStride;
  T q[kTokens * kKeys], k[kTokens * kKeys];
  union {
    bf16 rows[kReaders][2][kTokens * kPanel];   // pieces of a panel of columns of values
    bf16 scores[2][2][kTokens * kScoreStride];  // pieces of dP and dN
  };
  alignas(16) float between[kTokens * kFactorStride];
  float in[kTokens], beta[kTokens];
  float crossing[kTokens][kTokens + 1];  // shares of dg of pairs of tokens
  float entering[kWarps][kTokens], leaving[kWarps][kTokens], carried[kWarps];
};

template <class T, int kKeys, bool kDelta>
struct RowsByMma : RowProducts<T, kKeys, kDelta, false, RowsShared<T, kKeys>> {
  using Base = RowProducts<T, kKeys, kDelta, false, RowsShared<T, kKeys>>;
  using Base::kTokens, Base::kTiles, Base::kStrips;
  using Base::pair, Base::first, Base::lane, Base::dP, Base::dN, Base::met, Base::carried;
  using Base::params, Base::found, Base::p, Base::s, Base::shared, Base::head, Base::row;
  static constexpr int kScoreStride = RowsShared<T, kKeys>::kScoreStride;

  float P[2][4] = {}, N[2][4] = {};  // scores: of all tiles up to the diagonal

  __device__ __forceinline__ void find_scores() {
    scores<1, kKeys>(P, shared.q, shared.k, row, pair);
    if constexpr (kDelta) scores<1, kKeys>(N, shared.k, shared.k, row, pair);
    this->each_score([&](int n, int e, int i, int j) {
      const float factor = shared.between[i * kFactorStride + j];
      P[n][e] = j <= i ? P[n][e] * factor : 0;
      if constexpr (kDelta) N[n][e] = j < i ? N[n][e] * factor : 0;
    });
  }

  // Stores dP and dN with their decays, and their shares of dg.
  __device__ __forceinline__ void store_scores() {
    const float scale = static_cast<float>(p.scale);
    this->each_score([&](int n, int e, int i, int j) {
      dP[n][e] = j <= i ? scale * dP[n][e] : 0;
      float share = dP[n][e] * P[n][e];
      if constexpr (kDelta) {
        dN[n][e] = j < i ? dN[n][e] : 0;
        share += dN[n][e] * N[n][e];
      }
      if (j < i) shared.crossing[i][j] = share;
    });
    this->each_score([&](int n, int e, int i, int j) {
      if (e % 2 == 1) return;
      const float* const factor = shared.between + i * kFactorStride + j;
      const auto store = [&](const float (&x)[2][4], int which) {
        uint32_t pieces[2];
        split(x[n][e] * factor[0], x[n][e + 1] * factor[1], pieces);
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          *reinterpret_cast<uint32_t*>(shared.scores[which][a] + i * kScoreStride + j) = pieces[a];
        }
      };
      store(dP, 0);
      if constexpr (kDelta) store(dN, 1);
    });
  }

  // Channels [channel, channel + 16) of rows of q or k as a left operand, transposed.
  __device__ __forceinline__ void load_channels(uint32_t (&a)[4], const T* rows, int channel,
                                                int step, int piece) const {
    using Rows = gpu::SharedRows<T, kKeys>;
    const int l = lane.lane;
    gpu::ldmatrix_x4_trans(
        a, rows + 16 * step * kKeys + Rows::offset(l / 16 * 8 + l % 8, channel / 8 + l / 8 % 2));
    take_piece<T>(a, piece);
  }
  // sums += a piece a times pieces of scores: of rows that are the results' tokens, or of their
  // columns.
  template <bool kByRow>
  __device__ __forceinline__ void multiply_scores(const uint32_t (&a)[4], int piece, int which,
                                                  int step, int tokens,
                                                  Tile (&sums)[kTiles]) const {
    if (!omniattn::has_scores<kByRow>(step, tokens)) return;
#pragma unroll
    for (int n = 1 - piece; n >= 0; --n) {
      uint32_t b[4];
      load_scores<kByRow, kScoreStride>(b, shared.scores[which][n], step, tokens);
      gpu::mma<bf16>(sums[2 * tokens], a, {b[0], b[1]});
      gpu::mma<bf16>(sums[2 * tokens + 1], a, {b[2], b[3]});
    }
  }

  // Finds the gradients of 16 channels and adds their shares of dg.
  __device__ __forceinline__ void finish_strip(int m, Tile (&entering)[kTiles],
                                               Tile (&leaving)[kTiles]) {
    const int channel = first + 16 * m;
    const float scale = static_cast<float>(p.scale);
    const float* const out = shared.between + (kTokens - 1) * kFactorStride;
    Tile q[kTiles], k[kTiles], dq[kTiles], dk[kTiles];
    load_columns<kKeys>(q, shared.q, channel);
    load_columns<kKeys>(k, shared.k, channel);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = token_of(n, i);
        dq[n][i] = met[kGradO][m][n][i] * (shared.in[token] * scale);
        const float key = met[kAdded][m][n][i] * out[token];
        float enters = q[n][i] * dq[n][i];
        dk[n][i] = key;
        if constexpr (kDelta) {
          const float probe = met[kProbe][m][n][i] * shared.in[token];
          enters += k[n][i] * probe;
          dk[n][i] += probe;
        }
        entering[n][i] += enters;
        leaving[n][i] += k[n][i] * key;
      }
    }
#pragma unroll
    for (int step = 0; step < kTiles / 2; ++step) {
#pragma unroll
      for (int piece = kIsSplit<T>; piece >= 0; --piece) {
        uint32_t of_q[4], of_k[4];
        load_channels(of_q, shared.q, channel, step, piece);
        load_channels(of_k, shared.k, channel, step, piece);
#pragma unroll
        for (int tokens = 0; tokens < kTiles / 2; ++tokens) {
          multiply_scores<true>(of_k, piece, 0, step, tokens, dq);
          multiply_scores<false>(of_q, piece, 0, step, tokens, dk);
          if constexpr (kDelta) {
            multiply_scores<true>(of_k, piece, 1, step, tokens, dk);
            multiply_scores<false>(of_k, piece, 1, step, tokens, dk);
          }
        }
      }
    }
    const int64_t stride = p.value_heads * p.key_width, to = this->at(p.key_width) + channel;
    write_rows(dq, found.dq + to, stride, s.count, p.key_width - channel);
    write_rows(dk, found.dk + to, stride, s.count, p.key_width - channel);
  }

  // Sum over the rows of results, for each token.
  __device__ __forceinline__ void store_sums(const Tile (&x)[kTiles], float* to) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float sum = x[n][b] + x[n][2 + b];
#pragma unroll
        for (int step = 4; step < kLanes; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane.g == 0) to[8 * n + 2 * lane.t + b] = sum;
      }
    }
  }

  // dg_t is the sum of the shares that cross token t; one warp computes it for all tokens.
  __device__ __forceinline__ void write_dg() const {
    const int t = lane.lane;
    float sum = 0;
    for (int i = kTokens - 1; i >= 0; --i) {
      if (i > t) sum += shared.crossing[i][t];
      shared.crossing[i][t] = i > t ? sum : 0;
    }
    __syncwarp();
    float dg = 0, enters = 0, leaves = 0, all = 0;
    for (int j = 0; j < kTokens; ++j) dg += shared.crossing[t][j];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      enters += shared.entering[w][t];
      leaves += shared.leaving[w][t];
      all += shared.carried[w];
    }
    const float own = leaves;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const float later = __shfl_down_sync(0xffffffffu, enters, step);
      const float earlier = __shfl_up_sync(0xffffffffu, leaves, step);
      if (t + step < kLanes) enters += later;
      if (t >= step) leaves += earlier;
    }
    dg += all * shared.in[kTokens - 1] + (leaves - own) + enters;
    if (t < s.count) static_cast<float*>(params.dg)[this->at(1) + t * p.value_heads] = dg;
  }

  __device__ __forceinline__ void run() {
    const int64_t key_head = p.key_head_of(head);
    const TokenRows<T> q(p.q, s, key_head), k(p.k, s, key_head);
    q.template copy<kKeys, kTokens>(shared.q, 0, s.count, p.key_width);
    k.template copy<kKeys, kTokens>(shared.k, 0, s.count, p.key_width);
    gpu::cp_async_commit();
    const float w = exp(TokenRows<float>(p.g, s, head).of_lane(0, s.count, 0));
    set_decays(shared, w, TokenRows<float>(p.beta, s, head).of_lane(0, s.count, 1));
    gpu::cp_async_wait<0>();
    __syncthreads();
    find_scores();
    this->multiply_columns();
    if (this->has_scores()) store_scores();
    __syncthreads();
    Tile entering[kTiles], leaving[kTiles];
    gpu::clear(entering);
    gpu::clear(leaving);
#pragma unroll
    for (int m = 0; m < kStrips; ++m) finish_strip(m, entering, leaving);
    if (params.dg == nullptr) return;
    store_sums(entering, shared.entering[gpu::warp_id()]);
    store_sums(leaving, shared.leaving[gpu::warp_id()]);
    carried[0] = warp_sum(carried[0]);
    if (lane.lane == 0) shared.carried[gpu::warp_id()] = carried[0];
    __syncthreads();
    if (gpu::warp_id() == 0) write_dg();
  }
};

// Blocks: value heads of slots.
template <class T, int kKeys, bool kDelta>
__global__ void __launch_bounds__(kThreads, 2)
    recurrence_rows_mma_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                               const __grid_constant__ Found<float> found) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = chunk_of_slot(p, blockIdx.x / p.value_heads);
  if (s.count == 0) return;
  RowsByMma<T, kKeys, kDelta>{{.params = params,
                               .found = found,
                               .p = p,
                               .s = s,
                               .shared = *gpu::dynamic_shared<RowsShared<T, kKeys>>(),
                               .head = blockIdx.x % p.value_heads}}
      .run();
}

}  // namespace

void launch_recurrence_rows_mma(const RecurrenceBackwardParams& params, void* memory,
                                Stream stream) {
  const Recurrence& p = params.recurrence;
  const int64_t chunks = recurrence_slots(p) * p.value_heads;
  if (chunks == 0) return;
  const Found<float> found(p, memory);
  with_rows(p, [&]<class T, int kKeys, bool kDelta>() {
    GPU_LAUNCH((recurrence_rows_mma_kernel<T, kKeys, kDelta>), blocks(chunks), kThreads,
               sizeof(RowsShared<T, kKeys>), stream, params, found);
  });
}

}  // namespace omniattn
