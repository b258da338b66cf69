// Backward of matrix-state recurrences on tensor cores, see recurrence_mma_cuda.h: the steps
// `errors` and `du` of recurrence_backward_cuda.cu by panels of columns of values.
#pragma once

#include "kernels/recurrence/recurrence_backward_cuda.h"
#include "kernels/recurrence_mma/recurrence_mma.h"
#include "kernels/recurrence_mma/recurrence_mma_panel_cuda.h"

namespace omniattn {
namespace {

// Gradients of o of this lane's results, in a chunk that starts at token t of its sequence.
template <class G, int kTiles>
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

// Writes the errors of a chunk's updates (delta), v less what the state predicts.
template <class Panel>
__device__ __forceinline__ void write_errors(const RecurrenceBackwardParams& params,
                                             const Found<float>& found,
                                             const RecurrenceSequence& s) {
  Panel x(params.recurrence, s);
  auto& stage = x.stage(0);
  x.copy(0, true);
  x.state.load(params.states, s.slot);
  const auto gates = x.gates(0);
  gpu::cp_async_wait<0>();
  __syncthreads();
  x.template prepare<false>(0, gates, 1);
  Tile met[1][Panel::kTiles], v[Panel::kTiles], u[Panel::kTiles];
  x.state.read({x.probe(0)}, met);
  __syncthreads();
  load_values(v, stage.v);
  Tile(&e)[Panel::kTiles] = met[0];
#pragma unroll
  for (int n = 0; n < Panel::kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) e[n][i] = x.in(token_of(n, i)) * e[n][i] - v[n][i];
  }
  solve(e, u, x.shared);
#pragma unroll
  for (Tile& tile : e) {
#pragma unroll
    for (float& each : tile) each = -each;
  }
  write_rows(e, found.error + x.place(0), x.stride(), s.count, x.width);
}

// As ForwardByMma, back in time: its state is the gradient of the state.
template <class Panel, bool kDelta>
struct UpdatesByMma : Panel {
  using Panel::kTokens, Panel::kTiles;
  using Panel::p, Panel::s, Panel::shared, Panel::state, Panel::width, Panel::scale;
  using T = typename Panel::Element;

  const RecurrenceBackwardParams& params;
  const Found<float>& found;
  float dskip[2] = {};  // of columns g and g + 8

  __device__ UpdatesByMma(const RecurrenceBackwardParams& given, const Found<float>& memory,
                          const RecurrenceSequence& sequence)
      : Panel(given.recurrence, sequence), params(given), found(memory) {}

  __device__ __forceinline__ void load_grad_o(Tile (&x)[kTiles], int64_t t) const {
    const auto load = [&]<class G>(G) {
      const TokenRows<G> grad_o(params.grad_o, s, this->head, this->first);
      load_gradients(x, grad_o, t, s.count, width);
    };
    p.o_dtype != p.dtype ? load(float{}) : load(T{});
  }

  // Writes dv and adds to dskip; `dv` is that of updates.
  __device__ __forceinline__ void write(Tile (&dv)[kTiles], const Tile (&grad_o)[kTiles], T* values,
                                        int64_t t) {
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
    write_rows(dv, values, static_cast<T*>(params.dv) + this->place(t), this->stride(), s.count - t,
               width);
  }

  __device__ __forceinline__ void chunk(int64_t t, const typename Panel::Gates& gates) {
    auto& from = this->stage(t);
    Tile grad_o[kTiles], met[1][kTiles], de[kTiles], x[kTiles];
    load_grad_o(grad_o, t);
    this->prepare(t, gates, scale);
    state.read({this->key(t)}, met);
    __syncthreads();
    this->decay_state();
    Tile(&du)[kTiles] = met[0];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) du[n][i] *= this->out(token_of(n, i));
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
        const float in = this->in(token_of(n, i));
        grad_o[n][i] *= scale * in;
        if constexpr (kDelta) de[n][i] *= in;
      }
    }
    state.add(grad_o, this->query(t));
    if constexpr (kDelta) state.add(de, this->probe(t));
  }

  __device__ __forceinline__ void run() {
    state.load(params.grad_final_state, s.index);
    this->start();
    const int64_t last = s.count > 0 ? (s.count - 1) / kTokens * kTokens : -kTokens;
    const bool with_values = params.dskip != nullptr;
    if (s.count > 0) this->copy(last, with_values);
    auto next = this->gates(last);
    for (int64_t t = last; t >= 0; t -= kTokens) {
      const auto gates = next;
      state.store(found.dstates, s.slot + t / kTokens);
      gpu::cp_async_wait<0>();
      __syncthreads();  // this stage has arrived, and all warps have used the other one
      if (t > 0) this->copy(t - kTokens, with_values);
      next = this->gates(t - kTokens);
      chunk(t, gates);
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

}  // namespace
}  // namespace omniattn
