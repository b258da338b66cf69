// Shared by the forward and the backward of the selective scan on the CPU, see selective.h: tables
// with channels in the lanes of vectors, B and C of some steps, and the rows of an item.
#pragma once

#include "kernels/scan/scan_rules.h"
#include "kernels/scan/selective.h"
#include "runtime/denormals.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"
#include "runtime/vec_trig.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr double kLog2E = 1.4426950408889634;

// 2^x within relative error 1e-7, and less near 0: decays of slow states are close to 1. Below
// 2^-126 it is 0, since kernels flush denormals; from 2^127.5 on it may be infinite.
OMNIATTN_INLINE VecF decay_of(VecF x) {
  constexpr float c[] = {1.0f,
                         6.931470037e-01f,
                         2.402224243e-01f,
                         5.550733581e-02f,
                         9.671512991e-03f,
                         1.326472731e-03f};
  const auto power = [&](VecF f) { return horner(f, c[0], c[1], c[2], c[3], c[4], c[5]); };
#if defined(__AVX512F__)
  const VecF f(_mm512_reduce_ps(x.v, 8)), n = x - f;  // scale2 saturates
  return scale2(power(f), n);
#else
  const VecF clamped = min(VecF(128.0f), max(VecF(-127.0f), x));
  const VecF n = round(clamped);
  const VecF::Bits whole = __builtin_convertvector(n.v, VecF::Bits);
  return power(clamped - n) * VecF::from_bits((whole + 127) << 23);  // a factor of 0 for 2^-127
#endif
}
OMNIATTN_INLINE VecD decay_of(VecD x) { return exp2(x); }

// Number of states that share one decay.
template <SelectiveRule kRule>
struct Rule {
  static constexpr SelectiveRule value = kRule;
  static constexpr int64_t parts = kRule == SelectiveRule::pairs ? 2 : 1;
};
template <class V>
struct Decay {
  V re, im;  // im is used by pairs only
};
// 1 - dt B^2, or e^(dt A) from the table of A, which is scaled by log2 e unless states are paired.
template <SelectiveRule kRule, class C>
OMNIATTN_INLINE Decay<Vec<C>> decay_at(Vec<C> dt, const C* table, Vec<C> b) {
  if constexpr (kRule == SelectiveRule::longhorn) {
    return {fma(-dt * b, b, Vec<C>(C(1))), Vec<C>()};
  } else if constexpr (kRule == SelectiveRule::decay) {
    return {decay_of(dt * load(table)), Vec<C>()};
  } else {
    const Vec<C> a = load(table), im = load(table + Vec<C>::kWidth), angle = dt * im;
    const Vec<C> size = decay_of(dt * static_cast<C>(kLog2E) * a);
    const SinCos<C> turn = sincos(angle, fma(dt, im, -angle));
    return {size * turn.cos, size * turn.sin};
  }
}
OMNIATTN_INLINE double scale_of_decays(const Selective& p) {
  return p.rule == SelectiveRule::decay ? kLog2E : 1;
}
// h = a h + x b for one state or a pair.
template <SelectiveRule kRule, class V>
OMNIATTN_INLINE void move_on(V* h, Decay<V> a, V x, V b, V b_im) {
  if constexpr (kRule != SelectiveRule::pairs) {
    h[0] = fma(a.re, h[0], x * b);
  } else {
    const V re = h[0], im = h[1];
    h[0] = fma(a.re, re, fma(-a.im, im, x * b));
    h[1] = fma(a.re, im, fma(a.im, re, x * b_im));
  }
}

// A table has one vector per state for each vector of channels.

// Calls f(n, Count) for blocks of all states, without padding: 0 times infinity is not 0. The
// number of states is a multiple of kLeast, and each block has at least kLeast states.
template <int kCount>
struct Count {
  static constexpr int64_t value = kCount;
};
template <int kMost, int kLeast, class F>
OMNIATTN_INLINE void for_states(int64_t states, const F& f) {
  int64_t n = 0;
  for (; n + kMost <= states; n += kMost) f(n, Count<kMost>{});
  if constexpr (kMost > kLeast) {
    if (n < states) {
      for_states<kMost / 2, kLeast>(states - n, [&](int64_t i, auto count) { f(n + i, count); });
    }
  }
}
// Calls f(n, Rule, Count) for blocks of the states of p.
template <int kMost, class F>
OMNIATTN_INLINE void for_blocks(const Selective& p, const F& f) {
  const auto of = [&](auto rule) {
    for_states<kMost, rule.parts>(p.states, [&](int64_t n, auto count) { f(n, rule, count); });
  };
  switch (p.rule) {
    case SelectiveRule::decay:
      return of(Rule<SelectiveRule::decay>{});
    case SelectiveRule::pairs:
      return of(Rule<SelectiveRule::pairs>{});
    case SelectiveRule::longhorn:
      return of(Rule<SelectiveRule::longhorn>{});
  }
}

// Table of one vector of channels from rows (lanes, states), times `scale`; null: zeros.
template <class C>
void load_table(const C* from, int64_t lanes, int64_t states, C scale, C* to) {
  constexpr int kWidth = Vec<C>::kWidth;
  for (int64_t n = 0; n < states; n += kWidth) {
    Vec<C> rows[kWidth];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kWidth; ++i) {
      const bool is_there = from != nullptr && i < lanes;
      rows[i] = is_there ? load_n(from + i * states + n, states - n) : zero<C>();
    }
    transpose(rows);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kWidth; ++i) {
      if (n + i < states) store(to + (n + i) * kWidth, rows[i] * scale);
    }
  }
}
template <class C>
void store_table(const C* from, int64_t lanes, int64_t states, C* to) {
  constexpr int kWidth = Vec<C>::kWidth;
  for (int64_t n = 0; n < states; n += kWidth) {
    Vec<C> rows[kWidth];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kWidth; ++i) {
      rows[i] = n + i < states ? load(from + (n + i) * kWidth) : zero<C>();
    }
    transpose(rows);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kWidth; ++i) {
      if (i < lanes) store_n(to + i * states + n, rows[i], states - n);
    }
  }
}
// B or C of some steps: one number for all channels of a group, or a vector of constants.
template <bool kConstant, class C>
struct Weights {
  const C* data;
  int64_t states;

