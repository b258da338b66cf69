// What a decay does in a chunk: it makes the decayed rows and the scores N and P of
// recurrence_chunk.h, decays a state over the whole chunk, and turns the gradients of products into
// those of k, q and g. Every factor is a product of some a = exp(g), at most 1: nothing overflows,
// whatever the gates.
#pragma once

#include "kernels/recurrence/recurrence_chunk.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// What the backward of a chunk knows when it comes to the decay. `scores` is the stack of the
// gradients of N and P without their decays, `met` that of the products of the gradients with the
// state at the start, `made` the product of u with the gradient of the state at the end; `carried`
// has for each row of that state its product with its gradient.
template <class C>
struct ChunkGradient {
  Matrix<C> scores, met, made;
  C* carried;
  Matrix<C> dk, dq;  // added to
};

// One decay for all channels of a head, or none: it is taken out of the products of rows.
template <class C>
struct HeadDecay {
  C *a, *in, *out;    // of each token; products from the start and to the end of the chunk
  C* sums;            // of each token, for the backward
  Matrix<C> between;  // D, zero above the diagonal
  C end = 1;          // over the whole chunk

  HeadDecay(const Recurrence& p, Room<C>& room) {
    const int64_t size = recurrence_chunk(p.channel_decay);
    a = room.take(size), in = room.take(size), out = room.take(size), sums = room.take(size);
    between = room.rows(size, size);
  }

  void apply(Chunk<C>& c, int64_t batch, int64_t t, int64_t head) {
    load_factors(c, batch, t, head);
    for (int64_t i = 0; i < c.rows; ++i) {
      for_row<C>(c.K, [&](int64_t d, auto part) {
        const Vec<C> k = part.load(c.k.row(i) + d), q = part.load(c.q.row(i) + d);
        if (c.delta) part.store(c.k_in.row(i) + d, k * in[i]);
        part.store(c.q_in.row(i) + d, q * in[i]);
        part.store(c.k_out.row(i) + d, k * out[i]);
      });
    }
    pack_bt(c.k.data, c.k.stride, c.K, c.rows, c.packed);
    if (c.delta) multiply_to_lower(c.k, c.packed, c.N, c.rows, c.K);
    multiply_to_lower(c.q, c.packed, c.P, c.rows, c.K);
    decay_scores(c, c.N, c.P);
  }

  void decay_row(C* state, int64_t, int64_t width) const {
    for_row<C>(width,
               [&](int64_t j, auto part) { part.store(state + j, part.load(state + j) * end); });
  }

  void gradient(const Chunk<C>& c, const ChunkGradient<C>& d, C* dg, int64_t stride) {
    const int64_t n = c.rows;
    const Matrix<C> of_n = d.scores, of_p = d.scores.at(n);
    const Matrix<C> as_key = d.made, as_query = d.met, dq = d.met.at(n);
    decay_scores(c, of_n, of_p);
    C sum = 0;
    for (int64_t i = 0; i < c.K; ++i) sum += d.carried[i];
    for (int64_t i = 0; i < n; ++i) {
      for_row<C>(c.K, [&](int64_t j, auto part) {
        if (c.delta) part.store(as_query.row(i) + j, part.load(as_query.row(i) + j) * in[i]);
        part.store(dq.row(i) + j, part.load(dq.row(i) + j) * in[i]);
        part.store(as_key.row(i) + j, part.load(as_key.row(i) + j) * out[i]);
      });
      sum += dot(c.k.row(i), as_key.row(i), c.K);
    }
    multiply_lower(of_p, c.k, dq, n, c.K);
    multiply_lower_transposed(of_p, c.q, as_key, n, c.K, Into::add);
    if (c.delta) {
      multiply_lower(of_n, c.k, as_query, n, c.K);
      multiply_lower_transposed(of_n, c.k, as_key, n, c.K, Into::add);
    }
    for (int64_t i = 0; i < n; ++i) {
      sums[i] = row_sum<C>(c.K, [&](int64_t j, auto part) {
        const Vec<C> key = part.load(as_key.row(i) + j), query = part.load(dq.row(i) + j);
        const Vec<C> both = c.delta ? part.load(as_query.row(i) + j) : zero<C>();
        part.store(d.dk.row(i) + j, part.load(d.dk.row(i) + j) + (key + both));
        part.store(d.dq.row(i) + j, part.load(d.dq.row(i) + j) + query);
        return fma(part.load(c.q.row(i) + j), query, part.load(c.k.row(i) + j) * (both - key));
      });
    }
    for (int64_t i = n; dg != nullptr && i-- > 0;) dg[i * stride] = sum += sums[i];
  }

