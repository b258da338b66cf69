// Products of few rows with a matrix whose columns are contiguous along k: each column is read once
// and multiplied with all rows, without packing.
#pragma once

#include "runtime/row.h"
#include "semantics/arith.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Rows and columns of a tile: 16 sums, 4 columns and one row in registers.
constexpr int kDotRows = 4;
constexpr int kDotColumns = 4;

// Calls f(r, j, sum over i < k of a[r][i] columns[j][i]) for kRows rows and the first `kept`
// columns. Unless `ahead` is 0, prefetches the next columns, `ahead` elements further on.
template <int kRows, class SA, class SB, class F>
OMNIATTN_INLINE void dot_tile(const SA* a, int64_t lda, const SB* const (&columns)[kDotColumns],
                              int64_t k, int64_t ahead, int64_t kept, const F& f) {
  using C = compute_t<SB>;
  Vec<C> sums[kRows][kDotColumns];
  for (auto& row : sums) {
    for (auto& sum : row) sum = zero<C>();
  }
  for_row<C>(k, [&](int64_t i, auto part) {
    Vec<C> column[kDotColumns];
#pragma GCC unroll 4
    for (int j = 0; j < kDotColumns; ++j) {
      column[j] = part.load(columns[j] + i);
      if (ahead != 0) __builtin_prefetch(columns[j] + i + ahead);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec<C> row = part.load(a + r * lda + i);
#pragma GCC unroll 4
      for (int j = 0; j < kDotColumns; ++j) sums[r][j] = fma(row, column[j], sums[r][j]);
    }
  });
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kept; ++j) f(r, j, reduce_add(sums[r][j]));
  }
}

template <int kCount>
struct Rows {};

// Calls f(r, n, sum over i < k of a[r][i] b[n][i]) for rows r < `rows` of a and columns n < `cols`.
template <class SA, class SB, class F>
void dot_rows(const SA* a, int64_t lda, int64_t rows, const SB* b, int64_t ldb, int64_t cols,
              int64_t k, const F& f) {
  for (int64_t n = 0; n < cols; n += kDotColumns) {
    // Columns past the end repeat the last one.
    const SB* columns[kDotColumns];
    for (int j = 0; j < kDotColumns; ++j) columns[j] = b + smaller(n + j, cols - 1) * ldb;
    const int64_t kept = smaller(kDotColumns, cols - n);
    // The hardware does not prefetch across four short columns; doing it here was 1.7 times as fast
    // (bf16, 4 rows).
    int64_t r = 0, ahead = kDotColumns * ldb;
    const auto tile = [&]<int kRows>(Rows<kRows>) {
      dot_tile<kRows>(a + r * lda, lda, columns, k, ahead, kept,
                      [&](int i, int j, auto sum) { f(r + i, n + j, sum); });
      r += kRows;
      ahead = 0;
    };
    while (rows - r >= kDotRows) tile(Rows<kDotRows>{});
    switch (rows - r) {
      case 3:
        tile(Rows<3>{});
        break;
      case 2:
        tile(Rows<2>{});
        break;
      case 1:
        tile(Rows<1>{});
        break;
    }
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
