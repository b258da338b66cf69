// The recurrence step by step, as recurrence.h states it: for few steps, and for what has no chunk
// form. Columns of the state do not depend on each other, so that a block of them passes over the
// whole run while it is in L1.
#pragma once

#include "kernels/recurrence/recurrence_rows.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// One block of columns of V.
template <class C, class Part, int kVecs>
struct Columns {
  using V = Vec<C>;
  static constexpr int kWidth = V::kWidth;

  Part part;
  V x[kVecs];

  explicit Columns(Part p) : part(p) {}
  OMNIATTN_INLINE Columns zero() const {
    Columns y(part);
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) y.x[j] = V(C(0));
    return y;
  }
  template <class S>
  OMNIATTN_INLINE Columns load(const S* p) const {
    Columns y(part);
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) y.x[j] = part.load(p + j * kWidth);
    return y;
  }
  template <class S>
  OMNIATTN_INLINE void store(S* p) const {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) part.store(p + j * kWidth, x[j]);
  }
  // this + factor y
  OMNIATTN_INLINE Columns plus(C factor, const Columns& y) const {
    Columns z(part);
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) z.x[j] = fma(V(factor), y.x[j], x[j]);
    return z;
  }
  OMNIATTN_INLINE Columns times(C factor) const {
    Columns z(part);
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) z.x[j] = x[j] * factor;
    return z;
  }
  // acc + this y, lane by lane
  OMNIATTN_INLINE V dot(const Columns& y, V acc) const {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) acc = fma(x[j], y.x[j], acc);
    return acc;
  }
};

// a_t of row d of the state.
template <StateDecay kDecay, class C>
OMNIATTN_INLINE C decay_of(const Run<C>& run, int64_t t, int64_t d) {
  if constexpr (kDecay == StateDecay::none) return C(1);
  if constexpr (kDecay == StateDecay::head) return run.a[t];
  return run.a[t * run.keys + d];
}

// S_t in `to` from S_(t-1) in `from`, which may be the same; returns u_t. With q, o_t is added up.
template <StateDecay kDecay, StateUpdate kUpdate, class C, class Cols>
OMNIATTN_INLINE Cols advance(const Run<C>& run, int64_t t, int64_t key_dim, const C* from,
                             int64_t from_row, C* to, int64_t to_row, const Cols& v, Cols& e,
                             Cols* o) {
  const C* const k = run.k + t * run.keys;
  const C* const q = run.q + t * run.keys;
  e = v;
  if constexpr (kUpdate == StateUpdate::delta) {
    Cols read = v.zero();
    for (int64_t d = 0; d < key_dim; ++d) {
      read = read.plus(decay_of<kDecay>(run, t, d) * k[d], v.load(from + d * from_row));
    }
    e = v.plus(C(-1), read);
  }
  const Cols u = kUpdate == StateUpdate::delta ? e.times(run.beta[t]) : v;
  for (int64_t d = 0; d < key_dim; ++d) {
    Cols row = v.load(from + d * from_row);
    if constexpr (kDecay != StateDecay::none) row = row.times(decay_of<kDecay>(run, t, d));
    row = row.plus(k[d], u);
    row.store(to + d * to_row);
    if (o != nullptr) *o = o->plus(q[d], row);
  }
  return u;
}

// A run from the state in `from` to the one in `to`.
template <StateDecay kDecay, StateUpdate kUpdate, class T>
void forward_steps(const Head<T>& head, const Run<compute_t<T>>& run, int64_t first,
                   const compute_t<T>* from, compute_t<T>* to, T* out) {
  using C = compute_t<T>;
  const int64_t keys = head.p.key_dim, values = head.p.value_dim;
  for_columns<C>(values, [&]<class Part, int kVecs>(int64_t c, Part part, Vecs<kVecs>) {
    const Columns<C, Part, kVecs> columns(part);
    for (int64_t t = 0; t < run.count; ++t) {
      const auto v = columns.load(head.v(first + t) + c);
      auto o = columns.zero(), e = v;
      advance<kDecay, kUpdate>(run, t, keys, (t == 0 ? from : to) + c, values, to + c, values, v, e,
                               &o);
      o.store(out + head.offset(first + t, values) + c);
    }
  });
}

// Memory of the backward: gradients of a run, and of one block of columns the states and updates.
template <class C>
struct BackwardSteps {
  static constexpr int64_t kColumns = 4 * Vec<C>::kWidth;

  C* dq;      // (count, K), of q with its scale
  C* dk;      // (count, K)
  C* dg;      // (count), or (count, K) per channel
  C* dbeta;   // (count)
  C* states;  // (count + 1, K, kColumns): before each step, and after the last
  C* u;       // (count, kColumns)
  C* e;       // (count, kColumns)

  BackwardSteps(const Recurrence& p, int64_t keys, Parts& parts)
      : dq(parts.take<C>(kStateSteps * keys)),
        dk(parts.take<C>(kStateSteps * keys)),
        dg(parts.take<C>(kStateSteps * (p.decay == StateDecay::channel ? keys : 1))),
        dbeta(parts.take<C>(kStateSteps)),
        states(parts.take<C>((kStateSteps + 1) * p.key_dim * kColumns)),
        u(parts.take<C>(kStateSteps * kColumns)),
        e(parts.take<C>(kStateSteps * kColumns)) {}

