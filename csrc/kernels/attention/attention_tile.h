// Tiles of a query block x a key block: products over the keys that the mask leaves visible.
#pragma once

#include "kernels/attention/attention_pack.h"
#include "kernels/attention/attention_plan.h"
#include "kernels/attention/attention_row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Rows of a (Tq, Tk) array that a tile needs. They are too short for the hardware to prefetch, so
// they are prefetched during the products, a few before each register tile: requested all at once,
// they would wait for each other.
struct TileRows {
  const char* data;  // first query and key; null: none
  int64_t stride, element;

  OMNIATTN_INLINE void fetch(const TilePlan& plan, Range rows) const {
    for (int64_t r = rows.begin; r < smaller(rows.end, plan.rows()); ++r) {
      const Range seen = plan.seen[r / kRowGroup];
      for (int64_t c = seen.begin * element; c < seen.end * element; c += 64) {
        __builtin_prefetch(data + r * stride + c, 0, 2);
      }
    }
  }
};
OMNIATTN_INLINE TileRows tile_rows_of(const void* data, int64_t stride, int64_t element) {
  return {static_cast<const char*>(data), stride * element, element};
}

OMNIATTN_INLINE TileRows bias_rows(const AttentionProblem& p, int64_t b, int64_t h,
                                   const TilePlan& plan) {
  const ScoreView& s = p.bias;
  if (s.data == nullptr || s.stride_q == 0) return {};
  const int64_t size = size_of(s.dtype);
  const int64_t offset = b * s.stride_b + h * s.stride_h + plan.queries.begin * s.stride_q;
  return tile_rows_of(static_cast<const char*>(s.data) + (offset + plan.keys.begin) * size,
                      s.stride_q, size);
}

// Queries of a tile that see some of these keys, relative to the tile.
OMNIATTN_INLINE Range rows_seeing(const TilePlan& plan, Range keys) {
  Range rows = {0, 0};
  for (int64_t g = 0; g < plan.groups(); ++g) {
    if (!is_empty(intersect(plan.columns[g], keys)))
      rows = mask_rules::hull(rows, plan.group_rows(g));
  }
  return rows;
}

// gemm_tile, with fetch() before each register tile.
template <class M, class F>
void gemm_tile_fetching(const M* a, int64_t lda, const Panels<M>& b, compute_t<M>* c, int64_t ldc,
                        int64_t m, int64_t n, int64_t k, bool accumulate, const F& fetch) {
  constexpr int64_t kCols = kPanelCols<M>;
  for (int64_t col = 0; col < n; col += kCols) {
    for (int64_t r = 0; r < m; r += kTileRows) {
      fetch();
      gemm_tile<M>(a + r * lda, lda, b.at(0, col), c + r * ldc + col, ldc,
                   m - r < kTileRows ? m - r : kTileRows, n - col < kCols ? n - col : kCols, k,
                   accumulate);
    }
  }
}

// x = A B^T for the rows of a plan's groups. A is `rows`, k elements each, with row stride lda; B
// holds packed keys as column panels. Meanwhile the rows of `next` are prefetched.
template <class M>
void multiply_by_keys(const TilePlan& plan, const M* rows, int64_t lda, int64_t k, const M* packed,
                      compute_t<M>* x, const TileRows& next = {}) {
  // Spreads 96 rows over the register tiles of both key panels: 32 on AVX-512, 6 on AMX.
  constexpr int64_t kFetchRows = kOnTiles ? 16 : 3;
  int64_t fetched = 0;
  for (int64_t panel = 0; panel < kKeyBlock; panel += kPanelCols<M>) {
    for (int64_t g = 0; g < plan.groups(); ++g) {
      const Range columns = intersect(plan.columns[g], {panel, panel + kPanelCols<M>});
      if (is_empty(columns)) continue;
      const Range r = plan.group_rows(g);
      // Panels start at their first column; only the clipped end saves work.
      const M* const a = rows + r.begin * lda;
      const Panels<M> b = packed_panels(packed + panel * packed_depth<M>(k), k);
      compute_t<M>* const c = x + r.begin * kKeyBlock + panel;
      const int64_t m = r.end - r.begin, n = columns.end - panel;
      if (next.data == nullptr) {
        gemm_tile<M>(a, lda, b, c, kKeyBlock, m, n, k, false);
      } else {
        gemm_tile_fetching<M>(a, lda, b, c, kKeyBlock, m, n, k, false, [&] {
          next.fetch(plan, {fetched, fetched + kFetchRows});
          fetched += kFetchRows;
        });
      }
    }
  }
  if (next.data != nullptr) next.fetch(plan, {fetched, plan.rows()});
}

