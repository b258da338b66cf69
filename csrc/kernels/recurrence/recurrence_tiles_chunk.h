// A chunk of one sequence and head on tiles, with one decay for all channels or none. Decays are
// factors of rows of products, so q, k and v are multiplied without conversion.
#pragma once

#include "kernels/recurrence/recurrence_tiles.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Rows of a chunk in a tensor; zeros past the last token and the last column. Passed by value, so
// that its sizes are read once rather than after each store.
template <class T = bf16>
struct TokenRows {
  const T* data;
  int64_t stride, count, width;

  // An absent tensor has no rows.
  TokenRows(const StepView& x, int64_t batch, int64_t t, int64_t n, int64_t head, int64_t width_)
      : data(row_of<T>(x, batch, t, head)),
        stride(x.step),
        count(x.data == nullptr ? 0 : n),
        width(width_) {}

  OMNIATTN_INLINE VecF at(int64_t i, int64_t j) const {
    return i < count ? load_n(data + i * stride + j, width - j) : VecF(0.0f);
  }
  // For bf16: terms [d, d + 32) of row i; columns [d, d + 16) of rows i and i + 1 as pairs.
  OMNIATTN_INLINE PairVec terms(int64_t i, int64_t d) const {
    return load_terms_n(row(i) + d, left(i, d));
  }
  OMNIATTN_INLINE PairVec pairs(int64_t i, int64_t d) const {
    return load_pairs_of_rows_n(row(i) + d, left(i, d), row(i + 1) + d, left(i + 1, d));
  }

 private:
  OMNIATTN_INLINE const T* row(int64_t i) const { return data + (i < count ? i : 0) * stride; }
  OMNIATTN_INLINE int64_t left(int64_t i, int64_t j) const { return i < count ? width - j : 0; }
};

// Writes 32 columns of rows of a result that is read much later: past the caches if they are
// whole lines, as stream_rows does.
template <class T>
struct RowsOut {
  T* data;
  int64_t stride, width;
  bool whole;

  RowsOut(T* to, int64_t stride_, int64_t width_)
      : data(to),
        stride(stride_),
        width(width_),
        whole(width_ % (2 * kPanel) == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {}
  OMNIATTN_INLINE void set(int64_t i, int64_t j, VecF x, VecF y) const {
    T* const to = data + i * stride + j;
    if (whole) return stream(to, x), stream(to + kPanel, y);
    store_n(to, x, width - j);
    if (j + kPanel < width) store_n(to + kPanel, y, width - j - kPanel);
  }
};

// A state (K, V) in panels (K, 16), with zeros up to whole steps of K and beyond V.
struct TileState {
  const Recurrence& p;
  float* data;
  const int64_t panels, rows;

  static int64_t elements(int64_t panels, int64_t rows) { return panels * rows * kPanel; }
  Panel panel(int64_t i) const { return {data + i * rows * kPanel}; }

  // Loads a state row by row, as it lies in the tensor; null: zeros.
  [[gnu::noinline]] void load(const float* from) const {
    for (int64_t d = 0; d < rows; ++d) {
      for (int64_t i = 0; i < panels; ++i) {
        panel(i).set(d, from == nullptr ? VecF(0.0f) : part_of_row(from, d, i));
      }
    }
  }
  [[gnu::noinline]] void store(float* to) const {
    for (int64_t d = 0; d < p.key_width; ++d) {
      for (int64_t i = 0; i < panels; ++i) {
        const int64_t j = i * kPanel;
        store_n(to + d * p.value_width + j, panel(i).at(d), p.value_width - j);
      }
    }
  }
  // Stores past the caches if rows of panels are whole lines, as stream_rows does.
  void stream(float* to) const {
    const int64_t V = p.value_width;
    if (V % kPanel != 0 || reinterpret_cast<uintptr_t>(to) % 64 != 0) return store(to);
    for (int64_t d = 0; d < p.key_width; ++d) {
      for (int64_t i = 0; i < panels; ++i) {
        OMNIATTN_ISA::stream(to + d * V + i * kPanel, panel(i).at(d));
      }
    }
  }
  // Columns of a panel in row d of a tensor.
  OMNIATTN_INLINE VecF part_of_row(const float* from, int64_t d, int64_t i) const {
    const int64_t left = d < p.key_width ? p.value_width - i * kPanel : 0;
    return load_n(from + (left > 0 ? d * p.value_width + i * kPanel : 0), left);
  }
};

struct TileChunk {
  const Recurrence& p;
  const int64_t steps;  // steps of K
  int64_t rows = 0;
  HeadFactors<float> decay;
  Factor<1> readers;         // rows of k if wanted, then rows of q
  Factor<1> key_columns;     // k^T as B
  Factor<1> key_channels;    // k^T as A
  Factor<1> query_channels;  // q^T as A, for the backward
  Panel scores[2];           // readers k^T
  Panel N[2], P[2];
  float* beta;  // 0 past the last token

  TileChunk(const Recurrence& params, Room<float>& room, bool backward)
      : p(params), steps(ceil_div(p.key_width, kTileTerms)), decay(room), query_channels{} {
    take(room, steps, backward || p.delta ? 4 : 2, readers);
    take(room, steps, 2, key_columns), take(room, steps, 2, key_channels);
    if (backward) take(room, steps, 2, query_channels);
    for (Panel& x : scores) x = take_panel(room, 2 * kTokens);
    for (Panel& x : N) x = take_panel(room, kTokens);
    for (Panel& x : P) x = take_panel(room, kTokens);
    beta = room.take(kTokens);
  }

  Factor<1> queries() const { return readers.from(readers.tiles - 2); }

