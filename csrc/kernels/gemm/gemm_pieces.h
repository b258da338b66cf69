// fp32 products on tiles of bf16. Each element is the sum of two or three pieces, x = p0
// + p1 + p2; a piece is the bf16 nearest to the remainder after the earlier ones.
// Products of small pieces are omitted:
//
//   2 pieces, three products   16 bits of each element: between bf16 and fp32
//   3 pieces, six products     24 bits, the accuracy of fp32
//
// All products of a step of k are added to a block of C while it is in tiles.
//
// Tiles read numbers below 2^-126 as 0. To make these irrelevant, a row of A and a column
// of B are multiplied by the power of two that brings their largest element to [1, 2),
// and C by the inverses. Infinite elements would turn into NaN in pieces: the caller
// looks for them among the exponents.
#pragma once

#include "kernels/gemm/gemm.h"
#include "runtime/gemm_tile.h"
#include "runtime/row.h"
#if defined(OMNIATTN_PAIRS)
#include "runtime/tile_product.h"
#endif
#include "semantics/arith.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Products of pieces of A and B, in an order in which most find one operand already in its tiles.
struct PieceProduct {
  int a, b;
};
template <int kPieces>
constexpr PieceProduct kPieceProducts[] = {{1, 0}, {0, 0}, {0, 1}};
template <>
constexpr PieceProduct kPieceProducts<3>[] = {{2, 0}, {1, 0}, {0, 0}, {0, 1}, {1, 1}, {0, 2}};

// Exponents.

OMNIATTN_INLINE VecF::Bits magnitude(VecF x) { return x.bits() & 0x7fffffff; }
OMNIATTN_INLINE VecF::Bits larger_of(VecF::Bits a, VecF::Bits b) { return a > b ? a : b; }

// e with 2^e <= x < 2^(e + 1), from the bits of x >= 0; 0 for
// x = 0, infinity if x is not finite.
OMNIATTN_INLINE float exponent_of(int32_t bits) {
  if (bits >= 0x7f800000) return __builtin_inff();
  if (bits == 0) return 0.0f;
  if (bits < 0x00800000) return static_cast<float>(31 - __builtin_clz(bits) - 149);
  return static_cast<float>((bits >> 23) - 127);
}
OMNIATTN_INLINE void store_exponents(float* out, VecF::Bits bits, int64_t n) {
  for (int i = 0; i < VecF::kWidth && i < n; ++i) out[i] = exponent_of(bits[i]);
}

// Exponent of the largest element of each row, or column, in [begin, end) of x.
inline void exponents(const float* x, int64_t stride, int64_t rows, int64_t cols, bool of_columns,
                      float* out, int64_t begin, int64_t end) {
  if (of_columns) {
    for (int64_t i = begin; i < end; i += VecF::kWidth) {
      VecF::Bits largest = {};
      for (int64_t r = 0; r < rows; ++r) {
        largest = larger_of(largest, magnitude(load_n(x + r * stride + i, end - i)));
      }
      store_exponents(out + i, largest, end - i);
    }
    return;
  }
  for (int64_t r = begin; r < end; ++r) {
    VecF::Bits largest = {};
    for (int64_t i = 0; i < cols; i += VecF::kWidth) {
      largest = larger_of(largest, magnitude(load_n(x + r * stride + i, cols - i)));
    }
    int32_t found = 0;
    for (int i = 0; i < VecF::kWidth; ++i) found = larger(found, largest[i]);
    out[r] = exponent_of(found);
  }
}

// Pieces.

// Part of an operand as stored, with the exponents of its rows or columns.
struct ScaledRows {
  const float* data;
  int64_t stride;
  const float* exponents;  // of the first row or column
  bool of_columns;
};

// Splits (rows, cols) of x into `pieces` matrices (rows, ld),
// which lie `next` elements apart.
template <class T>
void split(const ScaledRows& x, int64_t rows, int64_t cols, int pieces, T* out, int64_t ld,
           int64_t next) {
  for (int64_t r = 0; r < rows; ++r) {
    for_row<float>(cols, [&](int64_t i, auto part) {
      const VecF e = x.of_columns ? part.load(x.exponents + i) : VecF(x.exponents[r]);
      VecF left = scale2(part.load(x.data + r * x.stride + i), -e);
      for (int piece = 0; piece < pieces; ++piece) {
        const VecF nearest = VecF::from_bits(rounded_to_upper_half(left) & ~0xffff);
        part.store(out + piece * next + r * ld + i, nearest);
        left = left - nearest;
      }
    });
  }
}

// Blocks.

// Rows of a block of B whose pieces together fill the memory of one block of bf16.
OMNIATTN_INLINE int64_t piece_depth(int64_t depth, int64_t pieces) {
  return depth / pieces / 64 * 64;
}

