// A chunk of n steps as products of matrices. With D_ij = a_(j+1) .. a_i, gamma_i = a_1 .. a_i,
// epsilon_i = a_(i+1) .. a_n and the scale in q:
//
//   P = tril(q k^T . D)    N = stril(k k^T . D)
//   U = v, or by substitution U_i = beta_i E_i, E_i = v_i - gamma_i k_i S - sum_(j<i) N_ij U_j
//   O = gamma q S + P U    S' = gamma_n S + k^T (epsilon U)
//
// (Yang et al. 2024, "Parallelizing linear transformers with the delta rule".) Decays are products
// of a only, so that no factor exceeds 1 and gates of any strength reach 0.
#pragma once

#include "kernels/recurrence/recurrence_rows.h"
#include "runtime/gemm_tile.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int64_t kChunk = 32;
constexpr int64_t kBlock = 16;  // triangles are cut into blocks of this many rows

// Elements between rows of scratch: whole cache lines, and no power of two.
OMNIATTN_INLINE int64_t padded(int64_t n) { return round_up(n, 16) + 16; }

// Asks for rows that a later chunk reads, into L2. Rows of one head lie far apart, and waiting for
// them took 40 % of the time; asking for all of them at once does not help.
template <class S>
OMNIATTN_INLINE void prefetch_row(const S* row, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(S);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(row + i, 0, 2);
}
// c = a b as gemm_tile, with fetch(part, parts) from time to time.
template <class C, class F>
void product_with(const F& fetch, const C* a, int64_t lda, Panels<C> b, C* c, int64_t ldc,
                  int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kCols = kPanelCols<C>, kTall = 2 * tile_rows(kTileVecs);
  const int64_t parts = ceil_div(n, kCols) * ceil_div(m, kTall);
  int64_t part = 0;
  for (int64_t j = 0; j < n; j += kCols) {
    for (int64_t i = 0; i < m; i += kTall, ++part) {
      gemm_tile<C>(a + i * lda, lda, b.at(0, j), c + i * ldc + j, ldc, smaller(kTall, m - i),
                   smaller(kCols, n - j), k, false);
      fetch(part, parts);
    }
  }
}

template <class C>
OMNIATTN_INLINE void scale_row(C* row, C factor, int64_t n) {
  for_row<C>(n, [&](int64_t i, auto part) { part.store(row + i, part.load(row + i) * factor); });
}

template <class C, StateUpdate kUpdate>
struct Chunk {
  static constexpr bool kDelta = kUpdate == StateUpdate::delta;
  // Rows of one step, in this order: what k gives, for the delta update only, and what q gives.
  static constexpr int64_t kRows = kDelta ? 2 : 1;
  static constexpr int64_t kLdc = kChunk + 16;

  int64_t n = 0, keys, values, ldk, ldv;
  C* kq;                          // (2 n, K): k and q of each step
  C* scores;                      // (kRows n, n): -N and P of each step, zero above the diagonal
  C* decays;                      // (n, n): D, zero above the diagonal
  C* packed;                      // k^T of a block
  C* state;                       // (K, V): S
  C* rows;                        // (kRows n, V): E and O of each step
  C* u;                           // (n, V): U
  C* ue;                          // (n, V): epsilon U
  C *a, *gamma, *epsilon, *beta;  // (n)

  Chunk(const Recurrence& p, Parts& parts)
      : keys(p.key_dim),
        values(p.value_dim),
        ldk(padded(keys)),
        ldv(padded(values)),
        kq(parts.take<C>(2 * kChunk * ldk)),
        scores(parts.take<C>(kRows * kChunk * kLdc)),
        decays(parts.take<C>(kChunk * kLdc)),
        packed(parts.take<C>(packed_elements<C>(keys, kBlock))),
        state(parts.take<C>(keys * ldv)),
        rows(parts.take<C>(kRows * kChunk * ldv)),
        u(parts.take<C>(kChunk * ldv)),
        ue(parts.take<C>(kChunk * ldv)),
        a(parts.take<C>(kChunk)),
        gamma(parts.take<C>(kChunk)),
        epsilon(parts.take<C>(kChunk)),
        beta(parts.take<C>(kChunk)) {}

  // The rows of kq that meet S: k and q of each step, or q alone.
  const C* readers() const { return kDelta ? kq : kq + ldk; }
  int64_t reader_stride() const { return kDelta ? ldk : 2 * ldk; }
  // Row i of what q gives in a matrix with kRows rows for each step.
  static C* of_q(C* x, int64_t i, int64_t ld) { return x + (kRows * i + kRows - 1) * ld; }

