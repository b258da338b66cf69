// Forward of matrix-state recurrences on tensor cores, see recurrence_mma_cuda.h.
#include "kernels/recurrence/recurrence_mma.h"
#include "kernels/recurrence/recurrence_mma_cuda.h"
#include "runtime/gpu_row.h"

namespace omniattn {
namespace {

template <int kKeys, bool kDelta>
struct ForwardByMma {
  using Shared = MmaShared<kKeys, kDelta>;
  using Rows = TokenOperand<kKeys>;

  const RecurrenceParams& params;
  const Recurrence& p;
  const RecurrenceSequence& s;
  Shared& shared;
  const int64_t head, panel;  // first column of the block
  const int64_t first;        // first column of the warp
  const TokenRows<bf16> q, k, v;
  const TokenRows<float> g, beta;
  PanelState<kKeys> state;

  __device__ ForwardByMma(const RecurrenceParams& given, const RecurrenceSequence& sequence,
                          Shared& memory, int64_t h, int64_t column)
      : params(given),
        p(given.recurrence),
        s(sequence),
        shared(memory),
        head(h),
        panel(column),
        first(column + 16 * gpu::warp_id()),
        q(p.q, s, p.key_head_of(h)),
        k(p.k, s, p.key_head_of(h)),
        v(p.v, s, h, column),
        g(p.g, s, h),
        beta(p.beta, s, h),
        state{p, h, first} {}

  __device__ __forceinline__ auto& stage(int64_t t) const { return shared.stages[t / kTokens % 2]; }
  // Starts the copy of a chunk.
  __device__ __forceinline__ void copy(int64_t t) const {
    q.template copy<kKeys>(stage(t).q, t, s.count, p.key_width);
    k.template copy<kKeys>(stage(t).k, t, s.count, p.key_width);
    v.template copy<kPanel>(stage(t).v, t, s.count, p.value_width - panel);
    gpu::cp_async_commit();
  }

  // Computes the decays, P and N.
  __device__ __forceinline__ void find_scores(const bf16* queries, const bf16* keys, float w,
                                              float of_beta) {
    constexpr int kPairs = kDelta ? 2 : 1;
    const int warp = gpu::warp_id(), row = warp % 2 * 16, pair = kDelta ? 0 : warp / 2;
    const bool of_k = kDelta && warp >= 2;
    float sums[2 * kPairs][4];
    scores<kPairs, kKeys>(sums, of_k ? keys : queries, keys, row, pair);
    set_decays(shared, w, of_beta);
    __syncthreads();
    if (!of_k) return store_pieces<kPairs>(sums, shared, row, pair, 1);
    decayed<0, kPairs>(sums, shared, row, pair, [&](int i, int j, float x, float y) {
      shared.N[j * kColumnStride + i] = x;
      shared.N[(j + 1) * kColumnStride + i] = y;
    });
  }

  // o += u^T P^T
  __device__ __forceinline__ void add_scores(const Tile (&u)[kTiles], Tile (&o)[kTiles]) const {
    const int lane = lane_index();
    const int at = (lane / 16 * 8 + lane % 8) * kScoreStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < kTokenPairs; ++step) {
      const Left<2> left(u[2 * step], u[2 * step + 1]);
#pragma unroll
      for (int pair = step; pair < kTokenPairs; ++pair) {
        const int from = at + 16 * pair * kScoreStride + 16 * step;
        uint32_t b[4];
        gpu::ldmatrix_x4(b, shared.P[1] + from);
        left.multiply(b, o[2 * pair], o[2 * pair + 1], 1);
        gpu::ldmatrix_x4(b, shared.P[0] + from);
        left.multiply(b, o[2 * pair], o[2 * pair + 1]);
      }
    }
  }

