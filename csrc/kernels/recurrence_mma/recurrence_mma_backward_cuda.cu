// Backward of matrix-state recurrences on tensor cores, see recurrence_mma_cuda.h: the steps of
// recurrence_backward_cuda.cu, `errors` and `du` by panels of columns of values.
#include "kernels/recurrence/recurrence_backward_cuda.h"
#include "kernels/recurrence_mma/recurrence_mma.h"
#include "kernels/recurrence_mma/recurrence_mma_scores_cuda.h"

namespace omniattn {
namespace {

// Gradients of o of this lane's results, in a chunk that starts at token t of its sequence.
template <class G>
__device__ __forceinline__ void load_gradients(Tile (&x)[kTiles], const TokenRows<G>& grad_o,
                                               int64_t t, int64_t count, int64_t width) {
  const int64_t stride = hidden(grad_o.step);
  const G* const from = grad_o.at(t);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = token_of(n, i), column = column_of(i);
      const bool has = grad_o.data != nullptr && t + token < count && column < width;
      x[n][i] = has ? gpu::widen(from[token * stride + column]) : 0.0f;
    }
  }
}

// Errors of updates (delta), v less what the state predicts. Blocks: value heads of slots, panels.
template <int kKeys>
__global__ void __launch_bounds__(kThreads, kKeys == 64 ? 3 : 2)
    recurrence_errors_mma_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                                 const __grid_constant__ Found<float> found) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = chunk_of_slot(p, blockIdx.x / p.value_heads);
  if (s.count == 0) return;
  PanelByMma<kKeys, true> x(p, s);
  auto& shared = x.shared;
  auto& stage = x.stage(0);
  x.copy(0, true);
  x.state.load(params.states, s.slot);
  const float w = exp(x.g.of_lane(0, s.count, 0)), beta = x.beta.of_lane(0, s.count, 1);
  gpu::cp_async_wait<0>();
  __syncthreads();
  const int row = gpu::warp_id() % 2 * 16, pair = gpu::warp_id() / 2;
  float sums[2][4];
  scores<1, kKeys>(sums, stage.k, stage.k, row, pair);
  set_decays(shared, w, beta);
  __syncthreads();
  store_factors<true, 1>(sums, shared, row, pair);
  Tile met[1][kTiles], v[kTiles], u[kTiles];
  x.state.read({TokenOperand<kKeys>(stage.k)}, met);
  __syncthreads();
  load_values(v, stage.v);
  Tile(&e)[kTiles] = met[0];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) e[n][i] = shared.in[token_of(n, i)] * e[n][i] - v[n][i];
  }
  solve(e, u, shared);
#pragma unroll
  for (Tile& tile : e) {
#pragma unroll
    for (float& each : tile) each = -each;
  }
  write_rows(e, found.error + x.place(0), x.stride(), s.count, x.width);
}

// As ForwardByMma, back in time: its state is the gradient of the state.
template <int kKeys, bool kDelta>
struct UpdatesByMma : PanelByMma<kKeys, kDelta> {
  using Base = PanelByMma<kKeys, kDelta>;
  using Base::p, Base::s, Base::shared, Base::g, Base::beta, Base::state, Base::width, Base::scale;
  using Rows = typename Base::Rows;

  const RecurrenceBackwardParams& params;
  const Found<float>& found;
  float dskip[2] = {};  // of columns g and g + 8

  __device__ UpdatesByMma(const RecurrenceBackwardParams& given, const Found<float>& memory,
                          const RecurrenceSequence& sequence)
      : Base(given.recurrence, sequence), params(given), found(memory) {}

  __device__ __forceinline__ void load_grad_o(Tile (&x)[kTiles], int64_t t) const {
    const auto load = [&]<class G>(G) {
      const TokenRows<G> grad_o(params.grad_o, s, this->head, this->first);
      load_gradients(x, grad_o, t, s.count, width);
    };
    p.o_dtype != p.dtype ? load(float{}) : load(bf16{});
  }

