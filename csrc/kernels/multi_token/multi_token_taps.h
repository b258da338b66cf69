// Correlation of a tile with the taps of a convolution, and the gradient of the taps, in registers:
// a row of the tile that is loaded once meets the taps of several rows.
#pragma once

#include "kernels/recurrence/recurrence_matrix.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Taps (rows, columns), contiguous.
template <class C>
struct Taps {
  C* data;
  int64_t rows, columns;
};

constexpr bool kManyRegisters = kTileAccumulators == 24;  // 32, otherwise 16
// Rows of results in registers, and rows of taps that a row of the tile meets at once.
constexpr int kTapRows = kManyRegisters ? 8 : 6;
constexpr int kTapGroup = kManyRegisters ? 4 : 2;
// Vectors of a single row of results.
constexpr int kTapVectors = 4;
// Columns of taps whose gradients are in registers, by rows of the tile.
constexpr int kTapPair = kManyRegisters ? 2 : 4;
constexpr int kGradientRows = kManyRegisters ? 8 : 4;

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};
// Calls f(Constant<n>, first) for groups of n <= kTapGroup rows, of about equal size.
template <int kMost = kTapGroup, class F>
OMNIATTN_INLINE void with_size(int64_t size, const F& f) {
  if constexpr (kMost > 1) {
    if (size < kMost) return with_size<kMost - 1>(size, f);
  }
  f(Constant<kMost>{});
}
template <class F>
OMNIATTN_INLINE void for_groups(int64_t rows, const F& f) {
  const int64_t groups = ceil_div(rows, int64_t{kTapGroup});
  for (int64_t n = 0; n < groups; ++n) {
    const int64_t first = rows * n / groups;
    with_size(rows * (n + 1) / groups - first, [&](auto size) { f(size, first); });
  }
}

// kRows x kVecs vectors of results, from the rows and columns on that x begins with.
template <int kRows, int kVecs, class C>
OMNIATTN_INLINE void correlate_part(const Taps<const C>& taps, Input<C> x, Matrix<C> out) {
  using V = Vec<C>;
  V sums[kRows][kVecs];
  for (auto& row : sums) {
    for (V& sum : row) sum = zero<C>();
  }
  for_groups(taps.rows, [&](auto size, int64_t first) OMNIATTN_LAMBDA {
    constexpr int kTaps = decltype(size)::value;
    const C* tap = taps.data + first * taps.columns;
    const C* from = x.row(first);
    for (int64_t b = 0; b < taps.columns; ++b, ++tap, ++from) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        V rows[kRows + kTaps - 1];
#pragma GCC unroll 16
        for (int r = 0; r < kRows + kTaps - 1; ++r) {
          rows[r] = load(from + r * x.stride + v * V::kWidth);
        }
#pragma GCC unroll 4
        for (int a = 0; a < kTaps; ++a) {
          const V by(tap[a * taps.columns]);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sums[r][v] = fma(by, rows[r + a], sums[r][v]);
        }
      }
    }
  });
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(out.row(r) + v * V::kWidth, sums[r][v]);
  }
}

// Number of columns up to which correlate reads x and writes its results.
template <class C>
OMNIATTN_INLINE int64_t correlated_columns(int64_t columns) {
  return round_up(columns, kTapVectors * Vec<C>::kWidth);
}
// out_ij = sum_ab tap_ab x_i+a,j+b for `rows` rows and `columns` columns; columns up to
// correlated_columns have any values. Rows that do not fill a block are computed twice.
template <class C>
[[gnu::noinline]] void correlate(const Taps<const C>& taps, Input<C> x, Matrix<C> out, int64_t rows,
                                 int64_t columns) {
  constexpr int64_t kWidth = Vec<C>::kWidth;
  if (rows < kTapRows) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; j += kTapVectors * kWidth) {
        correlate_part<1, kTapVectors>(taps, x.at(i, j), out.at(i, j));
      }
    }
    return;
  }
  for (int64_t first = 0; first < rows; first += kTapRows) {
    const int64_t i = smaller(first, rows - kTapRows);
    for (int64_t j = 0; j < columns; j += kWidth) {
      correlate_part<kTapRows, 1>(taps, x.at(i, j), out.at(i, j));
    }
  }
}

// Adds g_i x_i+a,b+j of kRows rows i and of a vector of columns j to sums[a][b].
template <int kRows, int kTaps, int kColumns, class C>
OMNIATTN_INLINE void add_products(Input<C> g, Input<C> x, Vec<C> (&sums)[kTaps][kColumns]) {
  using V = Vec<C>;
  V grads[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) grads[r] = load(g.row(r));
#pragma GCC unroll 16
  for (int r = 0; r < kRows + kTaps - 1; ++r) {
#pragma GCC unroll 4
    for (int b = 0; b < kColumns; ++b) {
      const V value = load(x.row(r) + b);
#pragma GCC unroll 4
      for (int a = 0; a < kTaps; ++a) {
        if (r - a < 0 || r - a >= kRows) continue;
        sums[a][b] = fma(grads[r - a], value, sums[a][b]);
      }
    }
  }
}
template <int kTaps, int kColumns, class C>
OMNIATTN_INLINE void add_tap_gradients(C* to, int64_t tap_columns, Input<C> g, Input<C> x,
                                       int64_t rows, int64_t columns) {
  Vec<C> sums[kTaps][kColumns];
  for (auto& row : sums) {
    for (Vec<C>& sum : row) sum = zero<C>();
  }
  for (int64_t j = 0; j < columns; j += Vec<C>::kWidth) {
    int64_t i = 0;
    for (; i + kGradientRows <= rows; i += kGradientRows) {
      add_products<kGradientRows>(g.at(i, j), x.at(i, j), sums);
    }
    for (; i < rows; ++i) add_products<1>(g.at(i, j), x.at(i, j), sums);
  }
  for (int a = 0; a < kTaps; ++a) {
    for (int b = 0; b < kColumns; ++b) to[a * tap_columns + b] += reduce_add(sums[a][b]);
  }
}
// tap_ab += sum_ij g_ij x_i+a,j+b. Columns of g up to a whole vector must be 0, and of x finite.
template <class C>
[[gnu::noinline]] void tap_gradients(const Taps<C>& taps, Input<C> g, Input<C> x, int64_t rows,
                                     int64_t columns) {
  for_groups(taps.rows, [&](auto size, int64_t first) OMNIATTN_LAMBDA {
    constexpr int kTaps = decltype(size)::value;
    C* const to = taps.data + first * taps.columns;
    int64_t b = 0;
    for (; b + kTapPair <= taps.columns; b += kTapPair) {
      add_tap_gradients<kTaps, kTapPair>(to + b, taps.columns, g, x.at(first, b), rows, columns);
    }
    for (; b < taps.columns; ++b) {
      add_tap_gradients<kTaps, 1>(to + b, taps.columns, g, x.at(first, b), rows, columns);
    }
  });
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
