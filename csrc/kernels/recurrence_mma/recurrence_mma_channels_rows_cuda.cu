// Gradients of rows on tensor cores, see recurrence_mma_rows_cuda.h, with a decay per channel:
// after the products over columns of values, a thread has a channel and walks over the pairs of
// tokens.
#include "kernels/recurrence_mma/recurrence_mma_channels_cuda.h"
#include "kernels/recurrence_mma/recurrence_mma_rows_cuda.h"

namespace omniattn {
namespace {

template <class T, int kKeys>
struct ChannelRowsShared {
  static constexpr int kTokens = kChannelTokens, kRows = kTokens * kKeys;
  static constexpr int kStride = kKeys + 4;  // without bank conflicts for results
  alignas(16) T q[kRows], k[kRows];
  alignas(16) float g[kRows];
  union {
    alignas(16) bf16 rows[kReaders][2][kTokens * kPanel];  // pieces of a panel of columns of values
    float met[kReaders][kTokens * kStride];                // products with the states
  };
  alignas(16) float dP[kTokens][kTokens], dN[kTokens][kTokens];  // by columns
  float beta[kTokens], carried[kKeys];
};

template <class T, int kKeys, bool kDelta>
struct ChannelRowsByMma : RowProducts<T, kKeys, kDelta, true, ChannelRowsShared<T, kKeys>> {
  using Base = RowProducts<T, kKeys, kDelta, true, ChannelRowsShared<T, kKeys>>;
  using Base::kTokens, Base::kTiles, Base::kStrips, Base::kRead;
  using Base::lane, Base::dP, Base::dN, Base::met, Base::carried;
  using Base::params, Base::found, Base::p, Base::s, Base::shared, Base::head, Base::first;
  using typename Base::Shared;

  __device__ __forceinline__ void store_products() {
#pragma unroll
    for (int m = 0; m < kStrips; ++m) {
      const int channel = first + 16 * m + lane.g;
#pragma unroll
      for (int r = 0; r < kRead; ++r) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            shared.met[r][token_of(n, i) * Shared::kStride + channel + i / 2 * 8] = met[r][m][n][i];
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = carried[2 * m + half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (lane.t == 0) shared.carried[channel + 8 * half] = sum;
      }
    }
    if (!this->has_scores()) return;
    const float scale = static_cast<float>(p.scale);
    this->each_score([&](int n, int e, int i, int j) {
      shared.dP[j][i] = scale * dP[n][e];
      if constexpr (kDelta) shared.dN[j][i] = dN[n][e];
    });
  }

