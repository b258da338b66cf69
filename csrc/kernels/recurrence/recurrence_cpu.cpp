// Heads of the recurrence on the CPU, see recurrence.h: runs of kStateSteps steps, one after the
// other.
#include "kernels/recurrence/recurrence.h"

#include "kernels/recurrence/recurrence_chunk.h"
#include "kernels/recurrence/recurrence_chunk_backward.h"
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

// A state into rows of scratch, or zeros.
template <class C>
void load_state(const C* from, C* to, int64_t to_row, int64_t keys, int64_t values) {
  if (from != nullptr) return copy_state(from, values, to, to_row, keys, values);
  copy_or_clear(to, from, keys * to_row);
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

// Heads of one sequence whose states a thread keeps in its L2. They take turns chunk by chunk,
// since their rows lie in the same pages and lines that follow each other: one head after the other
// took 1.3 times as long.
constexpr int64_t kStateBytes = 256 << 10;
template <class C>
int64_t heads_together(const Recurrence& p) {
  const int64_t bytes = p.key_dim * padded(p.value_dim) * static_cast<int64_t>(sizeof(C));
  return larger(1, smaller(kHeadsTogether, kStateBytes / larger(bytes, 1)));
}

template <StateUpdate kUpdate, class T>
void forward_by_chunks(const RecurrenceParams& p, int64_t first, int64_t count, void* memory) {
  using C = compute_t<T>;
  Parts parts(memory);
  Chunk<C, kUpdate> x(p.problem, parts);
  const int64_t keys = x.keys, values = x.values, steps = Head<T>(p.problem, first).s.steps;
  C* const all = parts.take<C>(count * keys * x.ldv);
  for (int64_t i = 0; i < count; ++i) {
    const Head<T> head(p.problem, first + i);
    load_state(ForwardStates<T>{p, head}.initial(), all + i * keys * x.ldv, x.ldv, keys, values);
  }
  for (int64_t t = 0; t < steps; t += kChunk) {
    for (int64_t i = 0; i < count; ++i) {
      const Head<T> head(p.problem, first + i);
      const ForwardStates<T> states{p, head};
      const int64_t next = i + 1 < count ? t : smaller(t + kChunk, steps);
      const Upcoming<T> upcoming{Head<T>(p.problem, first + (i + 1) % count), next,
                                 smaller(kChunk, steps - next)};
      x.state = all + i * keys * x.ldv;
      if (p.states != nullptr && t % kStateSteps == 0) {
        copy_state(x.state, x.ldv, states.at(t), values, keys, values);
      }
      forward_chunk(x, head, t, smaller(kChunk, steps - t), static_cast<T*>(p.o), upcoming);
      if (t + kChunk >= steps) copy_state(x.state, x.ldv, states.last(), values, keys, values);
    }
  }
}

// Whether a sequence is long enough for chunks, and has a form in chunks.
bool takes_chunks(const Recurrence& p, int64_t steps) {
  return steps >= kBlock && p.decay != StateDecay::channel;
}

// Where the gradients of the steps of a head are written, as the call wants them.
template <class T>
struct GradientRows {
  using C = compute_t<T>;
  const RecurrenceBackwardParams& p;
  const Head<T>& head;

  void key(void* to, int64_t t, const C* from, C scale) const {
    const int64_t offset = head.offset(t, p.problem.key_dim);
    p.problem.value_heads > p.problem.key_heads ? write(static_cast<C*>(to) + offset, from, scale)
                                                : write(static_cast<T*>(to) + offset, from, scale);
  }
  void keys(int64_t t, const C* dq, const C* dk) const {
    key(p.dq, t, dq, static_cast<C>(p.problem.scale));
    key(p.dk, t, dk, C(1));
  }
  void values(int64_t t, const C* from) const {
    T* const to = static_cast<T*>(p.dv) + head.offset(t, p.problem.value_dim);
    for_row<C>(p.problem.value_dim,
               [&](int64_t c, auto part) { part.store(to + c, part.load(from + c)); });
  }
  void gates(int64_t t, const C* dg, const C* dbeta) const {
    if (p.dbeta != nullptr) static_cast<C*>(p.dbeta)[head.offset(t, 1)] = *dbeta;
    if (p.dg == nullptr) return;
    if (p.problem.decay == StateDecay::channel) {
      write(static_cast<C*>(p.dg) + head.offset(t, p.problem.key_dim), dg, C(1));
    } else {
      static_cast<C*>(p.dg)[head.offset(t, 1)] = *dg;
    }
  }
  const C* final_state() const {
    const C* const all = static_cast<const C*>(p.grad_final);
    return all == nullptr ? nullptr : head.of_item(all);
  }
  const C* state(int64_t t) const {
    return head.in_slot(static_cast<const C*>(p.states), t / kStateSteps);
  }

 private:
  template <class S>
  void write(S* to, const C* from, C scale) const {
    for_row<C>(p.problem.key_dim,
               [&](int64_t d, auto part) { part.store(to + d, part.load(from + d) * scale); });
  }
};

// The first step of the last run.
int64_t last_run(int64_t steps) { return (ceil_div(steps, kStateSteps) - 1) * kStateSteps; }

template <class T>
void backward_head_by_steps(const RecurrenceBackwardParams& p, const Head<T>& head, void* memory) {
  using C = compute_t<T>;
  Parts parts(memory);
  Run<C> run(p.problem, parts);
  const BackwardSteps<C> work(p.problem, run.keys, parts);
  C* const own = parts.take<C>(head.state_elements());
  C* const ds = p.dstate != nullptr ? head.of_item(static_cast<C*>(p.dstate)) : own;
  const GradientRows<T> rows{p, head};
  copy_or_clear(ds, rows.final_state(), head.state_elements());
  const int64_t gates = p.problem.decay == StateDecay::channel ? run.keys : 1;
  for (int64_t t = last_run(head.s.steps); t >= 0; t -= kStateSteps) {
    run.read(head, t, smaller(kStateSteps, head.s.steps - t));
    dispatch_rule(p.problem, [&]<StateDecay kDecay, StateUpdate kUpdate>() {
      backward_steps<kDecay, kUpdate>(head, run, t, p.grad_o, rows.state(t), ds,
                                      static_cast<T*>(p.dv), work);
    });
    for (int64_t i = 0; i < run.count; ++i) {
      rows.keys(t + i, work.dq + i * run.keys, work.dk + i * run.keys);
      rows.gates(t + i, work.dg + i * gates, work.dbeta + i);
    }
  }
}

// The chunks of a run, and what their gradients share.
template <class C, StateUpdate kUpdate>
struct ChunksBackward {
  static constexpr int64_t kCount = kStateSteps / kChunk;
  Chunk<C, kUpdate> chunks[kCount];
  ChunkGradients<C, kUpdate> grads;

  ChunksBackward(const Recurrence& p, Parts& parts)
      : chunks{{p, parts}, {p, parts}}, grads(p, parts) {}

  template <class T>
  void chunk(const RecurrenceBackwardParams& p, const Head<T>& head, int64_t t,
             const Chunk<C, kUpdate>& x) const {
    using X = Chunk<C, kUpdate>;
    const GradientRows<T> rows{p, head};
    grads.read(x, head, p.grad_o, t);
    grads.find_du(x);
    if constexpr (X::kDelta) grads.solve(x);
    for (int64_t i = 0; i < x.n; ++i) {
      rows.values(t + i, X::kDelta ? grads.out + 2 * i * x.ldv : grads.du + i * x.ldv);
    }
    grads.find_keys(x);
    grads.find_state(x);
    grads.finish(x, p.dg != nullptr);
    for (int64_t i = 0; i < x.n; ++i) {
      rows.keys(t + i, X::of_q(grads.readers, i, x.ldk), grads.writers + i * x.ldk);
      rows.gates(t + i, grads.g + i, grads.beta + i);
    }
  }

  template <class T>
  void run(const RecurrenceBackwardParams& p, const Head<T>& head, int64_t t) {
    Chunk<C, kUpdate>& first = chunks[0];
    copy_state<C>(GradientRows<T>{p, head}.state(t), first.values, first.state, first.ldv,
                  first.keys, first.values);
    const int64_t steps = smaller(kStateSteps, head.s.steps - t);
    const int64_t count = ceil_div(steps, kChunk);
    for (int64_t c = 0; c < count; ++c) {
      Chunk<C, kUpdate>& x = chunks[c];
      repeat_chunk(x, head, t + c * kChunk, smaller(kChunk, steps - c * kChunk));
      if (c + 1 == count) break;
      copy_or_clear(chunks[c + 1].state, x.state, x.keys * x.ldv);
      x.add_outer(chunks[c + 1].state, x.ue);
    }
    for (int64_t c = count; c-- > 0;) chunk(p, head, t + c * kChunk, chunks[c]);
  }
};

template <StateUpdate kUpdate, class T>
void backward_by_chunks(const RecurrenceBackwardParams& p, int64_t first, int64_t count,
                        void* memory) {
  using C = compute_t<T>;
  Parts parts(memory);
  ChunksBackward<C, kUpdate> work(p.problem, parts);
  const int64_t ldv = work.chunks[0].ldv, keys = p.problem.key_dim, values = p.problem.value_dim;
  C* const all = parts.take<C>(count * keys * ldv);
  for (int64_t i = 0; i < count; ++i) {
    const Head<T> head(p.problem, first + i);
    load_state(GradientRows<T>{p, head}.final_state(), all + i * keys * ldv, ldv, keys, values);
  }
  for (int64_t t = last_run(Head<T>(p.problem, first).s.steps); t >= 0; t -= kStateSteps) {
    for (int64_t i = 0; i < count; ++i) {
      work.grads.ds = all + i * keys * ldv;
      work.run(p, Head<T>(p.problem, first + i), t);
    }
  }
  for (int64_t i = 0; p.dstate != nullptr && i < count; ++i) {
    copy_state(all + i * keys * ldv, ldv,
               Head<T>(p.problem, first + i).of_item(static_cast<C*>(p.dstate)), values, keys,
               values);
  }
}

int64_t forward_bytes(const Recurrence& p) {
  Parts steps, chunks;
  dispatch_compute(p.dtype, [&]<class C>(C) {
    Run<C>(p, steps);
    if (!takes_chunks(p, p.steps)) return;
    const Chunk<C, StateUpdate::delta> x(p, chunks);
    chunks.take<C>(heads_together<C>(p) * x.keys * x.ldv);
  });
  return larger(steps.bytes(), chunks.bytes());
}
int64_t backward_bytes(const Recurrence& p) {
  Parts steps, chunks;
  dispatch_compute(p.dtype, [&]<class C>(C) {
    const Run<C> run(p, steps);
    BackwardSteps<C>(p, run.keys, steps);
    steps.take<C>(p.key_dim * p.value_dim);
    if (!takes_chunks(p, p.steps)) return;
    const ChunksBackward<C, StateUpdate::delta> work(p, chunks);
    chunks.take<C>(heads_together<C>(p) * p.key_dim * work.chunks[0].ldv);
  });
  return larger(steps.bytes(), chunks.bytes());
}

// Calls by_steps(head), or by_chunks<update, T>(first, count) for heads of one sequence that is
// long enough for chunks.
template <class P, class BySteps, class ByChunks>
OMNIATTN_INLINE void for_heads(const P& p, int64_t begin, int64_t end, const BySteps& by_steps,
                               const ByChunks& by_chunks) {
  const FlushDenormals guard;
  const Recurrence& x = p.problem;
  dispatch(x.dtype, [&]<class T>(T) {
    for (int64_t i = begin, count; i < end; i += count) {
      const Head<T> head(x, i);
      count = smaller(smaller(end - i, x.value_heads - head.head), heads_together<compute_t<T>>(x));
      if (!takes_chunks(x, head.s.steps)) {
        count = 1;
        by_steps(head);
      } else if (x.update == StateUpdate::delta) {
        by_chunks.template operator()<StateUpdate::delta, T>(i, count);
      } else {
        by_chunks.template operator()<StateUpdate::plain, T>(i, count);
      }
    }
  });
}

void forward(const RecurrenceParams& p, void* memory, int64_t begin, int64_t end) {
  for_heads(
      p, begin, end, [&](const auto& head) { forward_head_by_steps(p, head, memory); },
      [&]<StateUpdate kUpdate, class T>(int64_t first, int64_t count) {
        forward_by_chunks<kUpdate, T>(p, first, count, memory);
      });
}
void backward(const RecurrenceBackwardParams& p, void* memory, int64_t begin, int64_t end) {
  for_heads(
      p, begin, end, [&](const auto& head) { backward_head_by_steps(p, head, memory); },
      [&]<StateUpdate kUpdate, class T>(int64_t first, int64_t count) {
        backward_by_chunks<kUpdate, T>(p, first, count, memory);
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
