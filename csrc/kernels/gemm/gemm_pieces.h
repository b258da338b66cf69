// fp32 products on tiles of bf16: each element is the sum of two or three pieces, x = p0 + p1 + p2,
// where a piece is the bf16 nearest to what those before it leave. Products of small pieces are
// left out, and the others are added smallest first:
//
//   2 pieces, three products   16 bits of each element: between bf16 and fp32
//   3 pieces, six products     24 bits, the accuracy of fp32
//
// Tiles read numbers below 2^-126 as 0. So that these do not matter, a row of A and a column of B
// are multiplied by the power of two that brings their largest element to [1, 2), and C by the
// inverses. Infinite elements would turn to NaN in pieces: the caller looks for them among the
// exponents.
#pragma once

#include "kernels/gemm/gemm.h"
#include "runtime/gemm_tile.h"
#include "runtime/row.h"
#include "semantics/arith.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

struct PieceProduct {
  int a, b;
};
struct PieceScheme {
  int pieces, count;
  PieceProduct products[6];
};
constexpr PieceScheme kTwoPieces = {2, 3, {{1, 0}, {0, 1}, {0, 0}}};
constexpr PieceScheme kThreePieces = {3, 6, {{2, 0}, {0, 2}, {1, 1}, {0, 1}, {1, 0}, {0, 0}}};
OMNIATTN_INLINE const PieceScheme& scheme_of(const GemmParams& p) {
  return p.pieces == 2 ? kTwoPieces : kThreePieces;
}

// Exponents.

OMNIATTN_INLINE VecF::Bits magnitude(VecF x) { return x.bits() & 0x7fffffff; }
OMNIATTN_INLINE VecF::Bits larger_of(VecF::Bits a, VecF::Bits b) { return a > b ? a : b; }

// e with 2^e <= x < 2^(e + 1), from the bits of x >= 0; 0 for 0 and infinity for what is not
// finite.
OMNIATTN_INLINE float exponent_of(int32_t bits) {
  if (bits >= 0x7f800000) return __builtin_inff();
  if (bits == 0) return 0.0f;
  if (bits < 0x00800000) return static_cast<float>(31 - __builtin_clz(bits) - 149);
  return static_cast<float>((bits >> 23) - 127);
}
OMNIATTN_INLINE void store_exponents(float* out, VecF::Bits bits, int64_t n) {
  for (int i = 0; i < VecF::kWidth && i < n; ++i) out[i] = exponent_of(bits[i]);
}

// Of the largest element of rows, or of columns, [begin, end) of x.
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

// Part of an operand as it is stored, with the exponents of its rows or of its columns.
struct ScaledRows {
  const float* data;
  int64_t stride;
  const float* exponents;  // of the first row or column
  bool of_columns;
};

// (rows, cols) of x to `pieces` matrices (rows, ld) that follow one another at a distance of
// `next`.
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

// Terms of a block of B: all pieces of it take the place of one block of bf16.
OMNIATTN_INLINE int64_t piece_depth(int64_t depth, int64_t pieces) {
  return depth / pieces / 64 * 64;
}

constexpr int64_t kSplitRows = 32;  // of B at a time, where its columns are panels

// Memory of a thread: packed B and A of a block, pieces on their way there, and the sums of an
// item.
template <class T>
struct PieceWorkspace {
  int64_t depth, b_next, a_next;  // of a block; distances of pieces
  T *b, *a, *split;
  float* sums;
  int64_t bytes;

  PieceWorkspace(void* memory, const GemmParams& p, int64_t depth_, int64_t rows, int64_t cols,
                 int64_t a_rows)
      : depth(depth_),
        b_next(packed_elements<T>(depth, cols)),
        a_next(a_rows * row_elements(depth)),
        b(static_cast<T*>(memory)),
        a(b + p.pieces * b_next),
        split(a + p.pieces * a_next),
        sums(reinterpret_cast<float*>(split + p.pieces * split_elements(depth, cols, a_rows))),
        bytes(reinterpret_cast<char*>(sums + rows * cols) - static_cast<char*>(memory)) {}

  // Rows of A at this distance are read in place (tile_product.h): an odd number of cache lines.
  static int64_t row_elements(int64_t depth) { return (ceil_div(depth, 32) | 1) * 32; }
  static int64_t split_elements(int64_t depth, int64_t cols, int64_t a_rows) {
    return larger(larger(kSplitRows * cols, kPanelCols<T> * depth), depth * a_rows);
  }
};