  // Finds the gradients of a channel, and stores those of q, k and g in place of its products of
  // do, u and de with the states. As on the CPU, the gradient of a decay is summed over the
  // products that contain it, without differences: of the state at the start with later readers, of
  // earlier keys with the state at the end, and of earlier keys with their readers.
  __device__ __forceinline__ void finish(int channel) const {
    const float scale = static_cast<float>(p.scale);
    float* const of_q = shared.met[kGradO] + channel;
    float* const of_key = shared.met[kAdded] + channel;
    float* const of_probe = shared.met[kProbe] + channel;
    constexpr int kStride = Shared::kStride;
    float w[kTokens], q[kTokens], k[kTokens], dq[kTokens], dk[kTokens] = {}, dg[kTokens];
    float decay = 1;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int at = gpu::SharedRows<T, kKeys>::offset(i, channel / 8) + channel % 8;
      w[i] = exp(shared.g[i * kKeys + channel]);
      q[i] = gpu::widen(shared.q[at]);
      k[i] = gpu::widen(shared.k[at]);
      decay *= w[i];
      dq[i] = of_q[i * kStride] * (decay * scale);
      if constexpr (kDelta) dk[i] = of_probe[i * kStride] * decay;
    }
    float entering = 0, out = 1, leaving = shared.carried[channel] * decay;
#pragma unroll
    for (int i = kTokens - 1; i >= 0; --i) {
      entering += q[i] * dq[i];
      if constexpr (kDelta) entering += k[i] * dk[i];
      dg[i] = entering;
      const float key = of_key[i * kStride] * out;
      of_key[i * kStride] = key;
      dk[i] += key;
      out *= w[i];
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      dg[i] += leaving;
      leaving += k[i] * of_key[i * kStride];
    }
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      float x = k[j], met_by[kTokens];  // key j, decayed to before each row
      dq[j] += shared.dP[j][j] * x;
#pragma unroll
      for (int i = j + 1; i < kTokens; ++i) {
        met_by[i] = x;
        x *= w[i];
        dq[i] += shared.dP[j][i] * x;
        if constexpr (kDelta) dk[i] += shared.dN[j][i] * x;
      }
      float sum = 0;
#pragma unroll
      for (int i = kTokens - 1; i > j; --i) {
        sum += shared.dP[j][i] * q[i];
        if constexpr (kDelta) sum += shared.dN[j][i] * k[i];
        sum *= w[i];
        dg[i] += met_by[i] * sum;
      }
      of_q[j * kStride] = dq[j];
      of_key[j * kStride] = dk[j] + shared.dP[j][j] * q[j] + sum;
      of_probe[j * kStride] = dg[j];
    }
  }
  // Writes the gradients that have replaced the products of a reader.
  __device__ __forceinline__ void write(Reader reader, void* rows) const {
    constexpr int kPieces = kKeys / 4, kStep = kThreads / kPieces;
    if (rows == nullptr) return;
    const int thread = static_cast<int>(threadIdx.x), token = thread / kPieces;
    const int channel = thread % kPieces * 4;
    const float* from = shared.met[reader] + token * Shared::kStride + channel;
    const int64_t stride = p.value_heads * p.key_width;
    float* to = static_cast<float*>(rows) + this->at(p.key_width) + token * stride + channel;
#pragma unroll
    for (int i = 0; i < kTokens;
         i += kStep, from += kStep * Shared::kStride, to += kStep * stride) {
      if (token + i < s.count && channel < p.key_width) {
        gpu::store_16(to, *reinterpret_cast<const uint4*>(from));
      }
    }
  }

  __device__ __forceinline__ void run() {
    const int64_t key_head = p.key_head_of(head);
    const TokenRows<T> q(p.q, s, key_head), k(p.k, s, key_head);
    const TokenRows<float> g(p.g, s, head), beta(p.beta, s, head);
    q.template copy<kKeys, kTokens>(shared.q, 0, s.count, p.key_width);
    k.template copy<kKeys, kTokens>(shared.k, 0, s.count, p.key_width);
    g.template copy<kKeys, kTokens>(shared.g, 0, s.count, p.key_width);
    gpu::cp_async_commit();
    if (threadIdx.x < kTokens) shared.beta[threadIdx.x] = beta.of_lane(0, s.count, 1);
    gpu::cp_async_wait<0>();
    this->multiply_columns();
    store_products();
    __syncthreads();
    if (threadIdx.x < kKeys) finish(static_cast<int>(threadIdx.x));
    __syncthreads();
    write(kGradO, found.dq);
    write(kAdded, found.dk);
    write(kProbe, params.dg);
  }
};

// Blocks: value heads of slots.
template <class T, int kKeys, bool kDelta>
__global__ void __launch_bounds__(kThreads, 2)
    recurrence_channels_rows_mma_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                                        const __grid_constant__ Found<float> found) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = chunk_of_slot(p, blockIdx.x / p.value_heads);
  if (s.count == 0) return;
  ChannelRowsByMma<T, kKeys, kDelta>{{.params = params,
                                      .found = found,
                                      .p = p,
                                      .s = s,
                                      .shared = *gpu::dynamic_shared<ChannelRowsShared<T, kKeys>>(),
                                      .head = blockIdx.x % p.value_heads}}
      .run();
}

}  // namespace

void launch_recurrence_channels_rows_mma(const RecurrenceBackwardParams& params, void* memory,
                                         Stream stream) {
  const Recurrence& p = params.recurrence;
  const int64_t chunks = recurrence_slots(p) * p.value_heads;
  if (chunks == 0) return;
  const Found<float> found(p, memory);
  with_rows(p, [&]<class T, int kKeys, bool kDelta>() {
    GPU_LAUNCH((recurrence_channels_rows_mma_kernel<T, kKeys, kDelta>), blocks(chunks), kThreads,
               sizeof(ChannelRowsShared<T, kKeys>), stream, params, found);
  });
}

}  // namespace omniattn
