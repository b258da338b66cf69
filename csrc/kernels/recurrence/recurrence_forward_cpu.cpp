// Forward of matrix-state recurrences, see recurrence.h: chunk by chunk, with the states of the
// heads of an item in memory of the thread. The heads take turns: the rows of one of them are pages
// apart, and all heads of a chunk together are read at three times the rate.
#include "kernels/recurrence/recurrence_policy.h"
#include "kernels/recurrence/recurrence_steps.h"
#include "kernels/recurrence/recurrence_sums.h"
#include "runtime/denormals.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// The state before the first token: the initial one, or zeros in the place of the final one. Saved
// as the first of `states`.
template <class C>
const C* state_before(const RecurrenceParams& params, const RecurrenceSequence& s, int64_t head) {
  const Recurrence& p = params.recurrence;
  const int64_t K = p.key_width, V = p.value_width;
  const bool given = p.initial_state != nullptr;
  C* const from = state_of<C>(p, given ? p.initial_state : params.final_state, s.index, head);
  if (!given) zero_rows(Matrix<C>{from, p.state_width()}, K, p.state_width());
  if (params.states != nullptr && s.count > 0) {
    C* const saved = state_of<C>(p, params.states, s.slot, head);
    load_state(p, from, Matrix<C>{saved, V}, saved + K * V);
  }
  return from;
}

// S' = e^(G_C) S + k_out^T u,  o = scale (q_in S + P u), with u by the update and P [P, P_b] of two
// keys.
template <class C, class Decay, class Update>
struct Forward {
  const RecurrenceParams& params;
  const Recurrence& p = params.recurrence;
  Room<C> room;
  Chunk<C> c;
  Decay decay;
  Sums<C> sums;
  Matrix<C> met;        // [probe_in; q_in] S
  Matrix<C> states;     // of the heads of the item
  Matrix<C> columns{};  // their z

  Forward(const RecurrenceParams& x, void* memory)
      : params(x),
        room(memory),
        c(p, room, packed_elements<C>(p.key_width, recurrence_chunk(p.channel_decay))),
        decay(p, room),
        sums(p, room) {
    met = room.rows(2 * recurrence_chunk(p.channel_decay), p.value_width);
    states = room.rows(p.key_width * params.heads, p.value_width);
    if (p.normalize) columns = room.rows(params.heads, p.key_width);
  }

  // The heads [first_head, end).
  void run(const RecurrenceSequence& s, int64_t first_head, int64_t end) {
    first = first_head;
    const int64_t K = p.key_width, V = p.value_width, size = recurrence_chunk(p.channel_decay);
    const auto state = [&](int64_t head) { return states.at((head - first) * K); };
    for (int64_t head = first; head < end; ++head) {
      load_state(p, state_before<C>(params, s, head), state(head), columns.row(head - first));
    }
    for (int64_t t = 0; t < s.count; t += size) {
      for (int64_t head = first; head < end; ++head) {
        if (params.states != nullptr && t > 0) {
          C* const to = state_of<C>(p, params.states, s.slot + t / size, head);
          stream_rows(kComputed<C>, state(head), K, V, reinterpret_cast<char*>(to), V);
          if (p.normalize) copy_rows<C>(columns.row(head - first), 0, 1, K, {to + K * V, 0});
        }
        const Turn now{s.begin + t, head};
        const Turn next = head + 1 < end ? Turn{now.t, head + 1} : Turn{now.t + size, first};
        chunk(s, now, smaller(size, s.count - t), state(head), next);
      }
    }
    for (int64_t head = first; head < end; ++head) {
      store_state(p, state(head), columns.row(head - first),
                  state_of<C>(p, params.final_state, s.index, head));
    }
  }

 private:
  struct Turn {
    int64_t t, head;  // first token of a chunk
  };
  int64_t first = 0;  // head of the item

