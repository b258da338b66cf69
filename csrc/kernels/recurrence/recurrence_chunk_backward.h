// Gradients of a chunk, with its rows and scores computed again (recurrence_chunk.h). From dO and
// the gradient dS' of the state after it:
//
//   dU = P^T dO + epsilon k dS'        X = dU by substitution X_j = dU_j - sum_(i>j) N_ij de_i
//   de = beta X    dbeta_i = E_i X_i    dv = de           (plain update: dv = dU, N = 0)
//   dP = tril(dO U^T . D)    dN = -stril(de U^T . D)
//   dq  =  gamma dO S^T + dP k        of k as a reader:  dk' = -gamma de S^T + dN k
//   of k as a writer:  dk'' = epsilon U dS'^T + dP^T q + dN^T k        dk = dk' + dk''
//   dS = gamma_n dS' + q^T (gamma dO) - k^T (gamma de)
//   dg_1 = <S, dS>    dg_(t+1) = dg_t - q_t dq_t - k_t (dk'_t - dk''_t)
#pragma once

#include "kernels/recurrence/recurrence_chunk.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
OMNIATTN_INLINE C dot(const C* x, const C* y, int64_t n) {
  return row_sum<C>(n, [&](int64_t i, auto part) { return part.load(x + i) * part.load(y + i); });
}

template <class C, StateUpdate kUpdate>
struct ChunkGradients {
  using X = Chunk<C, kUpdate>;

  C* ds;        // (K, V): dS' of the chunk, then dS
  C* out;       // (kRows n, V): de and dO of each step
  C* gamma;     // (kRows n, V): -gamma de and gamma dO
  C* du;        // (n, V): dU
  C* scores;    // (kRows n, n): dN and dP
  C* readers;   // (kRows n, K): dk' and dq
  C* writers;   // (n, K): dk''
  C* packed;    // a block of U^T, S^T or dS^T
  C *beta, *g;  // (n)

  ChunkGradients(const Recurrence& p, Parts& parts) {
    const int64_t ldk = padded(p.key_dim), ldv = padded(p.value_dim), rows = X::kRows * kChunk;
    ds = parts.take<C>(p.key_dim * ldv);
    out = parts.take<C>(rows * ldv);
    gamma = parts.take<C>(rows * ldv);
    du = parts.take<C>(kChunk * ldv);
    scores = parts.take<C>(rows * X::kLdc);
    readers = parts.take<C>(rows * ldk);
    writers = parts.take<C>(kChunk * ldk);
    packed = parts.take<C>(packed_elements<C>(p.value_dim, larger(p.key_dim, kBlock)));
    beta = parts.take<C>(kChunk);
    g = parts.take<C>(kChunk);
  }

  template <class T>
  void read(const X& x, const Head<T>& head, const HeadRows& grad_o, int64_t t) const {
    for (int64_t i = 0; i < x.n; ++i) {
      const T* const from = head_rows<T>(grad_o, head.s.row, head.s.begin + t + i, head.head);
      C* const to = X::of_q(out, i, x.ldv);
      C* const scaled = X::of_q(gamma, i, x.ldv);
      for_row<C>(x.values, [&](int64_t c, auto part) {
        const Vec<C> grad = part.load(from + c);
        store(to + c, grad);
        store(scaled + c, grad * x.gamma[i]);
      });
    }
  }

  void find_du(const X& x) const {
    gemm_tile<C>(x.kq, 2 * x.ldk, row_panels(ds, x.ldv), du, x.ldv, x.n, x.values, x.keys, false);
    for (int64_t i = 0; i < x.n; ++i) scale_row(du + i * x.ldv, x.epsilon[i], x.values);
    for (int64_t j = 0; j < x.n; j += kBlock) {
      gemm_tile<C, ALayout::kTransposed>(X::of_q(x.scores, j, X::kLdc) + j, X::kRows * X::kLdc,
                                         row_panels(X::of_q(out, j, x.ldv), X::kRows * x.ldv),
                                         du + j * x.ldv, x.ldv, smaller(kBlock, x.n - j), x.values,
                                         x.n - j, true);
    }
  }