 private:
  void load_factors(const Chunk<C>& c, int64_t batch, int64_t t, int64_t head) {
    constexpr int kWidth = Vec<C>::kWidth;
    const int64_t n = c.rows;
    for (int64_t i = 0; i < n; ++i) {
      a[i] = c.p.g.data != nullptr ? *row_of<C>(c.p.g, batch, t + i, head) : C{0};
    }
    for_row<C>(n, [&](int64_t i, auto part) { part.store(a + i, exp(part.load(a + i))); });
    end = 1;
    for (int64_t i = n; i-- > 0; end *= a[i]) out[i] = end;
    end = 1;
    for (int64_t i = 0; i < n; ++i) in[i] = end *= a[i];
    for (int64_t j = 0; j < n; j += kWidth) {
      Vec<C> row = zero<C>();
      for (int64_t i = 0; i < n; ++i) {
        row = select(lanes_below<C>(i - j), row * a[i],
                     select(lanes_below<C>(i + 1 - j), Vec<C>(C{1}), zero<C>()));
        store(between.row(i) + j, row);
      }
    }
  }

  // Scores times their decays; zeros above the diagonal, and for N on it.
  void decay_scores(const Chunk<C>& c, Matrix<C> of_n, Matrix<C> of_p) const {
    for (int64_t i = 0; i < c.rows; ++i) {
      const int64_t end_of_block = smaller(round_up(i + 1, kBlock), c.rows);
      for (int64_t j = 0; j < end_of_block; j += Vec<C>::kWidth) {
        const Vec<C> decay = load(between.row(i) + j);
        const auto times_decay = [&](C* x, int64_t count) {
          store(x + j, select(lanes_below<C>(count - j), load(x + j) * decay, zero<C>()));
        };
        if (c.delta) times_decay(of_n.row(i), i);
        times_decay(of_p.row(i), i + 1);
      }
    }
  }
};

// A decay for each channel, which stays inside of the products of rows: a chunk is one block, whose
// scores are sums over channels of running products.
template <class C>
struct ChannelDecay {
  Matrix<C> a, in, out;
  Matrix<C> running;  // decayed keys
  C* end;

  ChannelDecay(const Recurrence& p, Room<C>& room) {
    const int64_t size = recurrence_chunk(p.channel_decay);
    a = room.rows(size, p.key_width);
    in = room.rows(size, p.key_width);
    out = room.rows(size, p.key_width);
    running = room.rows(kKeys, p.key_width);
    end = room.take(p.key_width);
  }

  void apply(Chunk<C>& c, int64_t batch, int64_t t, int64_t head) {
    const int64_t n = c.rows;
    for_row<C>(c.K, [&](int64_t d, auto part) {
      Vec<C> product = Vec<C>(C{1});
      for (int64_t i = 0; i < n; ++i) {
        const Vec<C> factor = exp(part.load(row_of<C>(c.p.g, batch, t + i, head) + d));
        product *= factor;
        part.store(a.row(i) + d, factor);
        part.store(in.row(i) + d, product);
        if (c.delta) part.store(c.k_in.row(i) + d, part.load(c.k.row(i) + d) * product);
        part.store(c.q_in.row(i) + d, part.load(c.q.row(i) + d) * product);
      }
      part.store(end + d, product);
      product = Vec<C>(C{1});
      for (int64_t i = n; i-- > 0;) {
        part.store(out.row(i) + d, product);
        part.store(c.k_out.row(i) + d, part.load(c.k.row(i) + d) * product);
        product *= part.load(a.row(i) + d);
      }
    });
    zero_rows(c.N, n, n);
    zero_rows(c.P, n, n);
    for (int64_t j = 0; j < n; j += kKeys) scores_of_keys(c, j);
  }

  void decay_row(C* state, int64_t d, int64_t width) const {
    for_row<C>(width,
               [&](int64_t j, auto part) { part.store(state + j, part.load(state + j) * end[d]); });
  }