  OMNIATTN_INLINE Vec<C> at(int64_t t, int64_t n) const {
    return kConstant ? load(data + n * Vec<C>::kWidth) : Vec<C>(data[t * states + n]);
  }
  // Weights of the states from n on.
  Weights from(int64_t n) const { return {data + (kConstant ? n * Vec<C>::kWidth : n), states}; }
};
// Calls f(B, C) with the weights of the vector of channels from i on, taken from `steps`
// or, if constant, from `table`.
template <class C, class F>
OMNIATTN_INLINE void with_weights(const Selective& p, const C* b_steps, const C* b_table,
                                  const C* c_steps, const C* c_table, int64_t i, const F& f) {
  const int64_t states = p.states, at = i * states;
  const auto with_c = [&](auto b) {
    p.c.constant ? f(b, Weights<true, C>{c_table + at, states})
                 : f(b, Weights<false, C>{c_steps, states});
  };
  p.b.constant ? with_c(Weights<true, C>{b_table + at, states})
               : with_c(Weights<false, C>{b_steps, states});
}

// An item with its parameters, tables and states, all in C.
template <class C>
struct ItemStates : SelectiveItem {
  static constexpr int kWidth = Vec<C>::kWidth;
  const Selective& p;

  ItemStates(const Selective& scan, int64_t item)
      : SelectiveItem(selective_item(scan, item)), p(scan) {}

  const C* vector(const void* x) const {
    return x == nullptr ? nullptr : static_cast<const C*>(x) + first;
  }
  // Row r of entry i of (.., rows, D).
  template <class P>
  auto* row_of(P* x, int64_t i, int64_t rows, int64_t r) const {
    using S = std::conditional_t<std::is_const_v<P>, const C, C>;
    return static_cast<S*>(x) + (i * rows + r) * p.channels + first;
  }

  // Calls f(i, lanes) for each vector of channels.
  template <class F>
  OMNIATTN_INLINE void for_vectors(const F& f) const {
    for (int64_t i = 0; i < width; i += kWidth) f(i, smaller(kWidth, width - i));
  }
  // Loads tables from entry `entry` of (.., D, N), null: zeros; stores them.
  void load_tables(const void* from, int64_t entry, double scale, C* to) const {
    const C* const rows =
        from == nullptr ? nullptr
                        : static_cast<const C*>(from) + (entry * p.channels + first) * p.states;
    for_vectors([&](int64_t i, int64_t lanes) {
      load_table(rows == nullptr ? rows : rows + i * p.states, lanes, p.states,
                 static_cast<C>(scale), to + i * p.states);
    });
  }
  void store_tables(const C* from, void* to, int64_t entry) const {
    C* const rows = static_cast<C*>(to) + (entry * p.channels + first) * p.states;
    for_vectors([&](int64_t i, int64_t lanes) {
      store_table(from + i * p.states, lanes, p.states, rows + i * p.states);
    });
  }
  void load_constants(const SelectiveWeights& w, C* to) const {
    if (w.constant) load_tables(w.rows.data, 0, 1, to);
  }
};

// An item with its rows of inputs and outputs.
template <class T>
struct Item : ItemStates<compute_t<T>> {
  using C = compute_t<T>;
  using ItemStates<C>::first, ItemStates<C>::group, ItemStates<C>::p, ItemStates<C>::s;

  Item(const Selective& scan, int64_t item) : ItemStates<C>(scan, item) {}

  const T* row(const ScanView& x, int64_t t) const {
    return x.row<T>(s.batch, s.begin + t) + first;
  }
  T* row(void* x, int64_t t) const {
    return static_cast<T*>(x) + (s.batch * p.rows.steps + s.begin + t) * p.channels + first;
  }
  // Loads steps [t, t + steps) of B or C, unless it is constant.
  void load_weights(const SelectiveWeights& w, int64_t t, int64_t steps, C* to) const {
    if (w.constant) return;
    p.rule == SelectiveRule::pairs ? load_rows<C>(w.rows, t, steps, to)
                                   : load_rows<T>(w.rows, t, steps, to);
  }
  template <class S>
  void load_rows(const ScanView& rows, int64_t t, int64_t steps, C* to) const {
    for (int64_t j = 0; j < steps; ++j) {
      const S* const from = rows.row<S>(s.batch, s.begin + t + j) + group * p.states;
      for (int64_t n = 0; n < p.states; ++n) to[j * p.states + n] = widen(from[n]);
    }
  }

  // |B|^2 of a step for Longhorn's rule, else 0.
  C square_of(const C* b) const {
    C sum = 0;
    for (int64_t n = 0; p.rule == SelectiveRule::longhorn && n < p.states; ++n) sum += b[n] * b[n];
    return sum;
  }
  OMNIATTN_INLINE ValueAndSlope<Vec<C>> step_of(int64_t i, auto part, const T* delta,
                                                C square) const {
    Vec<C> x = part.load(delta + i);
    if (p.bias != nullptr) x = x + part.load(this->vector(p.bias) + i);
    if (p.rule == SelectiveRule::longhorn) return scan_rules::longhorn_step(x, Vec<C>(square));
    if (p.softplus) return scan_rules::softplus(x);
    return {x, Vec<C>(C(1))};
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
