// As recurrence_decay.h, with a decay for each channel.
#pragma once

#include "kernels/recurrence/recurrence_decay.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// A decay for each channel, which stays inside of the products of rows: a chunk is one block, whose
// scores are sums over channels of running products.
template <class C, class Update>
struct ChannelDecay {
  static constexpr bool kProbe = Update::kProbe, kProbesBefore = Update::kProbesBefore;
  static constexpr bool kBonus = Update::kBonus, kTwoKeys = Update::kKeys == 2;
  Matrix<C> w, in, out;
  Matrix<C> running;  // decayed keys
  C* end;

  ChannelDecay(const Recurrence& p, Room<C>& room) {
    const int64_t size = recurrence_chunk(p.channel_decay);
    w = room.rows(size, p.key_width);
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
        const Vec<C> before = product;
        product *= factor;
        part.store(w.row(i) + d, factor);
        part.store(in.row(i) + d, product);
        if constexpr (kProbe) {
          const Vec<C> decay = kProbesBefore ? before : product;
          part.store(c.probe_in.row(i) + d, part.load(c.probe.row(i) + d) * decay);
        }
        part.store(c.q_in.row(i) + d, part.load(c.q.row(i) + d) * (kBonus ? before : product));
      }
      part.store(end + d, product);
      product = Vec<C>(C{1});
      for (int64_t i = n; i-- > 0;) {
        part.store(out.row(i) + d, product);
        part.store(c.k_out.row(i) + d, part.load(c.k.row(i) + d) * product);
        if constexpr (kTwoKeys) {
          part.store(c.k_out.row(n + i) + d, part.load(c.k.row(n + i) + d) * product);
        }
        product *= part.load(w.row(i) + d);
      }
    });
    scores(c, c.k, c.N, c.P);
    if constexpr (kTwoKeys) scores(c, c.k.at(n), c.N_b, c.P_b);
    for (int64_t i = 0; kBonus && i < n; ++i) {
      c.P.row(i)[i] = row_sum<C>(c.K, [&](int64_t d, auto part) {
        return part.load(c.q.row(i) + d) * part.load(c.bonus + d) * part.load(c.k.row(i) + d);
      });
    }
  }

  void decay_row(C* state, int64_t d, int64_t width) const {
    const Vec<C> factor(end[d]);
    for_row<C>(width,
               [=](int64_t j, auto part) { part.store(state + j, part.load(state + j) * factor); });
  }

  // As in HeadDecay, the gradient of a factor is a sum over the products that it is in, without
  // differences: `entering` of the state at the start with what reads it later, `leaving` of
  // earlier keys with the state at the end, `shares` of earlier keys with what reads them in this
  // chunk. What reads the state before its own token's decay has no share in that one.
  void gradient(const Chunk<C>& c, const ChunkGradient<C>& g, C* dg, int64_t stride) {
    const int64_t n = c.rows;
    for_row<C>(c.K, [&](int64_t d, auto part) {
      const auto at = [&](Matrix<const C> x, int64_t i) { return part.load(x.row(i) + d); };
      const auto add = [&](Matrix<C> x, int64_t i, Vec<C> y) {
        part.store(x.row(i) + d, at(x, i) + y);
      };
      Vec<C> shares[recurrence_chunk(true)], entering = zero<C>(), dbonus = zero<C>();
      for (Vec<C>& share : shares) share = zero<C>();
      for (int64_t i = n; i-- > 0;) {
        const Vec<C> k = at(c.k, i), q = at(c.q, i), entry = at(in, i);
        const Vec<C> before = i > 0 ? at(in, i - 1) : Vec<C>(C{1});
        const VecPair<Vec<C>> key = sum_over_queries(c, g, i, d, part, shares);
        const VecPair<Vec<C>> query = sum_over_keys(c, g, i, d, part);
        Vec<C> dk = fma(at(g.made, i), at(out, i), key.first);
        const Vec<C> met_q = at(g.met, n + i) * (kBonus ? before : entry);
        Vec<C> dq = met_q + query.second, met_probe = zero<C>();
        if constexpr (kProbe) {
          met_probe = at(g.met, i) * (kProbesBefore ? before : entry);
          if constexpr (!kProbesBefore) {
            entering = fma(at(c.probe, i), met_probe, entering);
            dk += met_probe + query.first;
          }
        }
        if constexpr (kTwoKeys) {
          add(g.db, i, fma(at(g.made, n + i), at(out, i), key.second));
        }
        if constexpr (!kBonus) entering = fma(q, met_q, entering);
        shares[i] += entering;
        if constexpr (kProbesBefore) {
          entering = fma(at(c.probe, i), met_probe, entering);
          add(g.da, i, met_probe + query.first);
        }
        if constexpr (kBonus) {
          entering = fma(q, met_q, entering);
          const Vec<C> share = g.scores.row(n + i)[i], bonus = part.load(c.bonus + d);
          dq = fma(share * k, bonus, dq);
          dk = fma(share * q, bonus, dk);
          dbonus = fma(share * q, k, dbonus);
        }
        add(g.dk, i, dk);
        add(g.dq, i, dq);
      }
      Vec<C> leaving = part.load(g.carried + d);
      for (int64_t t = 0; dg != nullptr && t < n; ++t) {
        part.store(dg + t * stride + d, shares[t] + leaving);
        for (int64_t i = t; i < n * Update::kKeys; i += n) {
          leaving = fma(at(g.made, i), at(c.k_out, i), leaving);
        }
      }
      if (kBonus && g.dbonus != nullptr) part.store(g.dbonus + d, part.load(g.dbonus + d) + dbonus);
    });
  }

 private:
  // Keys whose scores with the probe and with q of one row are a vector.
  static constexpr int kReaders = kProbe ? 2 : 1;
  static constexpr int kKeys = Vec<C>::kWidth / kReaders;

  void scores(const Chunk<C>& c, Matrix<const C> keys, Matrix<C> N, Matrix<C> P) {
    if constexpr (kProbe) zero_rows(N, c.rows, c.rows);
    zero_rows(P, c.rows, c.rows);
    for (int64_t j = 0; j < c.rows; j += kKeys) scores_of_keys(c, keys, N, P, j);
  }

  // Column j .. j + kKeys of N and P.
  void scores_of_keys(const Chunk<C>& c, Matrix<const C> keys, Matrix<C> N, Matrix<C> P,
                      int64_t j) {
    const int64_t count = smaller(kKeys, c.rows - j);
    copy_rows(keys.row(j), keys.stride, count, c.K, running);
    for (int64_t x = count; x < kKeys; ++x) zero_rows(running.at(x), 1, c.K);
    for (int64_t i = j; i < c.rows; ++i) {
      i < j + kKeys ? scores_of_row<true>(c, N, P, i, j) : scores_of_row<false>(c, N, P, i, j);
    }
  }

  template <bool kDiagonal>
  void scores_of_row(const Chunk<C>& c, Matrix<C> N, Matrix<C> P, int64_t i, int64_t j) {
    constexpr int kWidth = Vec<C>::kWidth, kQuery = kWidth - kKeys;
    Vec<C> scores[kWidth];
#pragma GCC unroll 16
    for (auto& score : scores) score = zero<C>();
    const C *const decays = w.row(i), *const query = c.q.row(i);
    const C* const probes = kProbe ? c.probe.row(i) : nullptr;
    const Matrix<C> keys = running;
    for_row<C>(c.K, [&](int64_t d, auto part) {
      const Vec<C> decay = part.load(decays + d), q = part.load(query + d);
      Vec<C> probe = zero<C>();
      if constexpr (kProbe) probe = part.load(probes + d);
#pragma GCC unroll 16
      for (int x = 0; x < kKeys; ++x) {
        Vec<C> key = part.load(keys.row(x) + d);
        if constexpr (kProbesBefore) scores[x] = fma(probe, key, scores[x]);
        if constexpr (kBonus) scores[kQuery + x] = fma(q, key, scores[kQuery + x]);
        if (!kDiagonal || j + x < i) {
          key *= decay;
          part.store(keys.row(x) + d, key);
        }
        if constexpr (kProbe && !kProbesBefore) scores[x] = fma(probe, key, scores[x]);
        if constexpr (!kBonus) scores[kQuery + x] = fma(q, key, scores[kQuery + x]);
      }
    });
    transpose(scores);
    C sums[kWidth];
#pragma GCC unroll 16
    for (int x = 1; x < kWidth; ++x) scores[0] += scores[x];
    store(sums, scores[0]);
    for (int x = 0; x < kKeys && j + x <= i; ++x) {
      if (kProbe && j + x < i) N.row(i)[j + x] = sums[x];
      P.row(i)[j + x] = sums[kQuery + x];
    }
  }

  // Of row i, sum over keys j of D_ij k_j times the gradients of N_ij and of P_ij, by Horner's
  // rule.
  OMNIATTN_INLINE VecPair<Vec<C>> sum_over_keys(const Chunk<C>& c, const ChunkGradient<C>& g,
                                                int64_t i, int64_t d, auto part) const {
    const int64_t n = c.rows;
    Vec<C> of_n = zero<C>(), of_p = zero<C>();
    for (int64_t j = 0; j <= i; ++j) {
      const Vec<C> decay = part.load(w.row(j) + d), k = part.load(c.k.row(j) + d);
      if (kProbe && (j < i || !kProbesBefore)) of_n *= decay;
      if (kProbe && j < i) of_n = fma(k, Vec<C>(g.scores.row(i)[j]), of_n);
      if (j < i || !kBonus) of_p = fma(of_p, decay, k * g.scores.row(n + i)[j]);
      if constexpr (kTwoKeys) {
        const Vec<C> b = part.load(c.k.row(n + j) + d);
        if (j < i) of_n = fma(b, Vec<C>(g.scores_b.row(i)[j]), of_n);
        of_p = fma(b, Vec<C>(g.scores_b.row(n + i)[j]), of_p);
      }
    }
    return {of_n, of_p};
  }

  // Of k_j and of b_j, sum over rows i of D_ij times the gradients of N_ij times the probe and of
  // P_ij times q_i; without P_jj of a bonus. The gradients of the decays between are added to
  // `shares`: each is in the products of the keys, decayed up to it, with the sum from it on.
  OMNIATTN_INLINE VecPair<Vec<C>> sum_over_queries(const Chunk<C>& c, const ChunkGradient<C>& g,
                                                   int64_t j, int64_t d, auto part,
                                                   Vec<C>* shares) const {
    const int64_t n = c.rows;
    Vec<C> decayed[recurrence_chunk(true)];  // D from j to before each row
    Vec<C> product(C{1});
    for (int64_t i = j + 1; i < n; ++i) {
      decayed[i] = product;
      product *= part.load(w.row(i) + d);
    }
    const Vec<C> k = part.load(c.k.row(j) + d);
    Vec<C> b = zero<C>();
    if constexpr (kTwoKeys) b = part.load(c.k.row(n + j) + d);
    Vec<C> of_k = zero<C>(), of_b = zero<C>();
    const auto read = [&](Matrix<const C> rows, int64_t i, int64_t score) {
      const Vec<C> x = part.load(rows.row(i) + d);
      of_k = fma(x, Vec<C>(g.scores.row(score)[j]), of_k);
      if constexpr (kTwoKeys) of_b = fma(x, Vec<C>(g.scores_b.row(score)[j]), of_b);
    };
    for (int64_t i = n - 1; i > j; --i) {
      if constexpr (!kBonus) read(c.q, i, n + i);
      if constexpr (kProbe && !kProbesBefore) read(c.probe, i, i);
      const Vec<C> decay = part.load(w.row(i) + d);
      of_k *= decay;
      if constexpr (kTwoKeys) of_b *= decay;
      Vec<C> share = k * of_k;
      if constexpr (kTwoKeys) share = fma(b, of_b, share);
      shares[i] = fma(decayed[i], share, shares[i]);
      if constexpr (kProbesBefore) read(c.probe, i, i);
      if constexpr (kBonus) read(c.q, i, n + i);
    }
    if constexpr (!kBonus) read(c.q, j, n + j);
    return {of_k, of_b};
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