  // o = scale (o + skip v); overwrites v.
  __device__ __forceinline__ void write(Tile (&o)[kTiles], bf16* values, int64_t t) const {
    if (p.skip != nullptr) {
      const auto* const skip =
          static_cast<const float*>(p.skip) + (s.index * p.value_heads + head) * p.value_width;
      Tile x[kTiles];
      load_values(x, values);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t column = first + column_of(i);
        const float of_v = column < p.value_width ? skip[column] : 0;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) o[n][i] += of_v * x[n][i];
      }
    }
    const float scale = static_cast<float>(p.scale);
#pragma unroll
    for (Tile& tile : o) {
#pragma unroll
      for (float& x : tile) x *= scale;
    }
    const int64_t stride = p.value_heads * p.value_width, count = s.count - t;
    const int64_t at = (s.batch * p.steps + s.begin + t) * stride + head * p.value_width + first;
    const int64_t width = p.value_width - first;
    if (p.o_dtype != p.dtype) {
      write_rows(o, static_cast<float*>(params.o) + at, stride, count, width);
    } else {
      write_rows(o, values, static_cast<bf16*>(params.o) + at, stride, count, width);
    }
  }

  __device__ __forceinline__ void chunk(int64_t t, float w, float of_beta) {
    const auto& from = stage(t);
    find_scores(from.q, from.k, w, of_beta);
    Tile met[1 + kDelta][kTiles], u[kTiles], v_[kTiles];
    Tile(&o)[kTiles] = met[0];
    if constexpr (kDelta) {
      state.read({Rows(from.q), Rows(from.k)}, met);
    } else {
      state.read({Rows(from.q)}, met);
    }
    __syncthreads();
    state.decay(shared.in[kTokens - 1]);
    load_values(v_, from.v);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = token_of(n, i);
        o[n][i] *= shared.in[token];
        if constexpr (kDelta) {
          met[kDelta][n][i] = shared.in[token] * met[kDelta][n][i] - v_[n][i];
        } else {
          u[n][i] = shared.beta[token] * v_[n][i];
        }
      }
    }
    if constexpr (kDelta) solve(met[1], u, shared);
    add_scores(u, o);
    write(o, stage(t).v, t);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) u[n][i] *= shared.out()[token_of(n, i)];
    }
    state.add(u, Rows(from.k));
  }

  __device__ __forceinline__ void run() {
    state.load(p.initial_state, s.index);
    if (s.count > 0) copy(0);
    float next_g = g.of_lane(0, s.count, 0), next_beta = beta.of_lane(0, s.count, 1);
    for (int64_t t = 0; t < s.count; t += kTokens) {
      const float w = exp(next_g), of_beta = next_beta;
      state.store(params.states, s.slot + t / kTokens);
      gpu::cp_async_wait<0>();
      __syncthreads();  // this stage has arrived, and all warps have used the other one
      if (t + kTokens < s.count) copy(t + kTokens);
      next_g = g.of_lane(t + kTokens, s.count, 0);
      next_beta = beta.of_lane(t + kTokens, s.count, 1);
      chunk(t, w, of_beta);
    }
    state.store(params.final_state, s.index);
  }
};

// Blocks: value heads of sequences, panels of columns.
template <int kKeys, bool kDelta>
__global__ void __launch_bounds__(kThreads, kKeys == 64 ? 3 : 2)
    recurrence_forward_mma_kernel(const __grid_constant__ RecurrenceParams params) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = checked_sequence(p, blockIdx.x / p.value_heads);
  ForwardByMma<kKeys, kDelta>(params, s, *gpu::dynamic_shared<MmaShared<kKeys, kDelta>>(),
                              blockIdx.x % p.value_heads, static_cast<int64_t>(blockIdx.y) * kPanel)
      .run();
}

template <int kKeys, bool kDelta>
void launch(const RecurrenceParams& params, Stream stream) {
  const Recurrence& p = params.recurrence;
  const dim3 grid(blocks(p.sequences * p.value_heads),
                  blocks(ceil_div(p.value_width, int64_t{kPanel})));
  GPU_LAUNCH((recurrence_forward_mma_kernel<kKeys, kDelta>), grid, kThreads,
             sizeof(MmaShared<kKeys, kDelta>), stream, params);
}

}  // namespace

Status launch_recurrence_mma(const RecurrenceParams& params, Stream stream) {
  const Recurrence& p = params.recurrence;
  if (p.sequences * p.value_heads == 0 || p.value_width == 0) return nullptr;
  if (p.key_width <= 64) {
    p.delta ? launch<64, true>(params, stream) : launch<64, false>(params, stream);
  } else {
    p.delta ? launch<128, true>(params, stream) : launch<128, false>(params, stream);
  }
  return gpu::launch_status();
}

}  // namespace omniattn
