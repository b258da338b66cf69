// Heads of the recurrence on the CPU, see recurrence.h: runs of kStateSteps steps, one after the
// other.
#include "kernels/recurrence/recurrence.h"

#include "kernels/recurrence/recurrence_chunk.h"
#include "kernels/recurrence/recurrence_rows.h"
#include "kernels/recurrence/recurrence_steps.h"
#include "runtime/denormals.h"
#include "runtime/dispatch.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
void copy_or_clear(C* to, const C* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from != nullptr ? from[i] : C(0);
}

// Calls f.template operator()<decay, update>().
template <class F>
OMNIATTN_INLINE void dispatch_rule(const Recurrence& p, const F& f) {
  const auto with_decay = [&]<StateUpdate kUpdate>() {
    switch (p.decay) {
      case StateDecay::none:
        return f.template operator()<StateDecay::none, kUpdate>();
      case StateDecay::head:
        return f.template operator()<StateDecay::head, kUpdate>();
      case StateDecay::channel:
        return f.template operator()<StateDecay::channel, kUpdate>();
    }
  };
  p.update == StateUpdate::delta ? with_decay.template operator()<StateUpdate::delta>()
                                 : with_decay.template operator()<StateUpdate::plain>();
}

// Where the states of a head are in a forward call: at the starts of runs in slots if the call
// wants them, the last one in final_state.
template <class T>
struct ForwardStates {
  using C = compute_t<T>;
  const RecurrenceParams& p;
  const Head<T>& head;

  const C* initial() const {
    const C* const all = static_cast<const C*>(p.problem.initial_state);
    return all == nullptr ? nullptr : head.of_item(all);
  }
  C* last() const { return head.of_item(static_cast<C*>(p.final_state)); }
  C* at(int64_t t) const {
    C* const states = static_cast<C*>(p.states);
    return states == nullptr || t >= head.s.steps ? last() : head.in_slot(states, t / kStateSteps);
  }
};

template <class T>
void forward_head_by_steps(const RecurrenceParams& p, const Head<T>& head, void* memory) {
  using C = compute_t<T>;
  Parts parts(memory);
  Run<C> run(p.problem, parts);
  const ForwardStates<T> states{p, head};
  copy_or_clear(states.at(0), states.initial(), head.state_elements());
  for (int64_t t = 0; t < head.s.steps; t += kStateSteps) {
    run.read(head, t, smaller(kStateSteps, head.s.steps - t));
    dispatch_rule(p.problem, [&]<StateDecay kDecay, StateUpdate kUpdate>() {
      forward_steps<kDecay, kUpdate>(head, run, t, states.at(t), states.at(t + kStateSteps),
                                     static_cast<T*>(p.o));
    });
  }
}

template <StateUpdate kUpdate, class T>
void forward_head_by_chunks(const RecurrenceParams& p, const Head<T>& head, void* memory) {
  using C = compute_t<T>;
  Parts parts(memory);
  Chunk<C, kUpdate> x(p.problem, parts);
  const ForwardStates<T> states{p, head};
  const int64_t keys = x.keys, values = x.values;
  if (states.initial() != nullptr) {
    copy_state(states.initial(), values, x.state, x.ldv, keys, values);
  } else {
    copy_or_clear(x.state, static_cast<const C*>(nullptr), keys * x.ldv);
  }
  for (int64_t t = 0; t < head.s.steps; t += kChunk) {
    if (p.states != nullptr && t % kStateSteps == 0) {
      copy_state(static_cast<const C*>(x.state), x.ldv, states.at(t), values, keys, values);
    }
    forward_chunk(x, head, t, smaller(kChunk, head.s.steps - t), static_cast<T*>(p.o));
  }
  copy_state(static_cast<const C*>(x.state), x.ldv, states.last(), values, keys, values);
}

// Whether a sequence is long enough for chunks, and has a form in chunks.
bool takes_chunks(const Recurrence& p, int64_t steps) {
  return steps >= kBlock && p.decay != StateDecay::channel;
}

// Rows of the gradients of a run, as the call wants them.
template <class T>
void write_gradients(const RecurrenceBackwardParams& p, const Head<T>& head, int64_t first,
                     const Run<compute_t<T>>& run, const BackwardSteps<compute_t<T>>& work) {
  using C = compute_t<T>;
  const int64_t keys = p.problem.key_dim;
  const bool shared = p.problem.value_heads > p.problem.key_heads;
  const auto write = [&]<class S>(S* to, const C* from, C scale) {
    for_row<C>(keys,
               [&](int64_t d, auto part) { part.store(to + d, part.load(from + d) * scale); });
  };
  const auto write_key = [&](void* to, int64_t t, const C* rows, C scale) {
    const C* const from = rows + t * run.keys;
    const int64_t offset = head.offset(first + t, keys);
    shared ? write(static_cast<C*>(to) + offset, from, scale)
           : write(static_cast<T*>(to) + offset, from, scale);
  };
  C* const dg = static_cast<C*>(p.dg);
  C* const dbeta = static_cast<C*>(p.dbeta);
  for (int64_t t = 0; t < run.count; ++t) {
    write_key(p.dq, t, work.dq, static_cast<C>(p.problem.scale));
    write_key(p.dk, t, work.dk, C(1));
    if (dbeta != nullptr) dbeta[head.offset(first + t, 1)] = work.dbeta[t];
    if (dg == nullptr) continue;
    if (p.problem.decay == StateDecay::channel) {
      write(dg + head.offset(first + t, keys), work.dg + t * run.keys, C(1));
    } else {
      dg[head.offset(first + t, 1)] = work.dg[t];
    }
  }
}

