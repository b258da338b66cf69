// gemm_tile on AMX tiles of fp16 with an fp32 A that a kernel computed, such as weights, hidden
// layers and gradients. fp16 has neither the range nor the digits of A:
//
// - A row of A is multiplied by the power of two that brings its largest element to [2^14, 2^15),
//   and the row of C by the inverse. Both are exact.
// - An element is the sum of two pieces, each the fp16 nearest to the remainder. They hold 22 bits,
//   down to 2^-39 of the largest element of the row.
#pragma once

#include "runtime/tile_product.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int64_t kPieceDepth = kTileDepth / 2;              // both pieces of 32 rows take 32 KiB
constexpr int64_t kPieceElements = kStripRows * kTileTerms;  // in one piece of one step

struct PowerOfTwo {
  VecF up, down;  // down: the inverse of up
};
// Scale of rows with these largest elements; neither the scale nor its inverse is a denormal.
OMNIATTN_INLINE PowerOfTwo power_of(VecF largest) {
  constexpr int kBias = 127, kMost = 2 * kBias - 1;
  const VecF::Bits wanted = 2 * kBias + 14 - (largest.bits() >> 23);
  const VecF::Bits exponent = wanted < kMost ? wanted : VecF::Bits{} + kMost;
  return {VecF::from_bits(exponent << 23), VecF::from_bits((2 * kBias - exponent) << 23)};
}
// A non-finite x counts as the largest finite number, so that the rest of its row stays finite.
OMNIATTN_INLINE VecF larger_magnitude(VecF largest, VecF x) {
  return max(largest, min(abs(x), VecF(__FLT_MAX__)));
}

// Remainder x - piece; 0 if x is not finite, where it would be NaN.
OMNIATTN_INLINE VecF left_of(VecF x, VecF piece) {
  return select(abs(x) <= VecF(__FLT_MAX__), x - piece, VecF(0.0f));
}

// Splits `rows` rows of A, k terms each, into tiles. Each step has the first pieces of 32 rows,
// then their second pieces, with zeros up to whole tiles.
inline void split_rows_to_tiles(const float* a, int64_t lda, int64_t rows, int64_t k, f16* tiles,
                                float* down) {
  for (int64_t r = 0; r < kStripRows; ++r) {
    const int64_t terms = r < rows ? k : 0;
    const float* const row = a + (r < rows ? r : 0) * lda;
    VecF largest(0.0f);
    for (int64_t i = 0; i < terms; i += VecF::kWidth) {
      largest = larger_magnitude(largest, load_n(row + i, terms - i));
    }
    const PowerOfTwo power = power_of(VecF(reduce_max(largest)));
    down[r] = power.down.v[0];
    f16* to = tiles + r * kTileTerms;
    for (int64_t i = 0; i < k; to += 2 * kPieceElements) {
      for (int64_t half = 0; half < kTileTerms; half += VecF::kWidth, i += VecF::kWidth) {
        const VecF x = load_n(row + i, terms - i) * power.up;
        store(to + half, x);
        store(to + half + kPieceElements, left_of(x, load(to + half)));
      }
    }
  }
}

// split_rows_to_tiles for a transposed A (k, rows).
inline void split_columns_to_tiles(const float* a, int64_t lda, int64_t rows, int64_t k, f16* tiles,
                                   float* down) {
  for (int64_t half = 0; half < kStripRows; half += VecF::kWidth) {
    const auto terms = [&](int64_t i) OMNIATTN_LAMBDA {
      return i < k ? load_n(a + i * lda + half, rows - half) : VecF(0.0f);
    };
    VecF largest(0.0f);
    for (int64_t i = 0; i < k; ++i) largest = larger_magnitude(largest, terms(i));
    const PowerOfTwo power = power_of(largest);
    store(down + half, power.down);
    f16* to = tiles + half * kTileTerms;
    for (int64_t first = 0; first < k; first += kTileTerms, to += 2 * kPieceElements) {
      VecF high[16], low[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const VecF x = terms(first + 2 * i) * power.up, y = terms(first + 2 * i + 1) * power.up;
        const PairVec pieces = narrow_to_pairs<f16>(x, y);
        high[i] = as_lanes(pieces);
        low[i] = as_lanes(narrow_to_pairs<f16>(left_of(x, first_terms<f16>(pieces)),
                                               left_of(y, second_terms<f16>(pieces))));
      }
      transpose(high);
      transpose(low);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        store_pairs(to + i * kTileTerms, as_pairs(high[i]));
        store_pairs(to + i * kTileTerms + kPieceElements, as_pairs(low[i]));
      }
    }
  }
}

// Computes a strip of rows of C over at most kPieceDepth terms: C (+)= down * (A B).
inline void multiply_strip_of_pieces(const TileOperand<f16>& a, const Panels<f16>& b, int64_t term,
                                     const float* down, float* c, int64_t ldc, int64_t rows,
                                     int64_t n, int64_t k, bool accumulate) {
  alignas(64) float sums[kStripRows * kStripRows];
  for_blocks(a, b, term, n, k, [&](const BlockProduct<f16>& product, int64_t col, int64_t cols) {
    multiply_tiles_of_block<2>(product, rows, cols, sums, kStripRows);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < cols; i += VecF::kWidth) {
        float* const to = c + r * ldc + col + i;
        const VecF start = accumulate ? load_n(to, cols - i) : VecF(0.0f);
        store_n(to, fma(load(sums + r * kStripRows + i), VecF(down[r]), start), cols - i);
      }
    }
  });
}

template <ALayout kLayout>
void multiply_pieces_on_tiles(const float* a, int64_t lda, const Panels<f16>& b, float* c,
                              int64_t ldc, int64_t m, int64_t n, int64_t k, bool accumulate) {
  if (n <= 0) return;
  alignas(64) f16 pieces[2 * kStripRows * kPieceDepth];
  alignas(64) float down[kStripRows];
  int64_t first = 0;
  do {
    const int64_t depth = smaller(kPieceDepth, k - first);
    for (int64_t row = 0; row < m; row += kStripRows) {
      const int64_t rows = smaller(kStripRows, m - row);
      if constexpr (kLayout == ALayout::kTransposed) {
        split_columns_to_tiles(a + first * lda + row, lda, rows, depth, pieces, down);
      } else {
        split_rows_to_tiles(a + row * lda + first, lda, rows, depth, pieces, down);
      }
      multiply_strip_of_pieces(packed_tiles(pieces), b, first, down, c + row * ldc, ldc, rows, n,
                               depth, accumulate || first > 0);
    }
    first += depth;
  } while (first < k);
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