  // Loads the tokens [t, t + n) of a key head.
  [[gnu::noinline]] void load(int64_t batch, int64_t t, int64_t n, int64_t key_head) {
    rows = n;
    const TokenRows<> k(p.k, batch, t, n, key_head, p.key_width);
    const TokenRows<> q(p.q, batch, t, n, key_head, p.key_width);
    if (readers.tiles == 4) set_rows(k, steps, readers);
    set_rows(q, steps, queries());
    for (int64_t s = 0; s < steps; ++s) {
      for (int64_t i = 0; i < 2; ++i) {
        transpose_tile(key_columns.tile(s, 0, i), [&](int64_t row) OMNIATTN_LAMBDA {
          return k.terms(kPanel * i + row, s * kTileTerms);
        });
      }
    }
    set_channels(k, key_channels);
    if (query_channels.data != nullptr) set_channels(q, query_channels);
    for (int i = 0; i < 2; ++i) {
      const Panel of_q{scores[i].row(kTokens)};
      if (p.delta) multiply_column<2>(readers, key_columns.from(i), steps, scores[i]);
      multiply_column<2>(queries(), key_columns.from(i), steps, of_q);
    }
  }

  // Loads decays and beta of a value head, and computes its N and P.
  [[gnu::noinline]] void load_head(int64_t batch, int64_t t, int64_t head) {
    decay.load(p, batch, t, head, rows);
    const bool given = p.beta.data != nullptr;
    for (int64_t i = 0; i < kTokens; ++i) {
      beta[i] = i >= rows ? 0 : given ? *row_of<float>(p.beta, batch, t + i, head) : 1;
    }
    for (int part = 0; part < 2; ++part) {
      for (int64_t i = 0; i < kTokens; ++i) {
        const VecF factor = between(i, part);
        P[part].set(i, lower(scores[part].at(kTokens + i) * factor, i + 1, part));
        if (p.delta) N[part].set(i, lower(scores[part].at(i) * factor, i, part));
      }
    }
  }
  OMNIATTN_INLINE VecF between(int64_t i, int part) const {
    return OMNIATTN_ISA::load(decay.between.row(i) + part * kPanel);
  }
  // The first `count` columns of a row, in this part of it.
  OMNIATTN_INLINE static VecF lower(VecF x, int64_t count, int part) {
    return select(lanes_below<float>(count - part * kPanel), x, VecF(0.0f));
  }

  // Solves e = error + N x with x_i = -beta_i e_i, for a panel; e overwrites the error.
  [[gnu::noinline]] void solve(Panel error, Panel x) const {
    for (int64_t first = 0; first < kTokens; first += kPanel) {
      VecF e[kPanel];
#pragma GCC unroll 16
      for (int i = 0; i < kPanel; ++i) e[i] = error.at(first + i);
      for (int64_t j = 0; j < first; ++j) {
        const VecF known = x.at(j);
#pragma GCC unroll 16
        for (int i = 0; i < kPanel; ++i) e[i] = fma(VecF(N[0].row(first + i)[j]), known, e[i]);
      }
      const Panel diagonal = N[first / kPanel];
#pragma GCC unroll 16
      for (int j = 0; j < kPanel; ++j) {
        const VecF found = e[j] * -beta[first + j];
        error.set(first + j, e[j]);
        x.set(first + j, found);
#pragma GCC unroll 16
        for (int i = j + 1; i < kPanel; ++i) {
          e[i] = fma(VecF(diagonal.row(first + i)[j]), found, e[i]);
        }
      }
    }
  }
  // As Substitution::gradient: dx becomes dx + N^T de, with de = -beta dx.
  [[gnu::noinline]] void solve_gradient(Panel dx, Panel de) const {
    for (int64_t first = kTokens - kPanel; first >= 0; first -= kPanel) {
      const Panel columns = N[first / kPanel];
      VecF d[kPanel];
#pragma GCC unroll 16
      for (int i = 0; i < kPanel; ++i) d[i] = dx.at(first + i);
      for (int64_t j = first + kPanel; j < kTokens; ++j) {
        const VecF known = de.at(j);
#pragma GCC unroll 16
        for (int i = 0; i < kPanel; ++i) d[i] = fma(VecF(columns.row(j)[i]), known, d[i]);
      }
#pragma GCC unroll 16
      for (int j = kPanel - 1; j >= 0; --j) {
        const VecF found = d[j] * -beta[first + j];
        dx.set(first + j, d[j]);
        de.set(first + j, found);
#pragma GCC unroll 16
        for (int i = 0; i < j; ++i) d[i] = fma(VecF(columns.row(first + j)[i]), found, d[i]);
      }
    }
  }

  // Stores rows of a tensor as rows of A.
  OMNIATTN_INLINE static void set_rows(TokenRows<> x, int64_t steps, Factor<1> to) {
    for (int64_t i = 0; i < kTokens; ++i) {
      for (int64_t s = 0; s < steps; ++s) {
        store_pairs(to.tile(s, 0, i / kPanel) + i % kPanel * kTileTerms,
                    x.terms(i, s * kTileTerms));
      }
    }
  }

 private:
  // Stores columns (channels) of a tensor as rows of A.
  void set_channels(TokenRows<> x, Factor<1> to) const {
    for (int64_t s = 0; s < steps; ++s) {
      for (int64_t i = 0; i < 2; ++i) {
        transpose_tile(to.tile(s, 0, i), [&](int64_t pair) OMNIATTN_LAMBDA {
          return x.pairs(2 * pair, s * kTileTerms + kPanel * i);
        });
      }
    }
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
