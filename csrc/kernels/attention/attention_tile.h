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

// sum += X Y for a range of keys, at most kSumColumns columns. X (rows, keys) has row stride ldx; Y
// has one row per key with stride ldy, for 16-bit operands in pairs of rows.
template <class M>
void accumulate_range(const computed_t<M>* x, int64_t ldx, const M* y, int64_t ldy, Range keys,
                      int64_t rows, int64_t cols, compute_t<M>* sum, int64_t ld) {
  const auto multiply = [&](int64_t key, int64_t count, const Panels<M>& b) {
    gemm_tile<M>(x + key, ldx, b, sum, ld, rows, cols, count, true);
  };
  const auto rows_from = [&](int64_t key) { return row_panels(y + key * ldy, ldy); };
  if constexpr (Operand<M>::kStep == 1) {
    multiply(keys.begin, keys.end - keys.begin, rows_from(keys.begin));
  } else {
    // An unseen key of a pair must not even be multiplied by 0: it could be NaN.
    const auto multiply_half = [&](int64_t key) {
      M pairs[2 * kSumColumns<M>] = {};
      const M* const from = rows_from(key / 2 * 2).data + key % 2;
      for (int64_t c = 0; c < cols; ++c) pairs[2 * c + key % 2] = from[2 * c];
      multiply(key / 2 * 2, 2, packed_panels(static_cast<const M*>(pairs), 2));
    };
    const Range whole = {round_up(keys.begin, 2), keys.end / 2 * 2};
    if (whole.begin > keys.begin) multiply_half(keys.begin);
    if (whole.begin < whole.end) {
      multiply(whole.begin, whole.end - whole.begin, rows_from(whole.begin));
    }
    if (whole.end < keys.end && whole.end >= keys.begin) multiply_half(whole.end);
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
                       r.end - r.begin, cols, sum + r.begin * ld + first, ld);
    }
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
