// Chunks of rows of 16 bits with a decay per channel: operands and scores. A decay cannot be
// factored out of the products of rows, so operands are rows times the decays of their channels
// from the start of a chunk, or to its end, in pieces. Scores are sums over channels of a query
// times a key that decays from token to token, in fp32: quotients of decays from the start of the
// chunk would overflow, and exponentials of differences lose what strong decays leave.
#pragma once

#include "kernels/recurrence_mma/recurrence_mma_panel_cuda.h"

namespace omniattn {
namespace {

constexpr int kChannelTokens = 16;  // of a chunk
static_assert(recurrence_chunk(true) == kChannelTokens);

template <class T, int kKeys, bool kDelta, bool kBackward>
struct ChannelShared : Scores<kChannelTokens, kDelta> {
  static constexpr int kRows = kChannelTokens * kKeys;
  // Pieces of rows that a state reads and of rows that are added to one.
  static constexpr int kIn = kBackward ? 3 : 2, kOut = kBackward ? 2 : 3;
  struct Stage {  // tokens that are being copied, or used
    alignas(16) T q[kRows], k[kRows], v[kChannelTokens * kPanel];
    alignas(16) float g[kRows];
  };
  Stage stages[2];
  alignas(16) float w[kRows], end[kKeys];  // decays of a token, and of the chunk
  alignas(16) bf16 q_in[kIn][kRows], k_in[kDelta ? kIn : 1][kRows], k_out[kOut][kRows];
};

// Adds each of N numbers over a warp; lane i gets the sum of number i / (32 / N).
template <int N>
__device__ __forceinline__ float spread_sums(float (&x)[N]) {
  const int lane = lane_index();
#pragma unroll
  for (int step = kLanes / 2, count = N / 2; step > 0; step /= 2, count /= 2) {
    if (count == 0) {
      x[0] += __shfl_xor_sync(0xffffffffu, x[0], step);
      continue;
    }
    const bool high = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float given = high ? x[i] : x[i + count], kept = high ? x[i + count] : x[i];
      x[i] = kept + __shfl_xor_sync(0xffffffffu, given, step);
    }
  }
  return x[0];
}

// A decay per channel, with the interface of recurrence_mma_panel_cuda.h.
template <class T, int kKeys, bool kDelta, bool kBackward>
struct ChannelPanel : PanelByMma<T, kKeys, ChannelShared<T, kKeys, kDelta, kBackward>> {
  using Base = PanelByMma<T, kKeys, ChannelShared<T, kKeys, kDelta, kBackward>>;
  using Base::Base, Base::p, Base::s, Base::shared, Base::g, Base::beta, Base::state;
  using typename Base::Shared;
  static constexpr int kTokens = kChannelTokens, kRows = Shared::kRows;
  static constexpr int kChannels = kKeys / kLanes;  // of a lane, in scores
  using In = TokenOperand<bf16, kKeys, Shared::kIn, kRows>;
  using Out = TokenOperand<bf16, kKeys, Shared::kOut, kRows>;
  struct Gates {
    float beta;
  };

  // Scores above the diagonal are zeros.
  __device__ __forceinline__ void start() const {
    for (int i = threadIdx.x; i < kTokens * Shared::kScoreStride; i += kThreads) {
      shared.P[0][i] = shared.P[1][i] = {};
    }
  }
  __device__ __forceinline__ void copy(int64_t t, bool with_values) const {
    this->copy_rows(t, with_values);
    g.template copy<kKeys, kTokens>(this->stage(t).g, t, s.count, p.key_width);
    gpu::cp_async_commit();
  }
  __device__ __forceinline__ Gates gates(int64_t t) const { return {beta.of_lane(t, s.count, 1)}; }
  __device__ __forceinline__ In query(int64_t) const { return In(shared.q_in[0]); }
  __device__ __forceinline__ In probe(int64_t) const { return In(shared.k_in[0]); }
  __device__ __forceinline__ Out key(int64_t) const { return Out(shared.k_out[0]); }
  __device__ __forceinline__ float in(int) const { return 1; }
  __device__ __forceinline__ float out(int) const { return 1; }
  __device__ __forceinline__ void decay_state() { state.decay(shared.end); }

