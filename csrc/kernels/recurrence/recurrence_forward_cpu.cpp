// Forward of matrix-state recurrences, see recurrence.h: chunk by chunk, with the state in memory
// of the thread.
#include "kernels/recurrence/recurrence_policy.h"
#include "kernels/recurrence/recurrence_steps.h"
#include "runtime/denormals.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// S' = e^(G_C) S + k_out^T u,  o = scale (q_in S + P u), with u by the update and P [P, P_b] of two
// keys.
template <class C, class Decay, class Update>
struct Forward {
  const RecurrenceParams& params;
  const Recurrence& p = params.recurrence;
  Room<C> room;
  Chunk<C> c;
  Decay decay;
  Matrix<C> met;  // [probe_in; q_in] S
  Matrix<C> state;

  Forward(const RecurrenceParams& x, void* memory)
      : params(x),
        room(memory),
        c(p, room, packed_elements<C>(p.key_width, recurrence_chunk(p.channel_decay))),
        decay(p, room) {
    met = room.rows(2 * recurrence_chunk(p.channel_decay), p.value_width);
    state = room.rows(p.key_width, p.value_width);
  }

  void run(const RecurrenceSequence& s, const C* from, C* to, int64_t head) {
    const int64_t K = p.key_width, V = p.value_width, size = recurrence_chunk(p.channel_decay);
    copy_rows(from, V, K, V, state);
    for (int64_t t = 0; t < s.count; t += size) {
      if (params.states != nullptr && t > 0) {
        copy_rows(state.data, state.stride, K, V,
                  Matrix<C>{state_of<C>(p, params.states, s.slot + t / size, head), V});
      }
      chunk(s, s.begin + t, smaller(size, s.count - t), head);
    }
    copy_rows(state.data, state.stride, K, V, Matrix<C>{to, V});
  }

 private:
  void chunk(const RecurrenceSequence& s, int64_t t, int64_t n, int64_t head) {
    const int64_t batch = s.batch, size = recurrence_chunk(p.channel_decay);
    c.load(batch, t, n, head / (p.value_heads / p.key_heads));
    c.load_update(s, t, head);
    decay.apply(c, batch, t, head);
    // Rows of the probe come first, where there are any.
    const Matrix<C> o = met.at(n);
    const int64_t o_stride = p.value_heads * c.V, element = size_of(p.dtype);
    char* const result = out_row(p.dtype, p, params.o, batch, t, p.value_heads, head, c.V);
    const auto fetch = [&](int64_t i) {
      prefetch_row<true>(result + i * o_stride * element, c.V * element);
      if (t + size + i < s.begin + s.count) c.fetch(batch, t + size + i, head);
    };
    if constexpr (Update::kProbe) {
      c.meet(c.probe_in, state, met, 2 * n, fetch);
      c.error = met;
    } else {
      c.meet(c.q_in, state, o, n, fetch);
    }
    Update::values(c);
    multiply_lower(c.P, c.u, o, n, c.V);
    if constexpr (Update::kKeys == 2) multiply_lower(c.P_b, c.u.at(n), o, n, c.V);
    store_rows(p.dtype, o, n, c.V, result, o_stride, static_cast<C>(p.scale));
    for (int64_t d = 0; d < c.K; ++d) decay.decay_row(state.row(d), d, c.V);
    multiply<ALayout::kTransposed>(c.k_out, c.u, state, c.K, c.V, Update::kKeys * n, Into::add);
  }
};

// Item n Hv + head.
template <class C, class Decay, class Update>
void item(const RecurrenceParams& params, void* memory, int64_t index) {
  const Recurrence& p = params.recurrence;
  const int64_t n = index / p.value_heads, head = index % p.value_heads;
  const int64_t K = p.key_width, V = p.value_width;
  const RecurrenceSequence s = recurrence_sequence(p, n);
  C* const to = state_of<C>(p, params.final_state, n, head);
  const C* from = to;
  if (p.initial_state != nullptr) {
    from = state_of<C>(p, p.initial_state, n, head);
  } else {
    zero_rows(Matrix<C>{to, V}, K, V);
  }
  if (params.states != nullptr && s.count > 0) {
    copy_rows(from, V, K, V, Matrix<C>{state_of<C>(p, params.states, s.slot, head), V});
  }
  if (s.count > kFewSteps) {
    Forward<C, Decay, Update>(params, memory).run(s, from, to, head);
  } else if (s.count > 0) {
    Room<C> room(memory);
    Step<C, Update> step(p, room);
    steps(params, s, step, from, to, head);
  } else if (from != to) {
    copy_rows(from, V, K, V, Matrix<C>{to, V});
  }
}

int64_t bytes(const Recurrence& p) {
  int64_t result = 0;
  choose(p, [&]<class C, class Decay, class Update>() {
    RecurrenceParams params{};
    params.recurrence = p;
    result = Forward<C, Decay, Update>(params, nullptr).room.bytes();
  });
  return result;
}

void forward(const RecurrenceParams& params, void* memory, int64_t begin, int64_t end) {
  const FlushDenormals flush;
  OMNIATTN_ASSERT_ITEMS(begin, end, params.recurrence.sequences * params.recurrence.value_heads);
  OMNIATTN_ASSERT_HAS(memory, bytes(params.recurrence));
  choose(params.recurrence, [&]<class C, class Decay, class Update>() {
    for (int64_t i = begin; i < end; ++i) item<C, Decay, Update>(params, memory, i);
  });
}

}  // namespace

extern const RecurrenceKernels recurrence_kernels_table;
const RecurrenceKernels recurrence_kernels_table{bytes, forward};

}  // namespace omniattn::OMNIATTN_ISA
