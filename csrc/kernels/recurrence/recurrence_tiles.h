// Matrices of a chunk as AMX tiles, for bf16 inputs. q, k and v are factors without
// conversion. A value computed in fp32 is the sum of two pieces, its first 16 bits and the
// bf16 nearest to the rest, with an error below 2^-16 of it: bf16 outputs equal those of fp32
// products, except for a few that round the other way. Updates of a state, which is itself an
// fp32 output, are exact sums of three pieces.
//
// A chunk has 32 tokens, the terms of one step of a product. Columns of values and of
// states are in panels of 16, one vector wide; a panel of a state stays in L1 while it
// is used. Missing elements are 0.
#pragma once

#include "kernels/recurrence/recurrence_decay.h"
#include "runtime/tile_product.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int64_t kTokens = kTileTerms, kPanel = VecF::kWidth;
static_assert(recurrence_chunk(false) == kTokens && kTileRowsOfC == kPanel);

// An operand of products in steps of 32 terms: for each step and piece, some tiles of 16
// rows of A or of 16 columns of B.
template <int kPieces>
struct Factor {
  bf16* data;
  int64_t tiles;

  OMNIATTN_INLINE bf16* tile(int64_t step, int piece, int64_t number) const {
    return data + ((step * kPieces + piece) * tiles + number) * kTileElements;
  }
  // The operand from a step on; the operand from a tile of each step on.
  OMNIATTN_INLINE Factor after(int64_t steps) const { return {tile(steps, 0, 0), tiles}; }
  OMNIATTN_INLINE Factor from(int64_t number) const { return {tile(0, 0, number), tiles}; }
};
template <int kPieces>
void take(Room<float>& room, int64_t steps, int64_t tiles, Factor<kPieces>& to) {
  to = {reinterpret_cast<bf16*>(room.take(steps * kPieces * tiles * kTileElements / 2)), tiles};
}

// 16 columns of a matrix in fp32.
struct Panel {
  float* data;

  OMNIATTN_INLINE float* row(int64_t i) const { return data + i * kPanel; }
  OMNIATTN_INLINE VecF at(int64_t i) const { return load(row(i)); }
  OMNIATTN_INLINE void set(int64_t i, VecF x) const { store(row(i), x); }
};
inline Panel take_panel(Room<float>& room, int64_t rows) { return {room.take(rows * kPanel)}; }

// Products of two pieces; the product of two second pieces is omitted.
struct PieceTiles : TileRegisters {
  // One step of 32 rows of A (tiles 4 and 5) with 16 columns of B (pieces in tiles 6, 7 and 3).
  template <int kC, int kOfA, int kOfB>
  OMNIATTN_INLINE void multiply_column(const Factor<kOfA>& a, int64_t step, int64_t number) {
    static_assert(kOfA == 1 || kOfB < 3);
    load_rows(a, step, 0, number);
    if constexpr (kOfB == 3) multiply_rows<kC, kC + 1, 3>();
    if constexpr (kOfB >= 2) multiply_rows<kC, kC + 1, 7>();
    multiply_rows<kC, kC + 1, 6>();
    if constexpr (kOfA == 2) {
      load_rows(a, step, 1, number);
      multiply_rows<kC, kC + 1, 6>();
    }
  }
  template <int kPieces>
  OMNIATTN_INLINE void load_column(const Factor<kPieces>& b, int64_t step) {
    if constexpr (kPieces == 3) load<3>(b.tile(step, 2, 0), kRowBytes);
    if constexpr (kPieces >= 2) load<7>(b.tile(step, 1, 0), kRowBytes);
    load<6>(b.tile(step, 0, 0), kRowBytes);
  }
  // One step of 32 rows of A with 32 columns of B.
  template <int kOfA, int kOfB>
  OMNIATTN_INLINE void multiply_block(const Factor<kOfA>& a, const Factor<kOfB>& b, int64_t step) {
    load_rows(a, step, 0, 0);
    if constexpr (kOfB == 2) multiply_columns(b, step, 1);
    multiply_columns(b, step, 0);
    if constexpr (kOfA == 2) {
      load_rows(a, step, 1, 0);
      multiply_rows<0, 2, 6>(), multiply_rows<1, 3, 7>();
    }
  }
  template <int kTile>
  OMNIATTN_INLINE void load_sums(const Panel& c, int64_t row) {
    load<kTile>(c.row(row), kRowBytes);
  }
  template <int kTile>
  OMNIATTN_INLINE void store_sums(const Panel& c, int64_t row) const {
    store<kTile>(c.row(row), kRowBytes);
  }

 private:
  static constexpr int64_t kRowBytes = 64;

  template <int kPieces>
  OMNIATTN_INLINE void load_rows(const Factor<kPieces>& a, int64_t step, int piece, int64_t tile) {
    load<4>(a.tile(step, piece, tile), kRowBytes),
        load<5>(a.tile(step, piece, tile + 1), kRowBytes);
  }
  template <int kFirst, int kSecond, int kB>
  OMNIATTN_INLINE void multiply_rows() {
    multiply_add<bf16, kFirst, 4, kB>(), multiply_add<bf16, kSecond, 5, kB>();
  }
  template <int kPieces>
  OMNIATTN_INLINE void multiply_columns(const Factor<kPieces>& b, int64_t step, int piece) {
    load<6>(b.tile(step, piece, 0), kRowBytes), load<7>(b.tile(step, piece, 1), kRowBytes);
    multiply_rows<0, 2, 6>(), multiply_rows<1, 3, 7>();
  }
};

