// gemm_tile on AMX tiles: C in blocks of 32 x 32 (tiles 0 to 3), A in tiles 4 and 5, B in 6 and 7.
// The loads of a step come first, then its four products.
//
// A is read in place if its rows are whole cache lines that do not compete for few
// sets of L1. Otherwise 32 rows of it, at most kTileDepth terms, are copied into
// consecutive tiles, which stay in L1 while B streams through. Panels of B are loaded
// in place: 16 pairs of rows at a stride.
#pragma once

#include "runtime/gemm_tile.h"
#include "semantics/arith.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int64_t kTileRowsOfC = 16;              // rows and columns of one tile of C
constexpr int64_t kStripRows = 2 * kTileRowsOfC;  // rows of A, and columns of B, of a block
constexpr int64_t kTileTerms = 32;                // terms of k in one product of tiles
constexpr int64_t kTileDepth = 512;               // 32 rows of A take 32 KiB
constexpr int64_t kTileElements = kTileRowsOfC * kTileTerms;

// Tiles of an operand: one step of k after the other, each with an optional second tile (16 more
// rows of A, 16 more columns of B). Offsets are in elements.
template <class H>
struct TileOperand {
  const H* data;
  int64_t row, step, second;
  OMNIATTN_INLINE TileOperand after(int64_t steps) const {
    return {data + steps * step, row, step, second};
  }
  OMNIATTN_INLINE int64_t row_bytes() const { return row * static_cast<int64_t>(sizeof(H)); }
};

// Consecutive tiles; both tiles of a step are adjacent.
template <class H>
OMNIATTN_INLINE TileOperand<H> packed_tiles(const H* data) {
  return {data, kTileTerms, 2 * kTileElements, kTileElements};
}

// C is (16 kRowTiles) x (16 kColTiles). `next` lines of C are prefetched while it is computed.
template <class H, int kRowTiles, int kColTiles>
struct TileBlock {
  float* c;
  int64_t ldc;
  TileRegisters tiles = {};

  OMNIATTN_INLINE void start(bool accumulate) {
    if (accumulate) {
      for_tiles([&]<int kTile>(float* p)
                    OMNIATTN_LAMBDA { tiles.template load<kTile>(p, 4 * ldc); });
    } else {
      for_tiles([&]<int kTile>(float*) OMNIATTN_LAMBDA { tiles.template zero<kTile>(); });
    }
  }
  OMNIATTN_INLINE void load_rows(const TileOperand<H>& a) {
    tiles.template load<4>(a.data, a.row_bytes());
    if constexpr (kRowTiles == 2) tiles.template load<5>(a.data + a.second, a.row_bytes());
  }
  OMNIATTN_INLINE void load_columns(const TileOperand<H>& b) {
    tiles.template load_once<6>(b.data, b.row_bytes());
    if constexpr (kColTiles == 2) tiles.template load_once<7>(b.data + b.second, b.row_bytes());
  }
  OMNIATTN_INLINE void multiply_add() {
    tiles.template multiply_add<H, 0, 4, 6>();
    if constexpr (kColTiles == 2) tiles.template multiply_add<H, 1, 4, 7>();
    if constexpr (kRowTiles == 2) tiles.template multiply_add<H, 2, 5, 6>();
    if constexpr (kRowTiles == 2 && kColTiles == 2) tiles.template multiply_add<H, 3, 5, 7>();
  }
  OMNIATTN_INLINE void step(const TileOperand<H>& a, const TileOperand<H>& b) {
    load_columns(b);
    load_rows(a);
    multiply_add();
  }
  OMNIATTN_INLINE void finish() {
    for_tiles([&]<int kTile>(float* p)
                  OMNIATTN_LAMBDA { tiles.template store<kTile>(p, 4 * ldc); });
  }

 private:
  template <class F>
  OMNIATTN_INLINE void for_tiles(const F& f) {
    f.template operator()<0>(c);
    if constexpr (kColTiles == 2) f.template operator()<1>(c + 16);
    if constexpr (kRowTiles == 2) f.template operator()<2>(c + 16 * ldc);
    if constexpr (kRowTiles == 2 && kColTiles == 2) f.template operator()<3>(c + 16 * ldc + 16);
  }
};

