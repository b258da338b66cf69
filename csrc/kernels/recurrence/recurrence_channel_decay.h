// A decay for each channel, with the interface of recurrence_decay.h.
#pragma once

#include "kernels/recurrence/recurrence_decay.h"
#include "runtime/lane_sums.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Rows of a chunk that read decayed keys.
template <class C>
struct Readers {
  int64_t rows, width;
  Matrix<const C> q, probe;
};

// Products of readers and keys over tokens, with the decays w of their channels in between.
template <class C, class Update>
struct DecayedProducts {
  static constexpr bool kProbe = Update::kProbe, kProbesBefore = Update::kProbesBefore;
  static constexpr bool kBonus = Update::kBonus;
  Matrix<C> w;
  // For the backward, sums within the chunk: gradients of the stack [probe; q], and the shares of
  // w_i's gradient in products of keys before row i with rows from i on.
  Matrix<C> of_readers, shares;

  DecayedProducts(Room<C>& room, int64_t size, int64_t width) {
    w = room.rows(size, width);
    of_readers = room.rows(2 * size, width);
    shares = room.rows(size, width);
  }

  template <class F>
  void scores(const Readers<C>& c, Matrix<const C> keys, Matrix<C> N, Matrix<C> P,
              Ahead<F>& ahead) const {
    if constexpr (kProbe) zero_rows(N, c.rows, c.rows);
    zero_rows(P, c.rows, c.rows);
    for (int64_t j = 0; j < c.rows; j += kKeys) {
      ahead.ask_until(smaller(j + kKeys, c.rows) / 2);
      for_channels(c.width, [&]<int kCount>(int64_t d, auto part) {
        scores_of_keys<kCount>(c, keys, N, P, j, d, part);
      });
    }
  }
  // To be called before the first within_chunk.
  void clear_sums(const Readers<C>& c) const {
    zero_rows(of_readers, 2 * c.rows, c.width);
    zero_rows(shares, c.rows, c.width);
  }
  // Computes the sums of a gradient for one stack of keys, from the gradients of their scores,
  // without P_jj of a bonus. of_n is read if there is a probe.
  void within_chunk(const Readers<C>& c, Matrix<const C> keys, Matrix<const C> of_n,
                    Matrix<const C> of_p, Matrix<C> sums) const {
    for (int64_t j = 0; j < c.rows; j += kKeys) {
      for_channels(c.width, [&]<int kCount>(int64_t d, auto part) {
        within_chunk_of_keys<kCount>(c, keys, of_n, of_p, sums, j, d, part);
      });
    }
  }

 private:
  // Number of keys, and of vectors of their channels, kept in registers while they decay by row.
  static constexpr int kKeys = kTileAccumulators >= 16 ? 4 : 1, kVecs = kKeys == 4 ? 4 : 8;

  // Calls f.operator()<kCount>(d, part) for all channels, kCount vectors from d on.
  template <class F>
  OMNIATTN_INLINE static void for_channels(int64_t channels, const F& f) {
    constexpr int64_t kChannels = kVecs * Vec<C>::kWidth;
    int64_t d = 0;
    for (; d + kChannels <= channels; d += kChannels) f.template operator()<kVecs>(d, Whole{});
    for_row<C>(channels - d,
               [&](int64_t rest, auto part) { f.template operator()<1>(d + rest, part); });
  }
  // Calls f.operator()<kStarted>(i) for rows i from j on; kStarted keys have started before row i.
  template <class F>
  OMNIATTN_INLINE static void for_rows_from(int64_t j, int64_t rows, const F& f) {
    [&]<int... kStarted>(std::integer_sequence<int, kStarted...>) OMNIATTN_LAMBDA {
      ((j + kStarted < rows ? f.template operator()<kStarted>(j + kStarted) : void()), ...);
    }(std::make_integer_sequence<int, kKeys>{});
    for (int64_t i = j + kKeys; i < rows; ++i) f.template operator()<kKeys>(i);
  }
  // for_rows_from in reverse order.
  template <class F>
  OMNIATTN_INLINE static void for_rows_down_to(int64_t j, int64_t rows, const F& f) {
    for (int64_t i = rows; i-- > j + kKeys;) f.template operator()<kKeys>(i);
    [&]<int... kAfter>(std::integer_sequence<int, kAfter...>) OMNIATTN_LAMBDA {
      ((j + kKeys - 1 - kAfter < rows
            ? f.template operator()<kKeys - 1 - kAfter>(j + kKeys - 1 - kAfter)
            : void()),
       ...);
    }(std::make_integer_sequence<int, kKeys>{});
  }
  template <int kCount>
  OMNIATTN_INLINE static void clear(Vec<C> (&keys)[kKeys][kCount]) {
#pragma GCC unroll 4
    for (auto& key : keys) {
#pragma GCC unroll 8
      for (Vec<C>& x : key) x = zero<C>();
    }
  }