template <class T>
void backward_head(const RecurrenceBackwardParams& p, const Head<T>& head, Run<compute_t<T>>& run,
                   const BackwardSteps<compute_t<T>>& work, compute_t<T>* memory) {
  using C = compute_t<T>;
  C* const ds = p.dstate != nullptr ? head.of_item(static_cast<C*>(p.dstate)) : memory;
  const C* const grad_final = static_cast<const C*>(p.grad_final);
  copy_or_clear(ds, grad_final == nullptr ? nullptr : head.of_item(grad_final),
                head.state_elements());
  for (int64_t slot = ceil_div(head.s.steps, kStateSteps); slot-- > 0;) {
    const int64_t t = slot * kStateSteps;
    run.read(head, t, smaller(kStateSteps, head.s.steps - t));
    const C* const from = head.in_slot(static_cast<const C*>(p.states), slot);
    dispatch_rule(p.problem, [&]<StateDecay kDecay, StateUpdate kUpdate>() {
      backward_steps<kDecay, kUpdate>(head, run, t, p.grad_o, from, ds, static_cast<T*>(p.dv),
                                      work);
    });
    write_gradients(p, head, t, run, work);
  }
}

int64_t forward_bytes(const Recurrence& p) {
  Parts steps, chunks;
  dispatch_compute(p.dtype, [&]<class C>(C) {
    Run<C>(p, steps);
    if (takes_chunks(p, p.steps)) Chunk<C, StateUpdate::delta>(p, chunks);
  });
  return larger(steps.bytes(), chunks.bytes());
}
int64_t backward_bytes(const Recurrence& p) {
  Parts parts;
  dispatch_compute(p.dtype, [&]<class C>(C) {
    const Run<C> run(p, parts);
    BackwardSteps<C>(p, run.keys, parts);
    parts.take<C>(p.key_dim * p.value_dim);
  });
  return parts.bytes();
}

void forward(const RecurrenceParams& p, void* memory, int64_t begin, int64_t end) {
  const FlushDenormals guard;
  dispatch(p.problem.dtype, [&]<class T>(T) {
    for (int64_t i = begin; i < end; ++i) {
      const Head<T> head(p.problem, i);
      if (!takes_chunks(p.problem, head.s.steps)) {
        forward_head_by_steps(p, head, memory);
      } else if (p.problem.update == StateUpdate::delta) {
        forward_head_by_chunks<StateUpdate::delta>(p, head, memory);
      } else {
        forward_head_by_chunks<StateUpdate::plain>(p, head, memory);
      }
    }
  });
}
void backward(const RecurrenceBackwardParams& p, void* memory, int64_t begin, int64_t end) {
  const FlushDenormals guard;
  dispatch(p.problem.dtype, [&]<class T>(T) {
    using C = compute_t<T>;
    Parts parts(memory);
    Run<C> run(p.problem, parts);
    const BackwardSteps<C> work(p.problem, run.keys, parts);
    C* const ds = parts.take<C>(p.problem.key_dim * p.problem.value_dim);
    for (int64_t i = begin; i < end; ++i) {
      backward_head(p, Head<T>(p.problem, i), run, work, ds);
    }
  });
}

void add_heads(const Recurrence& p, const void* parts, void* sum, int64_t begin, int64_t end) {
  const int64_t group = p.value_heads / p.key_heads, keys = p.key_dim;
  dispatch(p.dtype, [&]<class T>(T) {
    for (int64_t row = begin; row < end; ++row) {
      const auto* const from = static_cast<const compute_t<T>*>(parts) + row * group * keys;
      T* const to = static_cast<T*>(sum) + row * keys;
      for_row<T>(keys, [&](int64_t d, auto part) {
        auto total = part.load(from + d);
        for (int64_t h = 1; h < group; ++h) total += part.load(from + h * keys + d);
        part.store(to + d, total);
      });
    }
  });
}

}  // namespace

extern const RecurrenceKernels recurrence_kernels_table;
const RecurrenceKernels recurrence_kernels_table{forward_bytes, backward_bytes, forward, backward,
                                                 add_heads};

}  // namespace omniattn::OMNIATTN_ISA