// One block of C and its operands. If the last terms fill no whole step, their B is `tail`. A step
// of A has kPieces steps of tiles, which are multiplied with the same B (tile_pieces.h).
//
// Operands are passed by reference. To copy one, the compiler loads several of its members at once,
// just after they were stored one by one. The CPU cannot forward such stores: the load waits until
// all earlier stores, including those of tiles, have reached L1. This took a tenth of the time of
// short products.
template <class H>
struct BlockProduct {
  const TileOperand<H>&a, &b, &tail;
  int64_t steps;
  bool has_tail, accumulate;
  const float* next;  // the following block of C, to be prefetched; null: none
};

template <int kPieces, int kRowTiles, int kColTiles, class H>
[[gnu::noinline]] void multiply_block(const BlockProduct<H>& p, float* c, int64_t ldc) {
  TileBlock<H, kRowTiles, kColTiles> block{c, ldc};
  block.start(p.accumulate);
  const float* next = p.next;
  int64_t rows = next != nullptr ? kStripRows : 0;
  const int64_t ahead = p.steps > 0 ? ceil_div(rows, p.steps) : 0;
  TileOperand<H> a = p.a, b = p.b;
  const auto step = [&](const TileOperand<H>& columns) OMNIATTN_LAMBDA {
    for (int piece = 0; piece < kPieces; ++piece, a = a.after(1)) block.step(a, columns);
  };
  for (int64_t i = 0; i < p.steps; ++i, b = b.after(1)) {
    step(b);
    for (int64_t row = smaller(ahead, rows); row > 0; --row, --rows, next += ldc) {
      __builtin_prefetch(next, 1, 3);
      __builtin_prefetch(next + 16, 1, 3);
    }
  }
  if (p.has_tail) step(p.tail);
  block.finish();
}

template <int kPieces = 1, class H>
void multiply_tiles_of_block(const BlockProduct<H>& p, int64_t rows, int64_t cols, float* c,
                             int64_t ldc) {
  if (rows > kTileRowsOfC) {
    cols > kTileRowsOfC ? multiply_block<kPieces, 2, 2>(p, c, ldc)
                        : multiply_block<kPieces, 2, 1>(p, c, ldc);
  } else {
    cols > kTileRowsOfC ? multiply_block<kPieces, 1, 2>(p, c, ldc)
                        : multiply_block<kPieces, 1, 1>(p, c, ldc);
  }
}

// A block of C that whole tiles do not fit is computed in a copy.
template <class H>
[[gnu::noinline]] void multiply_partial_block(const BlockProduct<H>& p, int64_t rows, int64_t cols,
                                              float* c, int64_t ldc) {
  alignas(64) float whole[kStripRows * kStripRows];
  const auto copy = [&](const float* from, int64_t ld_from, float* to, int64_t ld_to) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < kStripRows; i += 16) {
        store_n(to + r * ld_to + i, load_n(from + r * ld_from + i, cols - i), cols - i);
      }
    }
  };
  if (p.accumulate) {
    __builtin_memset(whole, 0, sizeof(whole));
    copy(c, ldc, whole, kStripRows);
  }
  multiply_tiles_of_block(p, rows, cols, whole, kStripRows);
  copy(whole, kStripRows, c, ldc);
}

// Copies.

// Copies `rows` rows of A, k terms each, to tiles, with zeros up to whole tiles.
template <class H>
void copy_rows_to_tiles(const H* a, int64_t lda, int64_t rows, int64_t k, H* tiles) {
  for (int64_t first = 0; first < k; first += kTileTerms, tiles += 2 * kTileElements) {
    for (int64_t r = 0; r < kStripRows; ++r) {
      const int64_t terms = r < rows ? k - first : 0;
      store_pairs(tiles + r * kTileTerms, load_terms_n(a + r * lda + first, terms));
    }
  }
}

// Copies A in pairs of terms, [ceil(k / 2)][lda][2], to tiles.
template <class H>
void transpose_to_tiles(const H* a, int64_t lda, int64_t rows, int64_t k, H* tiles) {
  const int64_t pairs = (k + 1) / 2;
  for (int64_t first = 0; first < pairs; first += 16) {
    for (int64_t half = 0; half < kStripRows; half += 16, tiles += kTileElements) {
      VecF block[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const int64_t left = first + i < pairs ? rows - half : 0;
        block[i] = as_lanes(load_pairs_n(a + ((first + i) * lda + half) * 2, left));
      }
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) store_pairs(tiles + i * kTileTerms, as_pairs(block[i]));
    }
  }
}

