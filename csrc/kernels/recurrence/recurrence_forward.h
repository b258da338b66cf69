// Shared by all forwards of recurrences: items, their states, and the order of heads and chunks.
// All heads of an item process a chunk before the next chunk: the rows of one head are pages apart,
// while all heads of a chunk together are read at three times the rate.
#pragma once

#include "kernels/recurrence/recurrence_steps.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// State before the first token: the initial state, or zeros written to the final state's memory.
// Saved as the first of `states`.
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

// First token, and head, of the next chunk to process.
struct Turn {
  int64_t t, head;
};

// Processes the heads [first, end) of a sequence chunk by chunk. The form holds their states:
//
//   load(head, from)         loads a state from its tensor
//   save(head, to)           saves a state for the backward
//   store(head, to)          stores a state to its tensor
//   chunk(s, now, n, next)   processes n tokens of a head; `next` is the turn after it
template <class C, class Form>
void run_chunks(Form& form, const RecurrenceParams& params, const RecurrenceSequence& s,
                int64_t first, int64_t end) {
  const Recurrence& p = params.recurrence;
  const int64_t size = recurrence_chunk(p);
  for (int64_t head = first; head < end; ++head) {
    form.load(head, state_before<C>(params, s, head));
  }
  for (int64_t t = 0; t < s.count; t += size) {
    for (int64_t head = first; head < end; ++head) {
      if (params.states != nullptr && t > 0) {
        form.save(head, state_of<C>(p, params.states, s.slot + t / size, head));
      }
      const Turn now{s.begin + t, head};
      const Turn next = head + 1 < end ? Turn{now.t, head + 1} : Turn{now.t + size, first};
      form.chunk(s, now, smaller(size, s.count - t), next);
    }
  }
  for (int64_t head = first; head < end; ++head) {
    form.store(head, state_of<C>(p, params.final_state, s.index, head));
  }
}

// Processes an item. A few tokens are single steps; Form{params, memory, first head} does chunks.
template <class C, class Update, class Form>
void forward_item(const RecurrenceParams& params, void* memory, int64_t index) {
  const Recurrence& p = params.recurrence;
  const int64_t parts = ceil_div(p.value_heads, params.heads), first = index % parts * params.heads;
  const int64_t end = smaller(first + params.heads, p.value_heads);
  const RecurrenceSequence s = recurrence_sequence(p, index / parts);
  if (s.count > kFewSteps) {
    Form form(params, memory, first);
    return run_chunks<C>(form, params, s, first, end);
  }
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

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