  void clear(const Run<C>& run, bool per_channel) const {
    const auto fill = [&](C* x, int64_t n) {
      for (int64_t i = 0; i < n; ++i) x[i] = C(0);
    };
    fill(dq, run.count * run.keys);
    fill(dk, run.count * run.keys);
    fill(dg, run.count * (per_channel ? run.keys : 1));
    fill(dbeta, run.count);
  }
};

// Adds the sums over lanes of kWidth vectors.
template <class C>
OMNIATTN_INLINE void add_sums(C* to, Vec<C> (&rows)[Vec<C>::kWidth]) {
  transpose(rows);
  Vec<C> sum = rows[0];
#pragma GCC unroll 16
  for (int i = 1; i < Vec<C>::kWidth; ++i) sum += rows[i];
  store(to, load(to) + sum);
}

// What step t adds to dq, dk and dg, and dS before it from dS after it, which has q do^T already.
template <StateDecay kDecay, StateUpdate kUpdate, class C, class Cols>
OMNIATTN_INLINE void step_gradients(const Run<C>& run, int64_t t, int64_t key_dim,
                                    const BackwardSteps<C>& work, C* ds, int64_t row,
                                    const Cols& grad, const Cols& u, const Cols& de) {
  using V = Vec<C>;
  constexpr int64_t kWidth = V::kWidth, kColumns = BackwardSteps<C>::kColumns;
  constexpr bool kPerChannel = kDecay == StateDecay::channel;
  const C* const k = run.k + t * run.keys;
  const C* const before = work.states + t * key_dim * kColumns;
  V decay_sum(C(0));
  for (int64_t d = 0; d < key_dim; d += kWidth) {
    V dq[kWidth], dk[kWidth], dg[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      dq[i] = dk[i] = dg[i] = V(C(0));
      if (d + i >= key_dim) continue;
      const C a = decay_of<kDecay>(run, t, d + i);
      C* const ds_row = ds + (d + i) * row;
      const Cols decayed = u.load(before + (d + i) * kColumns).times(a);
      Cols after = u.load(ds_row);
      dq[i] = decayed.plus(k[d + i], u).dot(grad, dq[i]);
      dk[i] = after.dot(u, dk[i]);
      if constexpr (kUpdate == StateUpdate::delta) {
        dk[i] -= decayed.dot(de, V(C(0)));
        after = after.plus(-k[d + i], de);
      }
      if constexpr (kPerChannel) dg[i] = after.dot(decayed, dg[i]);
      if constexpr (kDecay == StateDecay::head) decay_sum = after.dot(decayed, decay_sum);
      after.times(a).store(ds_row);
    }
    add_sums(work.dq + t * run.keys + d, dq);
    add_sums(work.dk + t * run.keys + d, dk);
    if constexpr (kPerChannel) add_sums(work.dg + t * run.keys + d, dg);
  }
  if constexpr (kDecay == StateDecay::head) work.dg[t] += reduce_add(decay_sum);
}

// Gradients of a run from its first state in `from` and dS after it in `ds`, which becomes dS
// before it. dv is written, the rest is left in `work`.
template <StateDecay kDecay, StateUpdate kUpdate, class T>
void backward_steps(const Head<T>& head, const Run<compute_t<T>>& run, int64_t first,
                    const HeadRows& grad_o, const compute_t<T>* from, compute_t<T>* ds, T* dv,
                    const BackwardSteps<compute_t<T>>& work) {
  using C = compute_t<T>;
  constexpr int64_t kColumns = BackwardSteps<C>::kColumns;
  const int64_t keys = head.p.key_dim, values = head.p.value_dim;
  work.clear(run, kDecay == StateDecay::channel);
  for_columns<C>(values, [&]<class Part, int kVecs>(int64_t c, Part part, Vecs<kVecs>) {
    const Columns<C, Part, kVecs> columns(part);
    const Columns<C, Whole, kVecs> whole(Whole{});
    const int64_t block = keys * kColumns;
    for (int64_t d = 0; d < keys; ++d) {
      whole.zero().store(work.states + d * kColumns);
      columns.load(from + d * values + c).store(work.states + d * kColumns);
    }
    for (int64_t t = 0; t < run.count; ++t) {
      const auto v = columns.load(head.v(first + t) + c);
      auto e = v;
      C* const state = work.states + t * block;
      advance<kDecay, kUpdate, C, decltype(e)>(run, t, keys, state, kColumns, state + block,
                                               kColumns, v, e, nullptr)
          .store(work.u + t * kColumns);
      e.store(work.e + t * kColumns);
    }
    for (int64_t t = run.count; t-- > 0;) {
      const C* const k = run.k + t * run.keys;
      const C* const q = run.q + t * run.keys;
      const auto grad =
          columns.load(head_rows<T>(grad_o, head.s.row, head.s.begin + first + t, head.head) + c);
      auto du = columns.zero();
      for (int64_t d = 0; d < keys; ++d) {
        const auto row = columns.load(ds + d * values + c).plus(q[d], grad);
        row.store(ds + d * values + c);
        du = du.plus(k[d], row);
      }
      const auto u = columns.load(work.u + t * kColumns), e = columns.load(work.e + t * kColumns);
      auto de = du;
      if constexpr (kUpdate == StateUpdate::delta) {
        work.dbeta[t] += reduce_add(du.dot(e, Vec<C>(C(0))));
        de = du.times(run.beta[t]);
      }
      de.store(dv + head.offset(first + t, values) + c);
      step_gradients<kDecay, kUpdate>(run, t, keys, work, ds + c, values, grad, u, de);
    }
  });
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