// Copies the last `terms` rows of B, less than a step, and fills up with zeros.
template <class H>
void copy_tail_of_b(const TileOperand<H>& b, int64_t terms, int64_t cols, H* tiles) {
  for (int64_t half = 0; half < kStripRows; half += 16, tiles += kTileElements) {
    for (int64_t pair = 0; pair < 16; ++pair) {
      const int64_t left = 2 * pair < terms && half < cols ? 16 : 0;
      store_pairs(tiles + pair * kTileTerms,
                  load_pairs_n(b.data + pair * b.row + (half == 0 ? 0 : b.second), left));
    }
  }
}

// True if tiles can be loaded from rows in place: each is one cache line, and 32 rows take at most
// eight lines of each of the 64 sets of L1. (Rows at a multiple of 2 KiB would take 16 or 32.)
OMNIATTN_INLINE bool reads_in_place(const void* a, int64_t lda) {
  const auto address = reinterpret_cast<uintptr_t>(a);
  return address % 64 == 0 && lda % 32 == 0 && lda / 32 % 32 != 0;
}

// Calls f(product, first column, columns) for the blocks of a strip of rows of C. The first term of
// A corresponds to row `term` of B.
template <class H, class F>
OMNIATTN_INLINE void for_blocks(const TileOperand<H>& a, const Panels<H>& b, int64_t term,
                                int64_t n, int64_t k, const F& f) {
  alignas(64) H last[2 * kTileElements];
  const TileOperand<H> tail = packed_tiles(static_cast<const H*>(last));
  const int64_t steps = k / kTileTerms, left = k % kTileTerms;
  for (int64_t col = 0; col < n; col += kStripRows) {
    const int64_t cols = smaller(kStripRows, n - col), in_panel = col % kPanelCols<H>;
    const H* const first = b.at(term, col - in_panel).data + 2 * in_panel;
    const TileOperand<H> columns{first, 2 * b.row_stride, kTileTerms * b.row_stride, kTileTerms};
    if (left > 0) copy_tail_of_b(columns.after(steps), left, cols, last);
    BlockProduct<H> product{a, columns, tail, steps, left > 0, false, nullptr};
    f(product, col, cols);
  }
}

// Computes a strip over at most kTileDepth terms. `following` is the next strip of C, or null.
template <class H>
void multiply_strip(const TileOperand<H>& a, const Panels<H>& b, int64_t term, float* c,
                    int64_t ldc, int64_t rows, int64_t n, int64_t k, bool accumulate,
                    const float* following) {
  const auto multiply = [&](BlockProduct<H>& product, int64_t col, int64_t cols) OMNIATTN_LAMBDA {
    product.accumulate = accumulate;
    if (accumulate) product.next = col + kStripRows < n ? c + col + kStripRows : following;
    if (rows % kTileRowsOfC == 0 && cols % kTileRowsOfC == 0) {
      multiply_tiles_of_block(product, rows, cols, c + col, ldc);
    } else {
      multiply_partial_block(product, rows, cols, c + col, ldc);
    }
  };
  for_blocks(a, b, term, n, k, multiply);
}

template <ALayout kLayout, class H>
void multiply_on_tiles(const H* a, int64_t lda, const Panels<H>& b, float* c, int64_t ldc,
                       int64_t m, int64_t n, int64_t k, bool accumulate) {
  if (n <= 0) return;
  alignas(64) H copy[kStripRows * kTileDepth];
  int64_t first = 0;
  do {
    const int64_t depth = smaller(kTileDepth, k - first);
    for (int64_t row = 0; row < m; row += kStripRows) {
      const int64_t rows = smaller(kStripRows, m - row);
      TileOperand<H> strip = packed_tiles(copy);
      if constexpr (kLayout == ALayout::kTransposed) {
        transpose_to_tiles(a + (first / 2 * lda + row) * 2, lda, rows, depth, copy);
      } else {
        const H* const from = a + row * lda + first;
        if (rows % kTileRowsOfC == 0 && depth % kTileTerms == 0 && reads_in_place(from, lda)) {
          strip = {from, lda, kTileTerms, kTileRowsOfC * lda};
        } else {
          copy_rows_to_tiles(from, lda, rows, depth, copy);
        }
      }
      const bool is_last = row + kStripRows >= m;
      multiply_strip(strip, b, first, c + row * ldc, ldc, rows, n, depth, accumulate || first > 0,
                     is_last ? nullptr : c + (row + kStripRows) * ldc);
    }
    first += depth;
  } while (first < k);
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