// C (16 kTiles, 16) = A B.
template <int kTiles, int kOfA, int kOfB>
[[gnu::noinline]] void multiply_column(Factor<kOfA> a, Factor<kOfB> b, int64_t steps, Panel c) {
  static_assert(kTiles == 2 || kTiles == 4);
  PieceTiles tiles;
  tiles.zero<0>(), tiles.zero<1>();
  if constexpr (kTiles == 4) tiles.zero<2>(), tiles.zero<3>();
  for (int64_t s = 0; s < steps; ++s) {
    tiles.load_column(b, s);
    tiles.multiply_column<0, kOfA, kOfB>(a, s, 0);
    if constexpr (kTiles == 4) tiles.multiply_column<2, kOfA, kOfB>(a, s, 2);
  }
  tiles.store_sums<0>(c, 0), tiles.store_sums<1>(c, 16);
  if constexpr (kTiles == 4) tiles.store_sums<2>(c, 32), tiles.store_sums<3>(c, 48);
}

// C (32 strips, 16) += A B, one step for each strip.
template <int kOfA, int kOfB>
[[gnu::noinline]] void add_products(Factor<kOfA> a, int64_t strips, Factor<kOfB> b, Panel c) {
  PieceTiles tiles;
  tiles.load_column(b, 0);
  for (int64_t s = 0; s < strips; ++s) {
    tiles.load_sums<0>(c, 32 * s), tiles.load_sums<1>(c, 32 * s + 16);
    tiles.multiply_column<0, kOfA, kOfB>(a, s, 0);
    tiles.store_sums<0>(c, 32 * s), tiles.store_sums<1>(c, 32 * s + 16);
  }
}

// C (32, 32) = A B, in two panels, plus A' B' of one step for each B' in `more`.
template <int kOfA, int kOfB, class... More>
[[gnu::noinline]] void multiply_block(Factor<kOfA> a, Factor<kOfB> b, int64_t steps,
                                      const Panel (&c)[2], [[maybe_unused]] Factor<1> more_a = {},
                                      const More&... more) {
  PieceTiles tiles;
  tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
  for (int64_t s = 0; s < steps; ++s) tiles.multiply_block(a, b, s);
  (tiles.multiply_block(more_a, more, 0), ...);
  tiles.store_sums<0>(c[0], 0), tiles.store_sums<1>(c[1], 0);
  tiles.store_sums<2>(c[0], 16), tiles.store_sums<3>(c[1], 16);
}

// The first piece of x, and the remainder, which is NaN if x is not finite.
OMNIATTN_INLINE VecF first_piece(VecF x) { return VecF::from_bits(x.bits() & ~0xffff); }
OMNIATTN_INLINE VecF rest_of(VecF x) { return x - first_piece(x); }
OMNIATTN_INLINE PairVec pair_of_first_pieces(VecF x, VecF y) {
  constexpr int kLow = 0xffff;
  return as_pairs(VecF::from_bits((x.bits() >> 16 & kLow) | (y.bits() & ~kLow)));
}
// Packs B from the rows f(row) of a panel. Three pieces represent a number exactly.
template <int kPieces, class F>
OMNIATTN_INLINE void pack_columns(int64_t steps, Factor<kPieces> to, const F& f) {
  for (int64_t s = 0; s < steps; ++s) {
    for (int64_t pair = 0; pair < kTileTerms / 2; ++pair) {
      const int64_t row = s * kTileTerms + 2 * pair, at = pair * kTileTerms;
      VecF x = f(row), y = f(row + 1);
      store_pairs(to.tile(s, 0, 0) + at, pair_of_first_pieces(x, y));
      x = rest_of(x), y = rest_of(y);
      if constexpr (kPieces == 2) {
        store_pairs(to.tile(s, 1, 0) + at, narrow_to_pairs<bf16>(x, y));
      } else {
        store_pairs(to.tile(s, 1, 0) + at, pair_of_first_pieces(x, y));
        store_pairs(to.tile(s, 2, 0) + at, pair_of_first_pieces(rest_of(x), rest_of(y)));
      }
    }
  }
}
// Stores a row of a step of A from its two vectors.
OMNIATTN_INLINE void store_row_pieces(Factor<2> to, int64_t step, int64_t row, VecF x, VecF y) {
  const int64_t at = row % kPanel * kTileTerms, tile = row / kPanel;
  store_factors(to.tile(step, 0, tile) + at, first_piece(x), first_piece(y));
  store_factors(to.tile(step, 1, tile) + at, rest_of(x), rest_of(y));
}

// Stores a tile with its pairs transposed, from the 16 rows pairs(i).
template <class F>
OMNIATTN_INLINE void transpose_tile(bf16* to, const F& pairs) {
  VecF block[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) block[i] = as_lanes(pairs(i));
  transpose(block);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) store_pairs(to + i * kTileTerms, as_pairs(block[i]));
}

// Converts 32 rows of A to 32 columns of a step of B, with the same pieces.
template <int kPieces>
OMNIATTN_INLINE void rows_to_columns(Factor<kPieces> rows, Factor<kPieces> columns, int64_t step) {
  for (int piece = 0; piece < kPieces; ++piece) {
    for (int half = 0; half < 2; ++half) {
      const bf16* const from = rows.tile(step, piece, half);
      transpose_tile(columns.tile(step, piece, half),
                     [=](int i) OMNIATTN_LAMBDA { return load_pairs(from + i * kTileTerms); });
    }
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