// Columns that are summed at a time; if tiles split X, they split it once for all of them.
template <class M>
constexpr int64_t kSumColumns = (kSplits<M> ? 4 : 1) * kPanelCols<M>;

// Operands Y of the pairs of `keys`, whose first pair is at `pairs`: in place, or in `copy` with 0
// for a key of a pair that is not among `keys`. Its products are 0 in place if its weights are 0
// (`are_weightless`) and it is finite.
template <class M>
Panels<M> seen_rows(const M* pairs, int64_t ldy, Range keys, int64_t cols, bool are_weightless,
                    M* copy) {
  constexpr int64_t kWidth = kSumColumns<M>;
  const int64_t begin = keys.begin / 2 * 2, end = round_up(keys.end, 2);
  const auto is_zero = [&](int64_t key) {
    if (!are_weightless) return false;
    const M* const row = pairs + (key / 2 * 2 - begin) * ldy + key % 2;
    compute_t<M> sum = 0;
    for (int64_t c = 0; c < cols; ++c) sum += 0 * widen(row[2 * c]);
    return sum == 0;
  };
  if ((begin == keys.begin || is_zero(begin)) && (end == keys.end || is_zero(keys.end))) {
    return row_panels(pairs, ldy);
  }
  fill_zero(copy, (end - begin) * kWidth);
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    const int64_t row = key / 2 * 2 - begin;
    for (int64_t c = key % 2; c < 2 * cols; c += 2) {
      copy[row * kWidth + c] = pairs[row * ldy + c];
    }
  }
  return row_panels<M>(copy, kWidth);
}

// sum += X Y for a range of keys, at most kSumColumns columns. X (rows, keys) has row stride ldx; Y
// has one row per key with stride ldy, for 16-bit operands in pairs of rows; are_weightless: X is 0
// for the keys that share a pair with the first or the last. The order of a row's sum does not
// depend on the range, as long as it has the keys whose weights are not 0.
template <class M>
void accumulate_range(const computed_t<M>* x, int64_t ldx, const M* y, int64_t ldy, Range keys,
                      int64_t rows, int64_t cols, bool are_weightless, compute_t<M>* sum,
                      int64_t ld) {
  const auto multiply = [&](int64_t key, int64_t count, const Panels<M>& b) {
    gemm_tile<M>(x + key, ldx, b, sum, ld, rows, cols, count, true);
  };
  if constexpr (Operand<M>::kStep == 1) {
    multiply(keys.begin, keys.end - keys.begin, row_panels(y + keys.begin * ldy, ldy));
  } else {
    M copy[kKeyBlock * kSumColumns<M>];
    const auto multiply_pairs = [&](Range piece) {
      if (is_empty(piece)) return;
      const int64_t begin = piece.begin / 2 * 2;
      multiply(begin, round_up(piece.end, 2) - begin,
               seen_rows<M>(y + begin * ldy, ldy, piece, cols, are_weightless, copy));
    };
    // An instruction adds the products of 32 keys before it adds them to the sum.
    const int64_t first = kOnTiles ? smaller(round_up(keys.begin, 32), keys.end) : keys.begin;
    multiply_pairs({keys.begin, first});
    multiply_pairs({first, keys.end});
  }
}

// accumulate_range for the rows of a plan's groups (queries x keys of the tile) and any width.
template <class M>
void accumulate_keys(const TilePlan& plan, const computed_t<M>* x, int64_t ldx, const M* y,
                     int64_t ldy, int64_t width, compute_t<M>* sum, int64_t ld) {
  for (int64_t first = 0; first < width; first += kSumColumns<M>) {
    const int64_t cols = smaller(kSumColumns<M>, width - first);
    for (int64_t g = 0; g < plan.groups(); ++g) {
      const Range seen = plan.seen[g], r = plan.group_rows(g);
      if (is_empty(seen)) continue;
      accumulate_range(x + r.begin * ldx, ldx, y + first * Operand<M>::kStep, ldy, seen,
                       r.end - r.begin, cols, true, sum + r.begin * ld + first, ld);
    }
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