#if defined(OMNIATTN_PAIRS)
constexpr int64_t kSplitRows = 32;  // rows of B split at a time where its columns are panels
constexpr int64_t kPieceSteps = 4;  // steps of k at a time: 32 rows of A take 24 KiB of L1

// A thread's memory: the packed B of a block, 32 rows of A in tiles, pieces of B before packing,
// and the sums of an item, in whole tiles.
template <class T>
struct PieceWorkspace {
  int64_t depth, cols, b_next;  // of a block; b_next: distance between pieces
  T *b, *a, *split;
  float* sums;
  int64_t bytes;

  PieceWorkspace(void* memory, const GemmParams& p, int64_t depth_, int64_t rows, int64_t cols_)
      : depth(depth_),
        cols(cols_),
        b_next(packed_elements<T>(depth, cols)),
        b(static_cast<T*>(memory)),
        a(b + p.split_bf16 * b_next),
        split(a + p.split_bf16 * kStripRows * depth),
        sums(reinterpret_cast<float*>(split + p.split_bf16 * split_elements(depth, cols))),
        bytes(reinterpret_cast<char*>(sums + round_up(rows, kStripRows) * cols) -
              static_cast<char*>(memory)) {}

  static int64_t split_elements(int64_t depth, int64_t cols) {
    return larger(kSplitRows * cols, kPanelCols<T> * depth);
  }
};

// Packs rows [k, k + depth) and columns [n, n + cols) of B, all pieces, to panels of whole steps.
template <class T>
void pack_pieces_of_b(const GemmParams& p, int64_t k, int64_t depth, int64_t n, int64_t cols,
                      const PieceWorkspace<T>& work) {
  constexpr int64_t kCols = kPanelCols<T>;
  const auto* const b = static_cast<const float*>(p.b);
  const int pieces = static_cast<int>(p.split_bf16);
  const int64_t whole = round_up(depth, kTileTerms), even = round_up(depth, 2);
  const auto panel_of = [&](int piece, int64_t panel) {
    return work.b + piece * work.b_next + packed_elements<T>(whole, panel);
  };
  for (int64_t panel = 0; panel < cols; panel += kCols) {
    const int64_t width = smaller(kCols, cols - panel), next = kCols * depth;
    if (p.b_transposed) {
      const int64_t row = n + panel;
      split<T>({b + row * p.ldb + k, p.ldb, p.b_exponents + row, false}, width, depth, pieces,
               work.split, depth, next);
    }
    for (int piece = 0; piece < pieces; ++piece) {
      T* const to = panel_of(piece, panel);
      if (p.b_transposed) pack_bt(work.split + piece * next, depth, depth, width, to);
      for (int64_t i = even * kCols; i < whole * kCols; ++i) to[i] = T{};
    }
  }
  for (int64_t row = 0; row < depth && !p.b_transposed; row += kSplitRows) {
    const int64_t rows = smaller(kSplitRows, depth - row), next = kSplitRows * cols;
    split<T>({b + (k + row) * p.ldb + n, p.ldb, p.b_exponents + n, true}, rows, cols, pieces,
             work.split, cols, next);
    for (int piece = 0; piece < pieces; ++piece) {
      for (int64_t panel = 0; panel < cols; panel += kCols) {
        pack_rows(work.split + piece * next + panel, cols, rows, smaller(kCols, cols - panel),
                  panel_of(piece, panel) + row * kCols, kCols, kCols);
      }
    }
  }
}

// Packs the pieces of `rows` rows of A, at most 32, to tiles: all pieces of a step of k are
// adjacent. Fills up with zeros to whole tiles.
template <class T>
void pack_pieces_of_a(const GemmParams& p, int64_t k, int64_t depth, int64_t row, int64_t rows,
                      T* tiles) {
  constexpr int64_t kPiece = kStripRows * kTileTerms, kWidth = VecF::kWidth;
  const auto* const a = static_cast<const float*>(p.a);
  const int64_t step = p.split_bf16 * kPiece;
  if (!p.a_transposed) {
    for (int64_t r = 0; r < kStripRows; ++r) {
      const bool is_there = r < rows;
      const float* const from = a + (row + (is_there ? r : 0)) * p.lda + k;
      const VecF e(-p.a_exponents[row + (is_there ? r : 0)]);
      T* to = tiles + r * kTileTerms;
      for (int64_t i = 0; i < depth; to += step) {
        for (int64_t half = 0; half < kTileTerms; half += kWidth, i += kWidth) {
          VecF left = scale2(load_n(from + i, is_there ? depth - i : 0), e);
          for (int64_t piece = 0; piece < p.split_bf16; ++piece) {
            T* const at = to + piece * kPiece + half;
            store_factors(at, left);
            left = left - load(at);
          }
        }
      }
    }
    return;
  }
  for (int64_t half = 0; half < kStripRows; half += kWidth) {
    const VecF e = -load_n(p.a_exponents + row + half, rows - half);
    const auto terms = [&](int64_t i) OMNIATTN_LAMBDA {
      const int64_t left = i < depth ? rows - half : 0;
      return scale2(load_n(a + (k + i) * p.lda + row + half, left), e);
    };
    T* to = tiles + half * kTileTerms;
    for (int64_t i = 0; i < depth; i += kTileTerms, to += step) {
      VecF even[16], odd[16];
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) {
        even[j] = terms(i + 2 * j);
        odd[j] = terms(i + 2 * j + 1);
      }
      for (int64_t piece = 0; piece < p.split_bf16; ++piece) {
        VecF pairs[16];
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) {
          const PairVec nearest = narrow_to_pairs<T>(even[j], odd[j]);
          even[j] = even[j] - first_terms<T>(nearest);
          odd[j] = odd[j] - second_terms<T>(nearest);
          pairs[j] = as_lanes(nearest);
        }
        transpose(pairs);
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) {
          store_pairs(to + piece * kPiece + j * kTileTerms, as_pairs(pairs[j]));
        }
      }
    }
  }
}

