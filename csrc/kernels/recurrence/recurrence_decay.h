// Applies a decay in a chunk: makes the decayed rows and the scores N and P of
// recurrence_chunk.h, decays a state over the whole chunk, and turns the gradients of products
// into those of the rows and of g. Every factor is a product of some w = exp(g), at most 1:
// nothing overflows, whatever the gates.
#pragma once

#include "kernels/recurrence/recurrence_chunk.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Gradients of a chunk that the backward passes to the decay. `scores` is the stack of the
// gradients of N and P without their decays, `scores_b` that of N_b and P_b. `met` is the stack
// of products of the gradients with the state at the start, `made` the product of u with the
// gradient of the state at the end. `carried` holds each row of that state times its gradient,
// if the gradient of g is wanted.
template <class C>
struct ChunkGradient {
  Matrix<C> scores, scores_b, met, made;
  C* carried;
  Matrix<C> dk, dq, da, db;  // added to, as is dbonus
  C* dbonus;
};

// Products over the tokens of a chunk of one decay for all channels, or of no decay. Places past
// the last token count as tokens without decay.
template <class C>
struct HeadFactors {
  static constexpr int64_t kSize = recurrence_chunk(false);
  // Number of vectors that cover the tokens of a chunk.
  static constexpr int kVectors = kSize / Vec<C>::kWidth;
  C *w, *in, *out;    // per token; products from the start, and to the end, of the chunk
  Matrix<C> between;  // D, 1 above the diagonal
  C end = 1;          // product over the whole chunk

  explicit HeadFactors(Room<C>& room) {
    w = room.take(kSize), in = room.take(kSize);
    between = room.rows(kSize, kSize);
    out = between.row(kSize - 1);
  }

  [[gnu::noinline]] void load(const Recurrence& p, int64_t batch, int64_t t, int64_t head,
                              int64_t count) {
    constexpr int kWidth = Vec<C>::kWidth;
    for (int64_t i = 0; i < kSize; ++i) {
      w[i] = i < count && p.g.data != nullptr ? *row_of<C>(p.g, batch, t + i, head) : C{0};
    }
    for (int64_t i = 0; i < kSize; i += kWidth) store(w + i, exp(OMNIATTN_ISA::load(w + i)));
    Vec<C> row[kVectors];
#pragma GCC unroll 16
    for (auto& x : row) x = Vec<C>(C{1});
    for (int64_t i = 0; i < kSize; ++i) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        row[v] = select(lanes_below<C>(i - v * kWidth), row[v] * w[i], Vec<C>(C{1}));
        store(between.row(i) + v * kWidth, row[v]);
      }
      in[i] = between.row(i)[0] * w[0];
    }
    end = in[kSize - 1];
  }
};

// One decay for all channels of a head, or none: it is factored out of the products of rows.
template <class C>
struct HeadDecay : HeadFactors<C> {
  using HeadFactors<C>::between, HeadFactors<C>::in, HeadFactors<C>::out, HeadFactors<C>::end;
  using HeadFactors<C>::kVectors, HeadFactors<C>::kSize;
  C *dg, *entering;    // per token, for the backward
  Matrix<C> products;  // rows of the probe, then of q, times the keys

  HeadDecay(const Recurrence&, Room<C>& room) : HeadFactors<C>(room) {
    dg = room.take(kSize), entering = room.take(kSize);
    products = room.rows(2 * kSize, kSize);
  }

  // Prefetches half of the tokens ahead. Heads that share keys share the products of rows.
  template <class F>
  void apply(Chunk<C>& c, int64_t batch, int64_t t, int64_t head, bool same_keys, Ahead<F>& ahead) {
    this->load(c.p, batch, t, head, c.rows);
    for (int64_t i = 0; i < c.rows; ++i) decay_rows(c, i);
    if (!same_keys) pack_columns(c.k, c.rows, c.K, c.packed);
    for_blocks(c.rows, [&](int64_t i, int64_t m) {
      ahead.ask_until((i + m) / 2);
      if (same_keys) return;
      if (c.delta) multiply_to_lower(c.k, c.packed, products, i, m, c.K);
      multiply_to_lower(c.q, c.packed, products.at(c.rows), i, m, c.K);
    });
    decay_scores(c, products, products.at(c.rows), c.N, c.P);
  }

  void decay_row(C* state, int64_t, int64_t width) const {
    if (end == 1) return;
    const Vec<C> factor(end);
    for_row<C>(width,
               [=](int64_t j, auto part) { part.store(state + j, part.load(state + j) * factor); });
  }
  void decay_column(C* z, int64_t rows) const { decay_row(z, 0, rows); }