  template <class T>
  void read(const Head<T>& head, int64_t t, int64_t count) {
    n = count;
    const C scale = static_cast<C>(head.p.scale);
    for (int64_t i = 0; i < n; ++i) {
      const T* const q_row = head.q(t + i);
      const T* const k_row = head.k(t + i);
      C* const to = kq + 2 * i * ldk;
      for_row<C>(keys, [&](int64_t d, auto part) {
        store(to + d, part.load(k_row + d));
        store(to + ldk + d, part.load(q_row + d) * scale);
      });
      if constexpr (kDelta) beta[i] = *head.beta(t + i);
      a[i] = head.p.decay == StateDecay::head ? *head.g(t + i) : C(0);
    }
    for_row<C>(n, [&](int64_t i, auto part) { part.store(a + i, exp(part.load(a + i))); });
    C product = C(1);
    for (int64_t i = 0; i < n; ++i) gamma[i] = product *= a[i];
    product = C(1);
    for (int64_t i = n; i-- > 0; product *= a[i]) epsilon[i] = product;
  }

  void find_decays() const {
    constexpr int kWidth = Vec<C>::kWidth;
    Vec<C> row[kChunk / kWidth];
    for (Vec<C>& x : row) x = Vec<C>(C(0));
    for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < kChunk / kWidth; ++j) {
        const Vec<C> lane = lane_index<C>() + static_cast<C>(j * kWidth);
        row[j] = select(lane == Vec<C>(static_cast<C>(i)), Vec<C>(C(1)), row[j] * a[i]);
        store(decays + i * kLdc + j * kWidth, row[j]);
      }
    }
  }

  // x, products of rows with keys or updates, times D, with the sign that N has in `scores`.
  void apply_decays(C* x) const {
    for (int64_t i = 0; i < n; ++i) {
      const C* const decay = decays + i * kLdc;
      C* const q_row = of_q(x, i, kLdc);
      const int64_t end = smaller(round_up(i + 1, kBlock), n);
      for_row<C>(end, [&](int64_t j, auto) {
        const Vec<C> d = load(decay + j);
        store(q_row + j, load(q_row + j) * d);
        if constexpr (kDelta) store(q_row - kLdc + j, load(q_row - kLdc + j) * -d);
      });
      if constexpr (kDelta) q_row[i - kLdc] = C(0);
    }
  }

  // to (kRows n, n) = tril(x y^T), in blocks, for x (kRows n, cols) and y (n, cols).
  void lower_products(const C* x, int64_t x_stride, const C* y, int64_t y_stride, int64_t cols,
                      C* memory, C* to) const {
    for (int64_t j = 0; j < n; j += kBlock) {
      const int64_t width = smaller(kBlock, n - j);
      pack_bt(y + j * y_stride, y_stride, cols, width, memory);
      gemm_tile<C>(x + kRows * j * x_stride, x_stride, packed_panels<C>(memory, cols),
                   to + kRows * j * kLdc + j, kLdc, kRows * (n - j), width, cols, false);
    }
  }

  void find_scores() const {
    find_decays();
    lower_products(readers(), reader_stride(), kq, 2 * ldk, keys, packed, scores);
    apply_decays(scores);
  }

  // U and epsilon U of the delta update from v - gamma k S in `rows`, which become E.
  void solve() const {
    for_columns<C>(round_up(values, Vec<C>::kWidth),
                   [&]<class P, int kVecs>(int64_t c, P, Vecs<kVecs>) {
                     int64_t i = 0;
                     for (; i + 2 <= n; i += 2) solve_rows<2, kVecs>(i, c);
                     if (i < n) solve_rows<1, kVecs>(i, c);
                   });
  }
  template <int kCount, int kVecs>
  OMNIATTN_INLINE void solve_rows(int64_t first, int64_t c) const {
    constexpr int kWidth = Vec<C>::kWidth;
    Vec<C> e[kCount][kVecs];
    C* const e_row = rows + first * 2 * ldv + c;
    const C* const factors = scores + first * 2 * kLdc;
#pragma GCC unroll 2
    for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) e[r][v] = load(e_row + r * 2 * ldv + v * kWidth);
    }
    for (int64_t j = 0; j < first; ++j) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const Vec<C> x = load(u + j * ldv + c + v * kWidth);
