// What every form of the recurrence reads: the rows of one head over a run of steps, widened, and
// the memory of a thread.
#pragma once

#include "kernels/recurrence/recurrence.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Hands out parts of the memory of a thread, or without memory counts their bytes.
class Parts {
 public:
  explicit Parts(void* memory = nullptr) : next_(reinterpret_cast<uintptr_t>(memory)) {}

  template <class C>
  C* take(int64_t count) {
    const uintptr_t part = next_;
    next_ += static_cast<uintptr_t>(round_up(count * static_cast<int64_t>(sizeof(C)), 64) + kGap);
    return reinterpret_cast<C*>(part);
  }
  int64_t bytes() const { return static_cast<int64_t>(next_); }

 private:
  static constexpr int64_t kGap = 320;  // so that rows of two parts do not lie 4 KiB apart
  uintptr_t next_;
};

template <class T>
OMNIATTN_INLINE const T* head_rows(const HeadRows& x, int64_t row, int64_t step, int64_t head) {
  return static_cast<const T*>(x.data) + row * x.batch + step * x.step + head * x.head;
}

// One value head of one sequence.
template <class T>
struct Head {
  using C = compute_t<T>;

  const Recurrence& p;
  int64_t item, head, key_head;
  StateSequence s;

  Head(const Recurrence& problem, int64_t i)
      : p(problem),
        item(i),
        head(i % p.value_heads),
        key_head(head / (p.value_heads / p.key_heads)),
        s(state_sequence(p, i / p.value_heads)) {}

  int64_t state_elements() const { return p.key_dim * p.value_dim; }
  // The state of this head among those of all sequences, and in a slot.
  template <class A>
  A* of_item(A* states) const {
    return states + item * state_elements();
  }
  template <class A>
  A* in_slot(A* states, int64_t slot) const {
    return states + ((s.slot + slot) * p.value_heads + head) * state_elements();
  }
  // Elements in front of a step of this head in a contiguous tensor (B, T, Hv, cols).
  int64_t offset(int64_t t, int64_t cols) const {
    return ((s.row * p.steps + s.begin + t) * p.value_heads + head) * cols;
  }

  const T* q(int64_t t) const { return head_rows<T>(p.q, s.row, s.begin + t, key_head); }
  const T* k(int64_t t) const { return head_rows<T>(p.k, s.row, s.begin + t, key_head); }
  const T* v(int64_t t) const { return head_rows<T>(p.v, s.row, s.begin + t, head); }
  const C* g(int64_t t) const { return head_rows<C>(p.g, s.row, s.begin + t, head); }
  const C* beta(int64_t t) const { return head_rows<C>(p.beta, s.row, s.begin + t, head); }
};

// Rows of K end on a whole vector, with zeros past K.
template <class C>
int64_t padded_keys(const Recurrence& p) {
  return round_up(p.key_dim, Vec<C>::kWidth);
}

// At most kStateSteps steps of one head.
template <class C>
struct Run {
  int64_t count = 0;
  int64_t keys;  // elements between rows of K
  C* q;          // (count, K), with the scale
  C* k;          // (count, K)
  C* a;          // exp(g): (count), or (count, K) per channel, with ones past K
  C* beta;       // (count)

  Run(const Recurrence& p, Parts& parts)
      : keys(padded_keys<C>(p)),
        q(parts.take<C>(kStateSteps * keys)),
        k(parts.take<C>(kStateSteps * keys)),
        a(parts.take<C>(kStateSteps * (p.decay == StateDecay::channel ? keys : 1))),
        beta(parts.take<C>(kStateSteps)) {}

  // Steps [t, t + n) of a head.
  template <class T>
  void read(const Head<T>& head, int64_t t, int64_t n) {
    const Recurrence& p = head.p;
    count = n;
    const C scale = static_cast<C>(p.scale);
    for (int64_t i = 0; i < n; ++i) {
      const T* const q_row = head.q(t + i);
      const T* const k_row = head.k(t + i);
      for_row<C>(p.key_dim, [&](int64_t d, auto part) {
        store(q + i * keys + d, part.load(q_row + d) * scale);
        store(k + i * keys + d, part.load(k_row + d));
      });
      if (p.decay == StateDecay::channel) {
        const C* const g = head.g(t + i);
        for_row<C>(p.key_dim,
                   [&](int64_t d, auto part) { store(a + i * keys + d, exp(part.load(g + d))); });
      } else {
        a[i] = p.decay == StateDecay::head ? *head.g(t + i) : C(0);
      }
      beta[i] = p.update == StateUpdate::delta ? *head.beta(t + i) : C(1);
    }
    if (p.decay == StateDecay::channel) return;
    for_row<C>(n, [&](int64_t i, auto part) { part.store(a + i, exp(part.load(a + i))); });
  }
};

// Calls f(first column, part, kVecs) for the columns of V: four vectors at a time, then one, the
// last of which may be a part.
template <int kCount>
struct Vecs {
  static constexpr int kVecs = kCount;
};
template <class C, class F>
OMNIATTN_INLINE void for_columns(int64_t n, const F& f) {
  constexpr int64_t kWidth = Vec<C>::kWidth;
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) f(i, Whole{}, Vecs<4>{});
  for (; i + kWidth <= n; i += kWidth) f(i, Whole{}, Vecs<1>{});
  if (i < n) f(i, First{n - i}, Vecs<1>{});
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