  // de and dbeta, from the last step to the first.
  void solve(const X& x) const {
    for (int64_t i = 0; i < x.n; ++i) beta[i] = C(0);
    for_columns<C>(round_up(x.values, Vec<C>::kWidth),
                   [&]<class P, int kVecs>(int64_t c, P, Vecs<kVecs>) {
                     int64_t end = x.n;
                     for (; end >= 2; end -= 2) solve_rows<2, kVecs>(x, end, c);
                     if (end > 0) solve_rows<1, kVecs>(x, end, c);
                   });
  }
  // Steps end - 1 and, if kCount is 2, end - 2.
  template <int kCount, int kVecs>
  OMNIATTN_INLINE void solve_rows(const X& x, int64_t end, int64_t c) const {
    constexpr int kWidth = Vec<C>::kWidth;
    const int64_t ldv = x.ldv;
    Vec<C> sum[kCount][kVecs];
    const C* const factors = x.scores + end - 1;  // -N of a row and the column of the last step
#pragma GCC unroll 2
    for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sum[r][v] = load(du + (end - 1 - r) * ldv + c + v * kWidth);
    }
    for (int64_t i = end; i < x.n; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const Vec<C> de = load(out + 2 * i * ldv + c + v * kWidth);
#pragma GCC unroll 2
        for (int r = 0; r < kCount; ++r) {
          sum[r][v] = fma(Vec<C>(factors[2 * i * X::kLdc - r]), de, sum[r][v]);
        }
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < kCount; ++r) {
      const int64_t i = end - 1 - r;
      Vec<C> product(C(0));
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const int64_t at = 2 * i * ldv + c + v * kWidth;
        const Vec<C> de = sum[r][v] * x.beta[i];
        const auto inside = lanes_below<C>(x.values - c - v * kWidth);
        product += select(inside, sum[r][v] * load(x.rows + at), Vec<C>(C(0)));
        store(out + at, de);
        store(gamma + at, de * -x.gamma[i]);
        if (r + 1 < kCount) {
          sum[kCount - 1][v] = fma(Vec<C>(factors[2 * i * X::kLdc - 1]), de, sum[kCount - 1][v]);
        }
      }
      beta[i] += reduce_add(product);
    }
  }

  void find_keys(const X& x) const {
    const int64_t n = x.n, rows = X::kRows;
    x.lower_products(out, x.ldv, x.u, x.ldv, x.values, packed, scores);
    x.apply_decays(scores);
    pack_bt(x.state, x.ldv, x.values, x.keys, packed);
    gemm_tile<C>(gamma, x.ldv, packed_panels<C>(packed, x.values), readers, x.ldk, rows * n, x.keys,
                 x.values, false);
    pack_bt(ds, x.ldv, x.values, x.keys, packed);
    gemm_tile<C>(x.ue, x.ldv, packed_panels<C>(packed, x.values), writers, x.ldk, n, x.keys,
                 x.values, false);
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t count = smaller(kBlock, n - i);
      gemm_tile<C>(scores + rows * i * X::kLdc, X::kLdc, row_panels<C>(x.kq, 2 * x.ldk),
                   readers + rows * i * x.ldk, x.ldk, rows * count, x.keys, i + count, true);
      gemm_tile<C, ALayout::kTransposed>(scores + rows * i * X::kLdc + i, X::kLdc,
                                         row_panels(x.readers() + 2 * i * x.ldk, x.reader_stride()),
                                         writers + i * x.ldk, x.ldk, count, x.keys, rows * (n - i),
                                         true);
    }
  }

  void find_state(const X& x) const {
    for (int64_t d = 0; d < x.keys; ++d) scale_row(ds + d * x.ldv, x.gamma[x.n - 1], x.values);
    gemm_tile<C, ALayout::kTransposed>(x.readers(), x.reader_stride(), row_panels<C>(gamma, x.ldv),
                                       ds, x.ldv, x.keys, x.values, X::kRows * x.n, true);
  }

  // dg, and dk in place of dk''.
  void finish(const X& x, bool with_decay) const {
    C rest = C(0);
    for (int64_t d = 0; with_decay && d < x.keys; ++d) {
      rest += dot<C>(x.state + d * x.ldv, ds + d * x.ldv, x.values);
    }
    for (int64_t i = 0; i < x.n; ++i) {
      const C* const k = x.kq + 2 * i * x.ldk;
      const C* const dq = X::of_q(readers, i, x.ldk);
      C* const dk = writers + i * x.ldk;
      if (with_decay) {
        g[i] = rest;
        rest -= row_sum<C>(x.keys, [&](int64_t d, auto part) {
          Vec<C> as_key = -part.load(dk + d);
          if constexpr (X::kDelta) as_key += part.load(dq - x.ldk + d);
          return fma(part.load(k + d), as_key, part.load(k + x.ldk + d) * part.load(dq + d));
        });
      }
      if constexpr (X::kDelta) {
        for_row<C>(x.keys,
                   [&](int64_t d, auto) { store(dk + d, load(dk + d) + load(dq - x.ldk + d)); });
      }
    }
  }
};

// What the gradients of a chunk need of its forward, from the state at its start.
template <StateUpdate kUpdate, class T>
void repeat_chunk(Chunk<compute_t<T>, kUpdate>& x, const Head<T>& head, int64_t t, int64_t n) {
  using C = compute_t<T>;
  using X = Chunk<C, kUpdate>;
  x.read(head, t, n);
  x.find_scores();
  if constexpr (X::kDelta) {
    gemm_tile<C>(x.kq, 2 * x.ldk, row_panels(x.state, x.ldv), x.rows, 2 * x.ldv, n, x.values,
                 x.keys, false);
    x.subtract_from_values(head, t);
    x.solve();
  } else {
    x.copy_values(head, t);
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