#pragma GCC unroll 2
        for (int r = 0; r < kCount; ++r) {
          e[r][v] = fma(Vec<C>(factors[r * 2 * kLdc + j]), x, e[r][v]);
        }
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < kCount; ++r) {
      const int64_t i = first + r;
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const Vec<C> x = e[r][v] * beta[i];
        store(e_row + r * 2 * ldv + v * kWidth, e[r][v]);
        store(u + i * ldv + c + v * kWidth, x);
        store(ue + i * ldv + c + v * kWidth, x * epsilon[i]);
        if (r + 1 < kCount) {
          e[kCount - 1][v] = fma(Vec<C>(factors[(kCount - 1) * 2 * kLdc + i]), x, e[kCount - 1][v]);
        }
      }
    }
  }

  // The plain update: U and epsilon U are v.
  template <class T>
  void copy_values(const Head<T>& head, int64_t t) const {
    for (int64_t i = 0; i < n; ++i) {
      const T* const v = head.v(t + i);
      for_row<C>(values, [&](int64_t c, auto part) {
        const Vec<C> x = part.load(v + c);
        store(u + i * ldv + c, x);
        store(ue + i * ldv + c, x * epsilon[i]);
      });
    }
  }

  // The delta update: v - gamma k S from k S.
  template <class T>
  void subtract_from_values(const Head<T>& head, int64_t t) const {
    for (int64_t i = 0; i < n; ++i) {
      const T* const v = head.v(t + i);
      C* const e = rows + 2 * i * ldv;
      for_row<C>(values, [&](int64_t c, auto part) {
        store(e + c, fma(load(e + c), Vec<C>(-gamma[i]), part.load(v + c)));
      });
    }
  }

  // x (K, V) = gamma_n x + k^T y for y (n, V).
  void add_outer(C* x, const C* y) const {
    for (int64_t d = 0; d < keys; ++d) scale_row(x + d * ldv, gamma[n - 1], values);
    gemm_tile<C, ALayout::kTransposed>(kq, 2 * ldk, row_panels(y, ldv), x, ldv, keys, values, n,
                                       true);
  }
};

// A state between rows of V and rows of scratch.
template <class C>
void copy_state(const C* from, int64_t from_row, C* to, int64_t to_row, int64_t keys,
                int64_t values) {
  for (int64_t d = 0; d < keys; ++d) {
    for_row<C>(values, [&](int64_t c, auto part) {
      part.store(to + d * to_row + c, part.load(from + d * from_row + c));
    });
  }
}

// Steps of a head that will be read next.
template <class T>
struct Upcoming {
  Head<T> head;
  int64_t t, n;

  // A share of their rows, for reading.
  void prefetch(int64_t part, int64_t parts) const {
    for (int64_t i = n * part / parts; i < n * (part + 1) / parts; ++i) {
      prefetch_row(head.q(t + i), head.p.key_dim);
      prefetch_row(head.k(t + i), head.p.key_dim);
      prefetch_row(head.v(t + i), head.p.value_dim);
    }
  }
};

// Steps [t, t + n): o, and the state of the chunk becomes the next one.
template <StateUpdate kUpdate, class T>
void forward_chunk(Chunk<compute_t<T>, kUpdate>& x, const Head<T>& head, int64_t t, int64_t n,
                   T* out, const Upcoming<T>& upcoming) {
  using C = compute_t<T>;
  using X = Chunk<C, kUpdate>;
  x.read(head, t, n);
  x.find_scores();
  const auto fetch = [&](int64_t part, int64_t parts) { upcoming.prefetch(part, parts); };
  product_with(fetch, x.readers(), x.reader_stride(), row_panels(x.state, x.ldv), x.rows, x.ldv,
               X::kRows * n, x.values, x.keys);
  for (int64_t i = 0; i < n; ++i) {
    scale_row(X::of_q(x.rows, i, x.ldv), x.gamma[i], x.values);
  }
  if constexpr (X::kDelta) {
    x.subtract_from_values(head, t);
    x.solve();
  } else {
    x.copy_values(head, t);
  }
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t end = smaller(i + kBlock, n);
    gemm_tile<C>(X::of_q(x.scores, i, X::kLdc), X::kRows * X::kLdc, row_panels(x.u, x.ldv),
                 X::of_q(x.rows, i, x.ldv), X::kRows * x.ldv, end - i, x.values, end, true);
  }
  for (int64_t i = 0; i < n; ++i) {
    T* const to = out + head.offset(t + i, x.values);
    const C* const o = X::of_q(x.rows, i, x.ldv);
    for_row<C>(x.values, [&](int64_t c, auto part) { part.store(to + c, part.load(o + c)); });
  }
  x.add_outer(x.state, x.ue);
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