  // Writes dv and adds to dskip; `dv` is that of updates.
  __device__ __forceinline__ void write(Tile (&dv)[kTiles], const Tile (&grad_o)[kTiles],
                                        bf16* values, int64_t t) {
    if (params.dskip != nullptr) {
      Tile x[kTiles];
      load_values(x, values);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dskip[i / 2] += scale * grad_o[n][i] * x[n][i];
      }
    }
    if (p.skip != nullptr) this->add_skipped(dv, grad_o, scale);
    write_rows(dv, values, static_cast<bf16*>(params.dv) + this->place(t), this->stride(),
               s.count - t, width);
  }

  __device__ __forceinline__ void chunk(int64_t t, float w, float of_beta) {
    auto& from = this->stage(t);
    Tile grad_o[kTiles], met[1][kTiles], de[kTiles], x[kTiles];
    load_grad_o(grad_o, t);
    this->template find_scores<false>(t, w, of_beta, scale);
    state.read({Rows(from.k)}, met);
    __syncthreads();
    state.decay(shared.in[kTokens - 1]);
    Tile(&du)[kTiles] = met[0];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) du[n][i] *= shared.out()[token_of(n, i)];
    }
    this->template add_scores<false>(grad_o, du);
    if constexpr (kDelta) solve_gradient(du, de, shared);
    write_rows(du, found.du + this->place(t), this->stride(), s.count - t, width);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[n][i] = kDelta ? -de[n][i] : shared.beta[token_of(n, i)] * du[n][i];
      }
    }
    write(x, grad_o, from.v, t);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float in = shared.in[token_of(n, i)];
        grad_o[n][i] *= scale * in;
        if constexpr (kDelta) de[n][i] *= in;
      }
    }
    state.add(grad_o, Rows(from.q));
    if constexpr (kDelta) state.add(de, Rows(from.k));
  }

  __device__ __forceinline__ void run() {
    state.load(params.grad_final_state, s.index);
    const int64_t last = s.count > 0 ? (s.count - 1) / kTokens * kTokens : -kTokens;
    const bool with_values = params.dskip != nullptr;
    if (s.count > 0) this->copy(last, with_values);
    float next_g = g.of_lane(last, s.count, 0), next_beta = beta.of_lane(last, s.count, 1);
    for (int64_t t = last; t >= 0; t -= kTokens) {
      const float w = exp(next_g), of_beta = next_beta;
      state.store(found.dstates, s.slot + t / kTokens);
      gpu::cp_async_wait<0>();
      __syncthreads();  // this stage has arrived, and all warps have used the other one
      if (t > 0) this->copy(t - kTokens, with_values);
      next_g = g.of_lane(t - kTokens, s.count, 0);
      next_beta = beta.of_lane(t - kTokens, s.count, 1);
      chunk(t, w, of_beta);
    }
    state.store(params.dinitial_state, s.index);
    if (params.dskip == nullptr) return;
    const LanePlace lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = dskip[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int column = 8 * half + lane.g;
      if (lane.t == 0 && column < width) this->skip_row(params.dskip)[column] = sum;
    }
  }
};

// Blocks: value heads of sequences, panels of columns.
template <int kKeys, bool kDelta>
__global__ void __launch_bounds__(kThreads, 2)
    recurrence_du_mma_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                             const __grid_constant__ Found<float> found) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = checked_sequence(p, blockIdx.x / p.value_heads);
  UpdatesByMma<kKeys, kDelta>(params, found, s).run();
}

template <int kKeys, bool kDelta>
void launch(const RecurrenceBackwardParams& params, const Found<float>& found, Stream stream) {
  const Recurrence& p = params.recurrence;
  const unsigned panels = blocks(ceil_div(p.value_width, int64_t{kPanel}));
  const int64_t chunks = recurrence_slots(p) * p.value_heads;
  constexpr size_t kBytes = sizeof(MmaShared<kKeys, kDelta>);
  if constexpr (kDelta) {
    if (chunks > 0) {
      GPU_LAUNCH(recurrence_errors_mma_kernel<kKeys>, dim3(blocks(chunks), panels), kThreads,
                 kBytes, stream, params, found);
    }
  }
  GPU_LAUNCH((recurrence_du_mma_kernel<kKeys, kDelta>),
             dim3(blocks(p.sequences * p.value_heads), panels), kThreads, kBytes, stream, params,
             found);
}

}  // namespace

Status launch_recurrence_backward_mma(const RecurrenceBackwardParams& params, void* memory,
                                      Stream stream) {
  const Recurrence& p = params.recurrence;
  const Found<float> found(p, memory);
  if (p.sequences * p.value_heads > 0 && p.value_width > 0) {
    if (p.key_width <= 64) {
      p.delta ? launch<64, true>(params, found, stream) : launch<64, false>(params, found, stream);
    } else {
      p.delta ? launch<128, true>(params, found, stream)
              : launch<128, false>(params, found, stream);
    }
  }
  launch_recurrence_rows_mma(params, memory, stream);
  RecurrenceBackwardParams rest = params;
  rest.dg = nullptr;  // the rows have computed it
  launch_recurrence_finish(rest, memory, stream);
  return gpu::launch_status();
}

}  // namespace omniattn