// A block of C (+)= `steps` steps of the pieces of A, in tiles, times those of B, `b_next` apart.
template <int kPieces, class T>
[[gnu::noinline]] void multiply_block_of_pieces(const T* a, TileOperand<T> b, int64_t b_next,
                                                int64_t steps, float* c, int64_t ldc,
                                                bool accumulate) {
  TileBlock<T, 2, 2> block{c, ldc};
  block.start(accumulate);
  for (int64_t i = 0; i < steps; ++i, a += kPieces * kStripRows * kTileTerms, b = b.after(1)) {
    PieceProduct last{-1, -1};
#pragma GCC unroll 6
    for (const PieceProduct product : kPieceProducts<kPieces>) {
      if (product.b != last.b) {
        TileOperand<T> columns = b;
        columns.data += product.b * b_next;
        block.load_columns(columns);
      }
      if (product.a != last.a) {
        block.load_rows({a + product.a * kStripRows * kTileTerms, kTileTerms, 0, kTileElements});
      }
      block.multiply_add();
      last = product;
    }
  }
  block.finish();
}

// sums (rows, work.cols) = the products of the pieces of rows [m, m + rows), columns [n, n + cols).
template <int kPieces, class T>
void multiply_pieces(const GemmParams& p, int64_t m, int64_t rows, int64_t n, int64_t cols,
                     const PieceWorkspace<T>& work) {
  for (int64_t k = 0; k < p.k; k += work.depth) {
    const int64_t depth = smaller(work.depth, p.k - k), steps = ceil_div(depth, kTileTerms);
    pack_pieces_of_b(p, k, depth, n, cols, work);
    const Panels<T> b = packed_panels<T>(work.b, steps * kTileTerms);
    for (int64_t r = 0; r < rows; r += kStripRows) {
      pack_pieces_of_a(p, k, depth, m + r, smaller(kStripRows, rows - r), work.a);
      for (int64_t i = 0; i < steps; i += kPieceSteps) {
        for (int64_t col = 0; col < cols; col += kStripRows) {
          const T* const first = b.at(i * kTileTerms, col / kPanelCols<T> * kPanelCols<T>).data +
                                 2 * (col % kPanelCols<T>);
          multiply_block_of_pieces<kPieces, T>(
              work.a + i * kPieces * kStripRows * kTileTerms,
              {first, 2 * b.row_stride, kTileTerms * b.row_stride, kTileTerms}, work.b_next,
              smaller(kPieceSteps, steps - i), work.sums + r * work.cols + col, work.cols,
              k > 0 || i > 0);
        }
      }
    }
  }
}

#endif

// C (+)= sums 2^(exponents); exponents are clamped to -252, where every sum already gives 0.
inline void finish_pieces(const GemmParams& p, int64_t m, int64_t rows, int64_t n, int64_t cols,
                          const float* sums, int64_t ld) {
  const auto* const bias = static_cast<const float*>(p.bias);
  for (int64_t r = 0; r < rows; ++r) {
    float* const c = static_cast<float*>(p.c) + (m + r) * p.ldc + n;
    for_row<float>(cols, [&](int64_t i, auto part) {
      const VecF e = max(VecF(p.a_exponents[m + r]) + part.load(p.b_exponents + n + i), VecF(-252));
      VecF sum = scale2(p.k > 0 ? part.load(sums + r * ld + i) : VecF(0.0f), e);
      if (p.accumulate) sum += part.load(c + i);
      if (bias != nullptr) sum += part.load(bias + n + i);
      part.store(c + i, sum);
    });
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
