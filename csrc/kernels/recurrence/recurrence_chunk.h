// A chunk of tokens of one sequence and head: its rows in the accumulator type, and products of its
// small matrices. With e^G the product of the decays from the start of the chunk through a token:
//
//   probe_in = probe e^G, q_in = q e^G      rows that read the state at the chunk's start
//   k_out = k e^(G_C - G)                   rows that form the state at its end
//   N_ij = probe_i . D_ij k_j  (j < i),  P_ij = q_i . D_ij k_j  (j <= i)
//
// with D_ij = e^(G_i - G_j). The probe is the row with which an update reads the state: k of a
// delta update, a of a low-rank one. For rows that read the state before their own token, as a
// does, and q with a bonus, e^G_i is e^G_{i-1}; P_ii with a bonus is q_i . (bonus k_i). Outputs are
// scaled when they are stored, and their gradients when they are loaded.
//
// A stack holds the rows that belong to the probe, directly followed by those that belong to q. A
// stack of keys holds the rows of k, then those of b.
#pragma once

#include "kernels/recurrence/recurrence_rows.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Prefetches the rows of tokens of another chunk by ask(i), a few at a time between products. They
// are far apart in memory, and waiting for them took up to a fourth of the time; requested all at
// once, they wait for each other.
template <class F>
struct Ahead {
  F ask;
  int64_t asked = 0;

  OMNIATTN_INLINE void ask_until(int64_t end) {
    for (; asked < end; ++asked) ask(asked);
  }
};

template <class C>
struct Chunk {
  const Recurrence& p;
  const int64_t K, V;
  const bool delta;
  int64_t rows = 0;
  Matrix<const C> q, k, v, probe;  // k is a stack of keys; probe is k or a
  Matrix<C> probe_in, q_in;        // see above; [probe_in; q_in] is a stack
  Matrix<C> k_out;                 // stack of keys
  Matrix<C> N, P, N_b, P_b;        // N_b and P_b: with b in place of k
  Matrix<C> error;                 // the state's prediction, for a delta update minus v
  Matrix<const C> u;               // rows of updates: a stack of u for k, and c for b
  C* beta;                         // beta of values and sums; -1 for low-rank updates
  Matrix<C> updates;               // u, if it differs from v
  const C *bonus, *skip;           // of the current value head
  C* packed;                       // one matrix for products

  [[gnu::noinline]] Chunk(const Recurrence& params, Room<C>& room, int64_t packed_size)
      : p(params), K(p.key_width), V(p.value_width), delta(p.delta) {
    const int64_t size = recurrence_chunk(p), keys = low_rank() ? 2 * size : size;
    if (!keys_in_place()) loaded_k = room.rows(keys, K), loaded_q = room.rows(size, K);
    probe_in = q_in = room.rows(2 * size, K);
    k_out = room.rows(keys, K);
    const int64_t columns = recurrence_chunk(p.channel_decay);  // HeadDecay reads all of a row
    N = room.rows(size, columns);
    P = room.rows(size, columns);
    if (low_rank()) {
      loaded_probe = room.rows(size, K);
      N_b = room.rows(size, size);
      P_b = room.rows(size, size);
    }
    if (!in_place()) loaded_v = room.rows(keys, V);
    updates = delta || scales() ? room.rows(keys, V) : loaded_v;
    beta = room.take(size);
    packed = room.take(packed_size);
  }

  // Loads the tokens [t, t + n).
  [[gnu::noinline]] void load(int64_t batch, int64_t t, int64_t n, int64_t key_head) {
    rows = n;
    q_in = probe_in.at(n);
    probe = k = features_of(p.k, batch, t, key_head, loaded_k);
    if (low_rank()) {
      load_input(p.b, batch, t, key_head, K, loaded_k.at(n));
      probe = rows_of(p.a, batch, t, key_head, K, loaded_probe);
    }
    q = features_of(p.q, batch, t, key_head, loaded_q);
  }
  void load_input(const StepView& x, int64_t batch, int64_t t, int64_t head, int64_t width,
                  Matrix<C> to, C factor = 1) const {
    load_rows(p.dtype, row_of(p.dtype, x, batch, t, head), x.step, rows, width, to, factor);
  }
  // met = A S for `count` rows of A; meanwhile prefetches the remaining tokens.
  template <class F>
  void meet(Matrix<C> a, Matrix<C> state, Matrix<C> met, int64_t count, Ahead<F>& ahead) const {
    const int64_t asked = ahead.asked;
    for (int64_t i = 0; i < count; i += kStrip) {
      const int64_t m = smaller(kStrip, count - i);
      ahead.ask_until(asked + (i + m) * (rows - asked) / count);
      multiply(a.at(i), state, met.at(i), m, V, K, Into::set);
    }
  }
  // Loads the inputs of an update for one value head; u is v, or the memory for it.
  [[gnu::noinline]] void load_update(const RecurrenceSequence& s, int64_t t, int64_t head) {
    v = rows_of(p.v, s.batch, t, head, V, loaded_v);
    u = delta || scales() ? updates : v;
    const bool given = p.beta.data != nullptr;
    for (int64_t i = 0; given && i < rows; ++i) beta[i] = *row_of<C>(p.beta, s.batch, t + i, head);
    for (int64_t i = 0; !given && i < rows; ++i) beta[i] = low_rank() ? -1 : 1;
    bonus = head_row<const C>(p, p.bonus, s.index, head, K);
    skip = head_row<const C>(p, p.skip, s.index, head, V);
  }
  // True if a plain update has a beta.
  bool scales() const { return !delta && p.beta.data != nullptr; }
  // Multiplies rows of V by their beta.
  [[gnu::noinline]] void times_beta(Input<C> x, Matrix<C> to) const {
    for (int64_t i = 0; i < rows; ++i) convert_rows(x.row(i), 0, 1, V, to.row(i), 0, beta[i]);
  }

 private:
  Matrix<C> loaded_q, loaded_k, loaded_v, loaded_probe;  // inputs that are not read in place

  bool low_rank() const { return p.a.data != nullptr; }
  // Inputs of type C are read in place, which saves a tenth of the time of long sequences; not with
  // a second key, since keys and updates are stacks then.
  bool in_place() const { return size_of(p.dtype) == sizeof(C) && !low_rank(); }
  bool keys_in_place() const { return in_place() && p.features == FeatureMap::identity; }
  Matrix<const C> features_of(const StepView& x, int64_t batch, int64_t t, int64_t head,
                              Matrix<C> to) const {
    if (keys_in_place()) return rows_of(x, batch, t, head, K, to);
    load_input(x, batch, t, head, K, to);
    to_features(p.features, to, rows, K);
    return to;
  }
  Matrix<const C> rows_of(const StepView& x, int64_t batch, int64_t t, int64_t head, int64_t width,
                          Matrix<C> to) const {
    if (in_place()) return {row_of<C>(x, batch, t, head), x.step};
    load_input(x, batch, t, head, width, to);
    return to;
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