  // Makes w and the operands. A thread has a channel, or what enters or leaves of it.
  __device__ __forceinline__ void make_operands(int64_t t) const {
    static_assert(kKeys == kThreads || 2 * kKeys == kThreads);
    const auto& from = this->stage(t);
    const int thread = static_cast<int>(threadIdx.x), channel = thread % kKeys;
    const int piece = channel / 8, within = channel % 8;
    float w[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) w[i] = exp(from.g[i * kKeys + channel]);
    const auto place = [&](int i) { return gpu::SharedRows<T, kKeys>::offset(i, piece) + within; };
    if (kKeys == kThreads || thread < kKeys) {
      float decay = 1;
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        decay *= w[i];
        shared.w[i * kKeys + channel] = w[i];
        const int at = place(i);
        store_pieces<Shared::kIn>(gpu::widen(from.q[at]) * decay, shared.q_in[0] + at, kRows);
        if constexpr (kDelta) {
          store_pieces<Shared::kIn>(gpu::widen(from.k[at]) * decay, shared.k_in[0] + at, kRows);
        }
      }
    }
    if (kKeys == kThreads || thread >= kKeys) {
      float decay = 1;
#pragma unroll
      for (int i = kTokens - 1; i >= 0; --i) {
        const int at = place(i);
        store_pieces<Shared::kOut>(gpu::widen(from.k[at]) * decay, shared.k_out[0] + at, kRows);
        decay *= w[i];
      }
      shared.end[channel] = decay;
    }
  }

  // Loads this lane's channels of a token.
  __device__ __forceinline__ void load_row(const T* rows, int token, float (&x)[kChannels]) const {
    const int channel = kChannels * lane_index();
    const T* const at = rows + gpu::SharedRows<T, kKeys>::offset(token, channel / 8) + channel % 8;
    uint32_t bits[kChannels / 2];
    if constexpr (kChannels == 4) {
      const uint2 both = *reinterpret_cast<const uint2*>(at);
      bits[0] = both.x, bits[1] = both.y;
    } else {
      bits[0] = *reinterpret_cast<const uint32_t*>(at);
    }
#pragma unroll
    for (int i = 0; i < kChannels / 2; ++i) unpack<T>(bits[i], x[2 * i], x[2 * i + 1]);
  }

  // Stores the scores of all tokens. A warp has two pairs of keys, which decay in its registers
  // from row to row: 18 rows of scores in all.
  template <bool kQueries>
  __device__ __forceinline__ void find_scores(int64_t t, float factor) const {
    constexpr int kReaders = kDelta + kQueries;
    constexpr int kStride = Shared::kColumnStride;
    const auto& from = this->stage(t);
    const int warp = gpu::warp_id(), lane = lane_index(), of_first = kTokens - 2 * warp;
    float keys[2][kChannels] = {};
#pragma unroll 2
    for (int n = 0; n < kTokens + 2; ++n) {
      const int key = n < of_first ? 2 * warp : kTokens - 2 - 2 * warp;
      const int i = n < of_first ? key + n : n - 2;
      const float* const decays = shared.w + i * kKeys + kChannels * lane;
      float probe[kChannels], query[kChannels], sums[2 * kReaders] = {};
      load_row(from.k, i, probe);
      if constexpr (kQueries) load_row(from.q, i, query);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const float w = decays[c];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = keys[j][c];
          x = i == key + j ? probe[c] : x * w;
          if constexpr (kQueries) sums[j] += query[c] * x;
          if constexpr (kDelta) sums[2 * kQueries + j] += probe[c] * x;
        }
      }
      const float sum = spread_sums(sums);
      constexpr int kShare = kLanes / (2 * kReaders);  // lanes with the same sum
      const int which = lane / kShare, j = key + which % 2;
      if (lane % kShare == 0 && j <= i) {
        if (kQueries && which < 2) {
          store_pieces<2>(sum * factor, shared.P[0] + i * Shared::kScoreStride + j,
                          kTokens * Shared::kScoreStride);
        } else {
          shared.N[kBackward ? i * kStride + j : j * kStride + i] = sum;
        }
      }
    }
  }

  // Without queries, of delta updates, it computes N only.
  template <bool kQueries = true>
  __device__ __forceinline__ void prepare(int64_t t, const Gates& gates, float factor) {
    make_operands(t);
    if (threadIdx.x < kTokens) shared.beta[threadIdx.x] = gates.beta;
    __syncthreads();
    find_scores<kQueries>(t, factor);
  }
};

}  // namespace
}  // namespace omniattn