  void chunk(const RecurrenceSequence& s, Turn now, int64_t n, Matrix<C> state, Turn next) {
    const int64_t batch = s.batch, t = now.t, head = now.head;
    // Rows of the probe come first, where there are any.
    const Matrix<C> o = met.at(n);
    const int64_t o_stride = p.value_heads * c.V, element = size_of(p.dtype);
    char* const result = out_row(p.dtype, p, params.o, batch, t, p.value_heads, head, c.V);
    Ahead ahead{[&](int64_t i) {
      prefetch_row<true>(result + i * o_stride * element, c.V * element);
      if (next.t + i < s.begin + s.count) c.fetch(batch, next.t + i, next.head);
    }};
    const bool same_keys = head > first && c.key_head_of(head) == c.key_head_of(head - 1);
    if (!same_keys) c.load(batch, t, n, c.key_head_of(head));
    c.load_update(s, t, head);
    decay.apply(c, batch, t, head, same_keys, ahead);
    if constexpr (Update::kProbe) {
      c.meet(c.probe_in, state, met, 2 * n, ahead);
      c.error = met;
    } else {
      c.meet(c.q_in, state, o, n, ahead);
    }
    Update::values(c);
    multiply_lower(c.P, c.u, o, n, c.V);
    if constexpr (Update::kKeys == 2) multiply_lower(c.P_b, c.u.at(n), o, n, c.V);
    if (c.skip != nullptr) add_skip(c.skip, c.v, o, n, c.V);
    C* const z = columns.row(head - first);
    if (p.normalize) {
      sums.find(c, z, batch, t, head);
      sums.divide(c, o);
      decay.decay_column(z, c.K);
      sums.advance(c, z);
    }
    store_rows(p.dtype, o, n, c.V, result, o_stride, static_cast<C>(p.scale));
    for (int64_t d = 0; d < c.K; ++d) decay.decay_row(state.row(d), d, c.V);
    multiply<ALayout::kTransposed>(c.k_out, c.u, state, c.K, c.V, Update::kKeys * n, Into::add);
  }
};

template <class C, class Decay, class Update>
void item(const RecurrenceParams& params, void* memory, int64_t index) {
  const Recurrence& p = params.recurrence;
  const int64_t parts = ceil_div(p.value_heads, params.heads), first = index % parts * params.heads;
  const int64_t end = smaller(first + params.heads, p.value_heads);
  const RecurrenceSequence s = recurrence_sequence(p, index / parts);
  if (s.count > kFewSteps) return Forward<C, Decay, Update>(params, memory).run(s, first, end);
  for (int64_t head = first; head < end; ++head) {
    C* const to = state_of<C>(p, params.final_state, s.index, head);
    const C* const from = state_before<C>(params, s, head);
    if (s.count > 0) {
      Room<C> room(memory);
      Step<C, Update> step(p, room);
      steps(params, s, step, from, to, head);
    } else if (from != to) {
      copy_rows(from, p.state_width(), p.key_width, p.state_width(),
                Matrix<C>{to, p.state_width()});
    }
  }
}

int64_t bytes(const Recurrence& p, int64_t heads) {
  int64_t result = 0;
  choose(p, [&]<class C, class Decay, class Update>() {
    RecurrenceParams params{};
    params.recurrence = p, params.heads = heads;
    result = Forward<C, Decay, Update>(params, nullptr).room.bytes();
  });
  return result;
}

void forward(const RecurrenceParams& params, void* memory, int64_t begin, int64_t end) {
  const FlushDenormals flush;
  const Recurrence& p = params.recurrence;
  OMNIATTN_ASSERT_ITEMS(begin, end, p.sequences * ceil_div(p.value_heads, params.heads));
  OMNIATTN_ASSERT_HAS(memory, bytes(p, params.heads));
  choose(p, [&]<class C, class Decay, class Update>() {
    for (int64_t i = begin; i < end; ++i) item<C, Decay, Update>(params, memory, i);
  });
  stream_fence();
}

}  // namespace

extern const RecurrenceKernels recurrence_kernels_table;
const RecurrenceKernels recurrence_kernels_table{bytes, forward};

}  // namespace omniattn::OMNIATTN_ISA