  // Adds the share of kCount vectors of channels from d on to columns [j, j + kKeys) of N and P.
  template <int kCount>
  [[gnu::noinline]] void scores_of_keys(const Readers<C>& c, Matrix<const C> keys, Matrix<C> N,
                                        Matrix<C> P, int64_t j, int64_t d, auto part) const {
    Vec<C> running[kKeys][kCount];
    clear(running);
    const Matrix<const C> decays = w, probes = c.probe, queries = c.q;
    for_rows_from(j, c.rows, [&]<int kStarted>(int64_t i) OMNIATTN_LAMBDA {
      Vec<C> of_probe[kKeys], of_query[kKeys];
#pragma GCC unroll 4
      for (int x = 0; x < kKeys; ++x) of_probe[x] = of_query[x] = zero<C>();
#pragma GCC unroll 8
      for (int z = 0; z < kCount; ++z) {
        const auto at = [&](Matrix<const C> m) OMNIATTN_LAMBDA {
          return part.load(m.row(i) + d + z * Vec<C>::kWidth);
        };
        const Vec<C> decay = at(decays), query = at(queries);
        Vec<C> probe = zero<C>();
        if constexpr (kProbe) probe = at(probes);
#pragma GCC unroll 4
        for (int x = 0; x < kStarted; ++x) {
          Vec<C>& key = running[x][z];
          if constexpr (kProbesBefore) of_probe[x] = fma(probe, key, of_probe[x]);
          if constexpr (kBonus) of_query[x] = fma(query, key, of_query[x]);
          key *= decay;
          if constexpr (kProbe && !kProbesBefore) of_probe[x] = fma(probe, key, of_probe[x]);
          if constexpr (!kBonus) of_query[x] = fma(query, key, of_query[x]);
        }
        if constexpr (kStarted < kKeys) {
          running[kStarted][z] = at(keys);
          if constexpr (!kBonus) {
            of_query[kStarted] = fma(query, running[kStarted][z], of_query[kStarted]);
          }
        }
      }
      if constexpr (kProbe) add_sums(N.row(i) + j, of_probe);
      add_sums(P.row(i) + j, of_query);
    });
  }