  void gradient(const Chunk<C>& c, const ChunkGradient<C>& g, C* dg, int64_t stride) {
    for_row<C>(c.K, [&](int64_t d, auto part) {
      const int64_t n = c.rows;
      Vec<C> sum = part.load(g.carried + d);
      for (int64_t i = 0; i < n; ++i) {
        sum = fma(part.load(g.made.row(i) + d), part.load(c.k_out.row(i) + d), sum);
      }
      for (int64_t i = n; i-- > 0;) {
        const Vec<C> k = part.load(c.k.row(i) + d), q = part.load(c.q.row(i) + d);
        const Vec<C> key = part.load(g.made.row(i) + d) * part.load(out.row(i) + d) +
                           sum_over_queries(c, g, i, d, part);
        const VecPair<Vec<C>> query = sum_over_keys(c, g, i, d, part);
        const Vec<C> entry = part.load(in.row(i) + d);
        const Vec<C> dq = fma(part.load(g.met.row(n + i) + d), entry, query.second);
        const Vec<C> both =
            c.delta ? fma(part.load(g.met.row(i) + d), entry, query.first) : zero<C>();
        part.store(g.dk.row(i) + d, part.load(g.dk.row(i) + d) + (key + both));
        part.store(g.dq.row(i) + d, part.load(g.dq.row(i) + d) + dq);
        sum = fma(q, dq, fma(k, both - key, sum));
        if (dg != nullptr) part.store(dg + i * stride + d, sum);
      }
    });
  }

 private:
  // Keys whose scores with k and with q of one row are a vector.
  static constexpr int kKeys = Vec<C>::kWidth / 2;

  // Column j .. j + kKeys of N and P.
  void scores_of_keys(const Chunk<C>& c, int64_t j) {
    const int64_t keys = smaller(kKeys, c.rows - j);
    copy_rows(c.k.row(j), c.k.stride, keys, c.K, running);
    for (int64_t x = keys; x < kKeys; ++x) zero_rows(running.at(x), 1, c.K);
    for (int64_t i = j; i < c.rows; ++i) {
      i < j + kKeys ? scores_of_row<true>(c, i, j) : scores_of_row<false>(c, i, j);
    }
  }

  template <bool kDiagonal>
  void scores_of_row(const Chunk<C>& c, int64_t i, int64_t j) {
    constexpr int kWidth = Vec<C>::kWidth;
    Vec<C> scores[kWidth];
#pragma GCC unroll 16
    for (auto& score : scores) score = zero<C>();
    for_row<C>(c.K, [&](int64_t d, auto part) {
      const Vec<C> decay = part.load(a.row(i) + d);
      const Vec<C> k = part.load(c.k.row(i) + d), q = part.load(c.q.row(i) + d);
#pragma GCC unroll 8
      for (int x = 0; x < kKeys; ++x) {
        Vec<C> key = part.load(running.row(x) + d);
        if (!kDiagonal || j + x < i) {
          key *= decay;
          part.store(running.row(x) + d, key);
        }
        scores[x] = fma(k, key, scores[x]);
        scores[kKeys + x] = fma(q, key, scores[kKeys + x]);
      }
    });
    transpose(scores);
    C sums[kWidth];
#pragma GCC unroll 16
    for (int x = 1; x < kWidth; ++x) scores[0] += scores[x];
    store(sums, scores[0]);
    for (int x = 0; x < kKeys && j + x <= i; ++x) {
      if (j + x < i) c.N.row(i)[j + x] = sums[x];
      c.P.row(i)[j + x] = sums[kKeys + x];
    }
  }

  // sum over j <= i of the gradients of N_ij and of P_ij times D_ij k_j, by Horner's rule.
  OMNIATTN_INLINE VecPair<Vec<C>> sum_over_keys(const Chunk<C>& c, const ChunkGradient<C>& g,
                                                int64_t i, int64_t d, auto part) const {
    Vec<C> of_n = zero<C>(), of_p = zero<C>();
    for (int64_t j = 0; j <= i; ++j) {
      const Vec<C> decay = part.load(a.row(j) + d), k = part.load(c.k.row(j) + d);
      if (c.delta && j < i) of_n = fma(of_n, decay, k * g.scores.row(i)[j]);
      if (c.delta && j == i) of_n = of_n * decay;
      of_p = fma(of_p, decay, k * g.scores.row(c.rows + i)[j]);
    }
    return {of_n, of_p};
  }

  // sum over i >= j of D_ij times the gradients of N_ij times k_i and of P_ij times q_i.
  OMNIATTN_INLINE Vec<C> sum_over_queries(const Chunk<C>& c, const ChunkGradient<C>& g, int64_t j,
                                          int64_t d, auto part) const {
    Vec<C> sum = zero<C>();
    for (int64_t i = c.rows - 1; i > j; --i) {
      sum = fma(part.load(c.q.row(i) + d), Vec<C>(g.scores.row(c.rows + i)[j]), sum);
      if (c.delta) sum = fma(part.load(c.k.row(i) + d), Vec<C>(g.scores.row(i)[j]), sum);
      sum *= part.load(a.row(i) + d);
    }
    return fma(part.load(c.q.row(j) + d), Vec<C>(g.scores.row(c.rows + j)[j]), sum);
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
