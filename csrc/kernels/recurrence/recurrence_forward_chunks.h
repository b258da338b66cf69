// Forward of matrix-state recurrences, see recurrence.h: chunk by chunk, with the states of an
// item's heads in the thread's memory.
#pragma once

#include "kernels/recurrence/recurrence_forward.h"
#include "kernels/recurrence/recurrence_policy.h"
#include "kernels/recurrence/recurrence_sums.h"
#include "kernels/recurrence/recurrence_value_decay.h"
#include "runtime/denormals.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// S' = e^(G_C) S + k_out^T u, o = scale (q_in S + P u), with u from the
// update. With two keys P is [P, P_b]. For decays of values see recurrence_value_decay.h.
template <class C, class Decay, class Update>
struct Forward {
  const RecurrenceParams& params;
  const Recurrence& p = params.recurrence;
  Room<C> room;
  Chunk<C> c;
  Decay decay;
  Sums<C> sums;
  ValueDecay<C> values;
  Matrix<C> met;        // [probe_in; q_in] S
  Matrix<C> states;     // of the heads of the item
  Matrix<C> columns{};  // their columns z

  const int64_t first;  // first head of the item

  Forward(const RecurrenceParams& x, void* memory, int64_t first_head)
      : params(x),
        room(memory),
        c(p, room, packed_elements<C>(p.key_width, recurrence_chunk(p))),
        decay(p, room),
        sums(p, room),
        values(p, room),
        first(first_head) {
    met = room.rows(2 * recurrence_chunk(p), p.value_width);
    states = room.rows(p.key_width * params.heads, p.value_width);
    if (p.normalize) columns = room.rows(params.heads, p.key_width);
  }

  void load(int64_t head, const C* from) { load_state(p, from, state(head), column(head)); }
  void save(int64_t head, C* to) {
    const int64_t K = p.key_width, V = p.value_width;
    stream_rows(kComputed<C>, state(head), K, V, reinterpret_cast<char*>(to), V);
    if (p.normalize) copy_rows<C>(column(head), 0, 1, K, {to + K * V, 0});
  }
  void store(int64_t head, C* to) { store_state(p, state(head), column(head), to); }

  void chunk(const RecurrenceSequence& s, Turn now, int64_t n, Turn next) {
    const int64_t batch = s.batch, t = now.t, head = now.head;
    const Matrix<C> S = state(head);
    // Rows of the probe come first, if there is a probe.
    const Matrix<C> o = met.at(n);
    const int64_t o_stride = p.value_heads * c.V, element = size_of(p.o_dtype);
    char* const result = out_row(p.o_dtype, p, params.o, batch, t, p.value_heads, head, c.V);
    Ahead ahead{[&](int64_t i) {
      prefetch_row<true>(result + i * o_stride * element, c.V * element);
      if (next.t + i < s.begin + s.count) prefetch_token<C>(p, batch, next.t + i, next.head);
    }};
    const bool same_keys = head > first && p.key_head_of(head) == p.key_head_of(head - 1);
    if (!same_keys) c.load(batch, t, n, p.key_head_of(head));
    c.load_update(s, t, head);
    decay.apply(c, batch, t, head, same_keys, ahead);
    if constexpr (Update::kProbe) {
      c.meet(c.probe_in, S, met, 2 * n, ahead);
      c.error = met;
    } else {
      c.meet(c.q_in, S, o, n, ahead);
    }
    Update::values(c);
    Matrix<const C> added = c.u;
    if (decays_values()) {
      values.load(batch, t, head, n);
      added = values.outputs(c.P, c.u, o);
    } else {
      multiply_lower(c.P, c.u, o, n, c.V);
    }
    if constexpr (Update::kKeys == 2) multiply_lower(c.P_b, c.u.at(n), o, n, c.V);
    if (c.skip != nullptr) add_skip(c.skip, c.v, o, n, c.V);
    C* const z = column(head);
    if (p.normalize) {
      sums.find(c, z, batch, t, head);
      sums.divide(c, o);
      decay.decay_column(z, c.K);
      sums.advance(c, z);
    }
    store_rows(p.o_dtype, o, n, c.V, result, o_stride, static_cast<C>(p.scale));
    for (int64_t d = 0; d < c.K; ++d) {
      decay.decay_row(S.row(d), d, c.V);
      if (decays_values()) values.decay_row(S.row(d));
    }
    multiply<ALayout::kTransposed>(c.k_out, added, S, c.K, c.V, Update::kKeys * n, Into::add);
  }

 private:
  bool decays_values() const { return Update::kValueDecay && values.present(); }
  Matrix<C> state(int64_t head) const { return states.at((head - first) * p.key_width); }
  C* column(int64_t head) const { return columns.row(head - first); }
};

template <class Update>
int64_t forward_bytes(const Recurrence& p, int64_t heads) {
  int64_t result = 0;
  choose<Update>(p, [&]<class C, class Decay>() {
    RecurrenceParams params{};
    params.recurrence = p, params.heads = heads;
    result = Forward<C, Decay, Update>(params, nullptr, 0).room.bytes();
  });
  return result;
}

template <class Update>
void run_forward(const RecurrenceParams& params, void* memory, int64_t begin, int64_t end) {
  const FlushDenormals flush;
  const Recurrence& p = params.recurrence;
  OMNIATTN_ASSERT_ITEMS(begin, end, p.sequences * ceil_div(p.value_heads, params.heads));
  OMNIATTN_ASSERT_HAS(memory, forward_bytes<Update>(p, params.heads));
  choose<Update>(p, [&]<class C, class Decay>() {
    for (int64_t i = begin; i < end; ++i) {
      forward_item<C, Update, Forward<C, Decay, Update>>(params, memory, i);
    }
  });
  stream_fence();
}

// Kernels of calls with this update.
template <class Update>
inline constexpr RecurrenceKernels kForwardKernels{forward_bytes<Update>, run_forward<Update>};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