  OMNIATTN_INLINE static void add_sums(C* p, const Vec<C> (&x)[kKeys]) {
    C sums[kKeys];
    if constexpr (kKeys == 4) {
      store_sums(sums, x);
    } else {
      sums[0] = reduce_add(x[0]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) p[i] += sums[i];
  }

  // Sweeps keys [j, j + kKeys) forward, adding decayed keys to the readers' gradients; then back,
  // accumulating the keys' gradients, which decay likewise. The products of both are the shares.
  template <int kCount>
  [[gnu::noinline]] void within_chunk_of_keys(const Readers<C>& c, Matrix<const C> keys,
                                              Matrix<const C> of_n, Matrix<const C> of_p,
                                              Matrix<C> sums, int64_t j, int64_t d,
                                              auto part) const {
    constexpr int kWidth = Vec<C>::kWidth;
    const int64_t n = c.rows;
    const Matrix<const C> decays = w, probes = c.probe, queries = c.q;
    const Matrix<C> of_probes = of_readers, of_queries = of_readers.at(n), of_decays = shares;
    const auto place = [&](auto m, int64_t i, int z)
                           OMNIATTN_LAMBDA { return m.row(i) + d + z * kWidth; };
    Vec<C> met[recurrence_chunk(true)][kKeys][kCount];  // keys, decayed up to before row j + i
    Vec<C> x[kKeys][kCount];
    clear(x);
    for_rows_from(j, n, [&]<int kStarted>(int64_t i) OMNIATTN_LAMBDA {
      const C *const dn = of_n.row(i) + j, *const dp = of_p.row(i) + j;
#pragma GCC unroll 8
      for (int z = 0; z < kCount; ++z) {
        const Vec<C> decay = part.load(place(decays, i, z));
        Vec<C> query = part.load(place(of_queries, i, z)), probe = zero<C>();
        if constexpr (kProbe) probe = part.load(place(of_probes, i, z));
#pragma GCC unroll 4
        for (int r = 0; r < kStarted; ++r) {
          Vec<C>& key = x[r][z];
          met[i - j][r][z] = key;
          if constexpr (kProbesBefore) probe = fma(key, Vec<C>(dn[r]), probe);
          if constexpr (kBonus) query = fma(key, Vec<C>(dp[r]), query);
          key *= decay;
          if constexpr (kProbe && !kProbesBefore) probe = fma(key, Vec<C>(dn[r]), probe);
          if constexpr (!kBonus) query = fma(key, Vec<C>(dp[r]), query);
        }
        if constexpr (kStarted < kKeys) {
          x[kStarted][z] = part.load(place(keys, i, z));
          if constexpr (!kBonus) query = fma(x[kStarted][z], Vec<C>(dp[kStarted]), query);
        }
        part.store(place(of_queries, i, z), query);
        if constexpr (kProbe) part.store(place(of_probes, i, z), probe);
      }
    });
    clear(x);
    for_rows_down_to(j, n, [&]<int kStarted>(int64_t i) OMNIATTN_LAMBDA {
      const C *const dn = of_n.row(i) + j, *const dp = of_p.row(i) + j;
#pragma GCC unroll 8
      for (int z = 0; z < kCount; ++z) {
        const Vec<C> decay = part.load(place(decays, i, z)), q = part.load(place(queries, i, z));
        Vec<C> probe = zero<C>(), share = part.load(place(of_decays, i, z));
        if constexpr (kProbe) probe = part.load(place(probes, i, z));
#pragma GCC unroll 4
        for (int r = 0; r < kStarted; ++r) {
          Vec<C>& sum = x[r][z];
          if constexpr (!kBonus) sum = fma(q, Vec<C>(dp[r]), sum);
          if constexpr (kProbe && !kProbesBefore) sum = fma(probe, Vec<C>(dn[r]), sum);
          sum *= decay;
          share = fma(met[i - j][r][z], sum, share);
          if constexpr (kProbesBefore) sum = fma(probe, Vec<C>(dn[r]), sum);
          if constexpr (kBonus) sum = fma(q, Vec<C>(dp[r]), sum);
        }
        if constexpr (kStarted < kKeys) {
          if constexpr (!kBonus) x[kStarted][z] = fma(q, Vec<C>(dp[kStarted]), x[kStarted][z]);
          part.store(place(sums, i, z), x[kStarted][z]);
        }
        if constexpr (kStarted > 0) part.store(place(of_decays, i, z), share);
      }
    });
  }
};

// A decay per channel stays inside the products of rows: a chunk is one block, whose scores are
// sums over channels of running products.
template <class C, class Update>
struct ChannelDecay : DecayedProducts<C, Update> {
  using Products = DecayedProducts<C, Update>;
  using Products::w, Products::of_readers, Products::shares;
  static constexpr bool kProbe = Update::kProbe, kProbesBefore = Update::kProbesBefore;
  static constexpr bool kBonus = Update::kBonus, kTwoKeys = Update::kKeys == 2;
  Matrix<C> in, out;
  C* end;
  Matrix<C> of_keys;  // for the backward: gradients of keys within the chunk

