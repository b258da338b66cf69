// Forward of matrix-state recurrences on tensor cores, see recurrence_mma_cuda.h.
#include "kernels/recurrence_mma/recurrence_mma.h"
#include "kernels/recurrence_mma/recurrence_mma_scores_cuda.h"

namespace omniattn {
namespace {

template <int kKeys, bool kDelta>
struct ForwardByMma : PanelByMma<kKeys, kDelta> {
  using Base = PanelByMma<kKeys, kDelta>;
  using Base::p, Base::s, Base::shared, Base::g, Base::beta, Base::state, Base::width;
  using Rows = typename Base::Rows;

  const RecurrenceParams& params;

  __device__ ForwardByMma(const RecurrenceParams& given, const RecurrenceSequence& sequence)
      : Base(given.recurrence, sequence), params(given) {}

  // o = scale (o + skip v); overwrites v.
  __device__ __forceinline__ void write(Tile (&o)[kTiles], bf16* values, int64_t t) const {
    if (p.skip != nullptr) {
      Tile given[kTiles];
      load_values(given, values);
      this->add_skipped(o, given, 1);
    }
#pragma unroll
    for (Tile& tile : o) {
#pragma unroll
      for (float& x : tile) x *= this->scale;
    }
    const int64_t at = this->place(t), stride = this->stride(), count = s.count - t;
    if (p.o_dtype != p.dtype) {
      write_rows(o, static_cast<float*>(params.o) + at, stride, count, width);
    } else {
      write_rows(o, values, static_cast<bf16*>(params.o) + at, stride, count, width);
    }
  }

  __device__ __forceinline__ void chunk(int64_t t, float w, float of_beta) {
    auto& from = this->stage(t);
    this->template find_scores<true>(t, w, of_beta, 1);
    Tile met[1 + kDelta][kTiles], u[kTiles], given[kTiles];
    Tile(&o)[kTiles] = met[0];
    if constexpr (kDelta) {
      state.read({Rows(from.q), Rows(from.k)}, met);
    } else {
      state.read({Rows(from.q)}, met);
    }
    __syncthreads();
    state.decay(shared.in[kTokens - 1]);
    load_values(given, from.v);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = token_of(n, i);
        o[n][i] *= shared.in[token];
        if constexpr (kDelta) {
          met[1][n][i] = shared.in[token] * met[1][n][i] - given[n][i];
        } else {
          u[n][i] = shared.beta[token] * given[n][i];
        }
      }
    }
    if constexpr (kDelta) solve(met[1], u, shared);
    this->template add_scores<true>(u, o);
    write(o, from.v, t);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) u[n][i] *= shared.out()[token_of(n, i)];
    }
    state.add(u, Rows(from.k));
  }

  __device__ __forceinline__ void run() {
    state.load(p.initial_state, s.index);
    if (s.count > 0) this->copy(0, true);
    float next_g = g.of_lane(0, s.count, 0), next_beta = beta.of_lane(0, s.count, 1);
    for (int64_t t = 0; t < s.count; t += kTokens) {
      const float w = exp(next_g), of_beta = next_beta;
      state.store(params.states, s.slot + t / kTokens);
      gpu::cp_async_wait<0>();
      __syncthreads();  // this stage has arrived, and all warps have used the other one
      if (t + kTokens < s.count) this->copy(t + kTokens, true);
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
  ForwardByMma<kKeys, kDelta>(params, s).run();
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
