// Forward of matrix-state recurrences on tensor cores, see recurrence_mma_cuda.h.
#pragma once

#include "kernels/recurrence_mma/recurrence_mma.h"
#include "kernels/recurrence_mma/recurrence_mma_panel_cuda.h"

namespace omniattn {
namespace {

// Panel: of recurrence_mma_panel_cuda.h, with the decays of a call.
template <class Panel, bool kDelta>
struct ForwardByMma : Panel {
  using Panel::kTokens, Panel::kTiles;
  using Panel::p, Panel::s, Panel::shared, Panel::state, Panel::width;
  using T = typename Panel::Element;

  const RecurrenceParams& params;

  __device__ ForwardByMma(const RecurrenceParams& given, const RecurrenceSequence& sequence)
      : Panel(given.recurrence, sequence), params(given) {}

  // o = scale (o + skip v); overwrites v.
  __device__ __forceinline__ void write(Tile (&o)[kTiles], T* values, int64_t t) const {
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
      write_rows(o, values, static_cast<T*>(params.o) + at, stride, count, width);
    }
  }

  __device__ __forceinline__ void chunk(int64_t t, const typename Panel::Gates& gates) {
    auto& from = this->stage(t);
    this->prepare(t, gates, 1);
    Tile met[1 + kDelta][kTiles], u[kTiles], given[kTiles];
    Tile(&o)[kTiles] = met[0];
    if constexpr (kDelta) {
      state.read({this->query(t), this->probe(t)}, met);
    } else {
      state.read({this->query(t)}, met);
    }
    __syncthreads();
    this->decay_state();
    load_values(given, from.v);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = token_of(n, i);
        o[n][i] *= this->in(token);
        if constexpr (kDelta) {
          met[1][n][i] = this->in(token) * met[1][n][i] - given[n][i];
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
      for (int i = 0; i < 4; ++i) u[n][i] *= this->out(token_of(n, i));
    }
    state.add(u, this->key(t));
  }

  __device__ __forceinline__ void run() {
    state.load(p.initial_state, s.index);
    this->start();
    if (s.count > 0) this->copy(0, true);
    auto next = this->gates(0);
    for (int64_t t = 0; t < s.count; t += kTokens) {
      const auto gates = next;
      state.store(params.states, s.slot + t / kTokens);
      gpu::cp_async_wait<0>();
      __syncthreads();  // this stage has arrived, and all warps have used the other one
      if (t + kTokens < s.count) this->copy(t + kTokens, true);
      next = this->gates(t + kTokens);
      chunk(t, gates);
    }
    state.store(params.final_state, s.index);
  }
};

}  // namespace
}  // namespace omniattn