  ChannelDecay(const Recurrence& p, Room<C>& room)
      : Products(room, recurrence_chunk(p), p.key_width) {
    const int64_t size = recurrence_chunk(p);
    in = room.rows(size, p.key_width);
    out = room.rows(size, p.key_width);
    end = room.take(p.key_width);
    of_keys = room.rows(Update::kKeys * size, p.key_width);
  }

  template <class F>
  void apply(Chunk<C>& c, int64_t batch, int64_t t, int64_t head, bool, Ahead<F>& ahead) {
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
    const Readers<C> readers = readers_of(c);
    this->scores(readers, c.k, c.N, c.P, ahead);
    if constexpr (kTwoKeys) this->scores(readers, c.k.at(n), c.N_b, c.P_b, ahead);
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
  void decay_column(C* z, int64_t rows) const {
    for_row<C>(rows, [=, this](int64_t d, auto part) {
      part.store(z + d, part.load(z + d) * part.load(end + d));
    });
  }

  // As in HeadDecay, the gradient of a factor is summed over the products that contain it, without
  // differences: `entering` for the state at the start with its later readers, `leaving` for
  // earlier keys with the state at the end, `shares` for earlier keys with their readers in this
  // chunk. A row that reads the state before its own token's decay has no share in that decay.
  void gradient(const Chunk<C>& c, const ChunkGradient<C>& g, C* dg, int64_t stride) {
    const int64_t n = c.rows;
    const Readers<C> readers = readers_of(c);
    this->clear_sums(readers);
    this->within_chunk(readers, c.k, g.scores, g.scores.at(n), of_keys);
    if constexpr (kTwoKeys) {
      this->within_chunk(readers, c.k.at(n), g.scores_b, g.scores_b.at(n), of_keys.at(n));
    }
    for_row<C>(c.K, [&](int64_t d, auto part) {
      const auto at = [&](Matrix<const C> x, int64_t i) { return part.load(x.row(i) + d); };
      const auto add = [&](Matrix<C> x, int64_t i, Vec<C> y) {
        part.store(x.row(i) + d, at(x, i) + y);
      };
      Vec<C> entering = zero<C>(), dbonus = zero<C>();
      for (int64_t i = n; i-- > 0;) {
        const Vec<C> k = at(c.k, i), q = at(c.q, i), entry = at(in, i);
        const Vec<C> before = i > 0 ? at(in, i - 1) : Vec<C>(C{1});
        Vec<C> dk = fma(at(g.made, i), at(out, i), at(of_keys, i));
        const Vec<C> met_q = at(g.met, n + i) * (kBonus ? before : entry);
        Vec<C> dq = met_q + at(of_readers, n + i), met_probe = zero<C>();
        if constexpr (kProbe) {
          met_probe = at(g.met, i) * (kProbesBefore ? before : entry);
          if constexpr (!kProbesBefore) {
            entering = fma(at(c.probe, i), met_probe, entering);
            dk += met_probe + at(of_readers, i);
          }
        }
        if constexpr (kTwoKeys) {
          add(g.db, i, fma(at(g.made, n + i), at(out, i), at(of_keys, n + i)));
        }
        if constexpr (!kBonus) entering = fma(q, met_q, entering);
        add(shares, i, entering);
        if constexpr (kProbesBefore) {
          entering = fma(at(c.probe, i), met_probe, entering);
          add(g.da, i, met_probe + at(of_readers, i));
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
        add(shares, t, leaving);
        for (int64_t i = t; i < n * Update::kKeys; i += n) {
          leaving = fma(at(g.made, i), at(c.k_out, i), leaving);
        }
      }
      if (kBonus && g.dbonus != nullptr) part.store(g.dbonus + d, part.load(g.dbonus + d) + dbonus);
    });
    if (dg != nullptr) {
      stream_rows(kComputed<C>, shares, n, c.K, reinterpret_cast<char*>(dg), stride);
    }
  }

 private:
  static Readers<C> readers_of(const Chunk<C>& c) { return {c.rows, c.K, c.q, c.probe}; }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