  // The factor of token t is in all products from before t to t or later: of the state at the start
  // with a row from t on, of a key before t with the state at the end, and of such a key with a
  // query from t on. Their gradients are added directly. Differences of sums over all queries and
  // over all keys would need less work, but lose shares that are small compared to the others.
  void gradient(const Chunk<C>& c, const ChunkGradient<C>& d, C* grad, int64_t stride) {
    const int64_t n = c.rows;
    const Matrix<C> of_n = d.scores, of_p = d.scores.at(n);
    const Matrix<C> as_key = d.made, as_query = d.met, dq = d.met.at(n);
    if (grad != nullptr) across(c, of_n, of_p);
    decay_scores(c, of_n, of_p, of_n, of_p);
    C leaving = 0;
    for (int64_t i = 0; grad != nullptr && i < c.K; ++i) leaving += d.carried[i];
    const bool delta = c.delta;
    for (int64_t i = 0; i < n; ++i) {
      const C *const k = c.k.row(i), *const q = c.q.row(i);
      C *const of_q = dq.row(i), *const of_key = as_key.row(i), *const of_probe = as_query.row(i);
      const Vec<C> before(in[i]), after(out[i]);
      entering[i] = row_sum<C>(c.K, [=](int64_t j, auto part) {
        const Vec<C> query = part.load(of_q + j) * before;
        part.store(of_q + j, query);
        part.store(of_key + j, part.load(of_key + j) * after);
        Vec<C> sum = part.load(q + j) * query;
        if (delta) {
          const Vec<C> probe = part.load(of_probe + j) * before;
          part.store(of_probe + j, probe);
          sum = fma(part.load(k + j), probe, sum);
        }
        return sum;
      });
      dg[i] += leaving;
      if (grad != nullptr) leaving += dot(c.k.row(i), as_key.row(i), c.K);
    }
    C sum = 0;
    for (int64_t i = n; grad != nullptr && i-- > 0;)
      grad[i * stride] = dg[i] + (sum += entering[i]);
    multiply_lower(of_p, c.k, dq, n, c.K);
    multiply_lower_transposed(of_p, c.q, as_key, n, c.K, Into::add);
    if (c.delta) {
      multiply_lower(of_n, c.k, as_query, n, c.K);
      multiply_lower_transposed(of_n, c.k, as_key, n, c.K, Into::add);
    }
    for (int64_t i = 0; i < n; ++i) {
      const C *const of_q = dq.row(i), *const of_key = as_key.row(i);
      const C* const of_probe = as_query.row(i);
      C *const sum_k = d.dk.row(i), *const sum_q = d.dq.row(i);
      for_row<C>(c.K, [=](int64_t j, auto part) {
        Vec<C> key = part.load(of_key + j);
        if (delta) key += part.load(of_probe + j);
        part.store(sum_k + j, part.load(sum_k + j) + key);
        part.store(sum_q + j, part.load(sum_q + j) + part.load(of_q + j));
      });
    }
  }

 private:
  // Share of dg in the scores of queries from t on with keys before t: sums columns below row t.
  void across(const Chunk<C>& c, Matrix<C> of_n, Matrix<C> of_p) {
    Vec<C> columns[kVectors];
#pragma GCC unroll 16
    for (auto& column : columns) column = zero<C>();
    for (int64_t t = c.rows; t-- > 0;) {
      Vec<C> sum = zero<C>();
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const int64_t j = v * Vec<C>::kWidth;
        columns[v] = fma(load(of_p.row(t) + j), load(c.P.row(t) + j), columns[v]);
        if (c.delta) columns[v] = fma(load(of_n.row(t) + j), load(c.N.row(t) + j), columns[v]);
        sum += select(lanes_below<C>(t - j), columns[v], zero<C>());
      }
      dg[t] = reduce_add(sum);
    }
  }

  // Decays the rows of token i. Pointers are passed as values: members of a chunk would be read
  // again after each store, which left few of the inputs in flight.
  OMNIATTN_INLINE void decay_rows(const Chunk<C>& c, int64_t i) const {
    const C *const k = c.k.row(i), *const q = c.q.row(i);
    C *const probe_in = c.probe_in.row(i), *const q_in = c.q_in.row(i),
             *const k_out = c.k_out.row(i);
    const Vec<C> before(in[i]), after(out[i]);
    const int64_t width = c.K;
    if (c.delta) {
      for_row<C>(width, [=](int64_t d, auto part) {
        part.store(probe_in + d, part.load(k + d) * before);
      });
    }
    for_row<C>(width, [=](int64_t d, auto part) {
      part.store(q_in + d, part.load(q + d) * before);
      part.store(k_out + d, part.load(k + d) * after);
    });
  }

  // Scores times their decays; zeros above the diagonal, and for N also on the diagonal.
  void decay_scores(const Chunk<C>& c, Matrix<const C> from_n, Matrix<const C> from_p,
                    Matrix<C> of_n, Matrix<C> of_p) const {
    for (int64_t i = 0; i < c.rows; ++i) {
      const int64_t end_of_block = smaller(round_up(i + 1, kBlock), c.rows);
      for (int64_t j = 0; j < end_of_block; j += Vec<C>::kWidth) {
        const Vec<C> decay = load(between.row(i) + j);
        const auto times_decay = [&](const C* x, C* to, int64_t count) {
          store(to + j, select(lanes_below<C>(count - j), load(x + j) * decay, zero<C>()));
        };
        if (c.delta) times_decay(from_n.row(i), of_n.row(i), i);
        times_decay(from_p.row(i), of_p.row(i), i + 1);
      }
    }
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