// B of rows [k, k + depth) and columns [n, n + cols), all pieces, to panels.
template <class T>
void pack_pieces_of_b(const GemmParams& p, int64_t k, int64_t depth, int64_t n, int64_t cols,
                      const PieceWorkspace<T>& work) {
  constexpr int64_t kCols = kPanelCols<T>;
  const auto* const b = static_cast<const float*>(p.b);
  const int pieces = static_cast<int>(p.pieces);
  if (p.b_transposed) {
    for (int64_t panel = 0; panel < cols; panel += kCols) {
      const int64_t width = smaller(kCols, cols - panel), next = kCols * depth, row = n + panel;
      split<T>({b + row * p.ldb + k, p.ldb, p.b_exponents + row, false}, width, depth, pieces,
               work.split, depth, next);
      for (int piece = 0; piece < pieces; ++piece) {
        pack_bt(work.split + piece * next, depth, depth, width,
                work.b + piece * work.b_next + packed_elements<T>(depth, panel));
      }
    }
    return;
  }
  for (int64_t row = 0; row < depth; row += kSplitRows) {
    const int64_t rows = smaller(kSplitRows, depth - row), next = kSplitRows * cols;
    split<T>({b + (k + row) * p.ldb + n, p.ldb, p.b_exponents + n, true}, rows, cols, pieces,
             work.split, cols, next);
    for (int piece = 0; piece < pieces; ++piece) {
      for (int64_t panel = 0; panel < cols; panel += kCols) {
        pack_rows(work.split + piece * next + panel, cols, rows, smaller(kCols, cols - panel),
                  work.b + piece * work.b_next + packed_elements<T>(depth, panel) + row * kCols,
                  kCols, kCols);
      }
    }
  }
}

// A of rows [row, row + rows), at most `a_rows`: all pieces, as gemm_tile reads them. Returns lda.
template <class T>
int64_t pack_pieces_of_a(const GemmParams& p, int64_t k, int64_t depth, int64_t row, int64_t rows,
                         int64_t a_rows, const PieceWorkspace<T>& work) {
  const auto* const a = static_cast<const float*>(p.a);
  const int pieces = static_cast<int>(p.pieces);
  if (!p.a_transposed) {
    const int64_t ld = work.row_elements(depth);
    split<T>({a + row * p.lda + k, p.lda, p.a_exponents + row, false}, rows, depth, pieces, work.a,
             ld, work.a_next);
    return ld;
  }
  const int64_t next = depth * rows;
  split<T>({a + k * p.lda + row, p.lda, p.a_exponents + row, true}, depth, rows, pieces, work.split,
           rows, next);
  for (int piece = 0; piece < pieces; ++piece) {
    pack_rows(work.split + piece * next, rows, depth, rows, work.a + piece * work.a_next, a_rows,
              rows);
  }
  return a_rows;
}

// sums (rows, cols) = the products of the pieces of rows [m, m + rows), columns [n, n + cols).
template <class T>
void multiply_pieces(const GemmParams& p, int64_t m, int64_t rows, int64_t n, int64_t cols,
                     int64_t a_rows, const PieceWorkspace<T>& work) {
  const PieceScheme& scheme = scheme_of(p);
  for (int64_t k = 0; k < p.k; k += work.depth) {
    const int64_t depth = smaller(work.depth, p.k - k);
    pack_pieces_of_b(p, k, depth, n, cols, work);
    for (int64_t r = 0; r < rows; r += a_rows) {
      const int64_t count = smaller(a_rows, rows - r);
      const int64_t lda = pack_pieces_of_a(p, k, depth, m + r, count, a_rows, work);
      for (int i = 0; i < scheme.count; ++i) {
        const T* const a = work.a + scheme.products[i].a * work.a_next;
        const Panels<T> b = packed_panels<T>(work.b + scheme.products[i].b * work.b_next, depth);
        float* const c = work.sums + r * cols;
        const bool more = k > 0 || i > 0;
        if (p.a_transposed) {
          gemm_tile<T, ALayout::kTransposed>(a, lda, b, c, cols, count, cols, depth, more);
        } else {
          gemm_tile<T>(a, lda, b, c, cols, count, cols, depth, more);
        }
      }
    }
  }
}

// C = its start + sums 2^(exponents). Beyond the lower limit every sum is 0, whatever its size.
inline void finish_pieces(const GemmParams& p, int64_t m, int64_t rows, int64_t n, int64_t cols,
                          const float* sums) {
  const auto* const bias = static_cast<const float*>(p.bias);
  for (int64_t r = 0; r < rows; ++r) {
    float* const c = static_cast<float*>(p.c) + (m + r) * p.ldc + n;
    for_row<float>(cols, [&](int64_t i, auto part) {
      const VecF e = max(VecF(p.a_exponents[m + r]) + part.load(p.b_exponents + n + i), VecF(-252));
      VecF sum = scale2(p.k > 0 ? part.load(sums + r * cols + i) : VecF(0.0f), e);
      if (p.accumulate) sum += part.load(c + i);
      if (bias != nullptr) sum += part.load(bias + n + i);
      part.store(c + i, sum);
    });
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
