// Register-tile matrix product for blocks that live in L1 and L2:
//
//   gemm_tile<T, layout>(a, lda, b, c, ldc, m, n, k, accumulate)     C (+)= A B
//
//   A  (m, k) row-major, read by broadcast;
//      with ALayout::kTransposed (k, m) row-major, read down its columns
//   B  (k, n) as column panels: packed_panels(...) of pack_b or pack_bt, or row_panels(...) of rows
//   C  (m, n) row-major in compute_t<T>
//
// T is the operand type: double, float, or bf16 where the machine has a bf16 dot product. Other
// storage types are widened to float when they are packed; operand_t<S> names the type for S.
// bf16 operands hold pairs of consecutive k: A is plain rows (row k+1 follows k in memory), while
// B, and A when transposed, hold [ceil(k / 2)][columns][2] with a zero behind an odd k.
//
// A tile keeps kTileRows x kTileVecs accumulators in registers: 6 x 4 of the 32 AVX-512 or NEON
// registers, 6 x 2 of 16 elsewhere; narrower remainders of n use taller tiles, so that at least 8
// accumulators hide the latency of the multiply-add. Rows are split evenly over tiles.
#pragma once

#include "runtime/vec.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileAccumulators = 24;
constexpr int kTileVecs = 4;
#else
constexpr int kTileAccumulators = 12;
constexpr int kTileVecs = 2;
#endif

// 8 rows at most: taller tiles need more row addresses than there are registers for them.
constexpr int tile_rows(int vecs) {
  return kTileAccumulators / vecs < 8 ? kTileAccumulators / vecs : 8;
}

// The operand type that storage type S is multiplied in.
template <class S>
struct OperandOf {
  using type = compute_t<S>;
};

// What a tile does with one step of k: one element, or one pair of bf16.
template <class T>
struct Operand {
  static_assert(sizeof(T) >= 4, "half types are widened at packing unless there is a bf16 dot");
  static constexpr int kStep = 1;
  using B = Vec<T>;
  OMNIATTN_INLINE static B load_b(const T* p) { return load(p); }
  OMNIATTN_INLINE static B load_b_n(const T* p, int64_t n) { return load_n(p, n); }
  OMNIATTN_INLINE static B broadcast(const T* p) { return set1(*p); }
  OMNIATTN_INLINE static B broadcast_odd(const T* p) { return set1(*p); }
  OMNIATTN_INLINE static Vec<T> multiply_add(B a, B b, Vec<T> acc) { return fma(a, b, acc); }
};

#if defined(__AVX512BF16__) || defined(OMNIATTN_EMULATE_BF16_DOT)
template <>
struct OperandOf<bf16> {
  using type = bf16;
};
template <>
struct Operand<bf16> {
  static constexpr int kStep = 2;
  using B = PairVec;
  OMNIATTN_INLINE static B load_b(const bf16* p) { return load_pairs(p); }
  OMNIATTN_INLINE static B load_b_n(const bf16* p, int64_t n) { return load_pairs_n(p, n); }
  OMNIATTN_INLINE static B broadcast(const bf16* p) { return broadcast_pair(p); }
  OMNIATTN_INLINE static B broadcast_odd(const bf16* p) { return broadcast_half_pair(p); }
  OMNIATTN_INLINE static VecF multiply_add(B a, B b, VecF acc) { return dot_bf16(acc, a, b); }
};
#endif

template <class S>
using operand_t = typename OperandOf<S>::type;

// Columns of one panel.
template <class T>
constexpr int64_t kPanelCols = kTileVecs * Vec<compute_t<T>>::kWidth;

template <class T>
OMNIATTN_INLINE int64_t k_steps(int64_t k) {
  return (k + Operand<T>::kStep - 1) / Operand<T>::kStep;
}

// B as panels of kPanelCols columns. Strides count columns (pairs of bf16).
template <class T>
struct Panels {
  const T* data;
  int64_t row_stride;
  int64_t panel_stride;

  // The view that starts at column n, a multiple of kPanelCols, and at row k, a multiple of kStep.
  OMNIATTN_INLINE Panels at(int64_t k, int64_t n) const {
    const int64_t offset = n / kPanelCols<T> * panel_stride + k / Operand<T>::kStep * row_stride;
    return {data + offset * Operand<T>::kStep, row_stride, panel_stride};
  }
};
template <class T>
OMNIATTN_INLINE Panels<T> packed_panels(const T* packed, int64_t k) {
  return {packed, kPanelCols<T>, kPanelCols<T> * k_steps<T>(k)};
}
template <class T>
OMNIATTN_INLINE Panels<T> row_panels(const T* rows, int64_t ldb) {
  return {rows, ldb, kPanelCols<T>};
}

enum class ALayout { kRows, kTransposed };

template <class T>
struct TileArgs {
  const T* a;
  int64_t lda;
  const T* b;
  int64_t ldb;
  compute_t<T>* c;
  int64_t ldc;
  int64_t k;
  int64_t last;  // columns of the last vector of a partial panel
  bool accumulate;
};

// acc += (one step of k of A's rows) * (one row of a panel).
template <class T, ALayout kLayout, bool kPartial, bool kOdd, int kRows, int kVecs>
OMNIATTN_INLINE void tile_step(Vec<compute_t<T>> (&acc)[kRows][kVecs], const T* a, int64_t lda,
                               const T* b, int64_t last) {
  using Op = Operand<T>;
  typename Op::B b_row[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    const T* p = b + v * Vec<compute_t<T>>::kWidth * Op::kStep;
    b_row[v] = kPartial && v == kVecs - 1 ? Op::load_b_n(p, last) : Op::load_b(p);
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    const T* p = kLayout == ALayout::kRows ? a + r * lda : a + r * Op::kStep;
    const typename Op::B a_value = kOdd ? Op::broadcast_odd(p) : Op::broadcast(p);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) acc[r][v] = Op::multiply_add(a_value, b_row[v], acc[r][v]);
  }
}

template <class T, ALayout kLayout, bool kPartial, int kRows, int kVecs>
[[gnu::noinline]] void micro_tile(const TileArgs<T>& args) {
  using Op = Operand<T>;
  using Acc = Vec<compute_t<T>>;
  Acc acc[kRows][kVecs];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) acc[r][v] = zero<compute_t<T>>();
  }

#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) __builtin_prefetch(args.c + r * args.ldc + v * Acc::kWidth, 1, 3);
  }
  const T* a = args.a;
  const T* b = args.b;
  const int64_t lda = args.lda;
  const int64_t last = args.last;
  const int64_t a_step = kLayout == ALayout::kRows ? Op::kStep : lda * Op::kStep;
  const int64_t b_step = args.ldb * Op::kStep;
  for (int64_t k = args.k / Op::kStep; k > 0; --k, a += a_step, b += b_step) {
    tile_step<T, kLayout, kPartial, false>(acc, a, lda, b, last);
  }
  if (Op::kStep == 2 && args.k % 2 != 0) {
    tile_step<T, kLayout, kPartial, true>(acc, a, lda, b, last);
  }

  compute_t<T>* c_row = args.c;
  const int64_t ldc = args.ldc;
  const bool accumulate = args.accumulate;
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r, c_row += ldc) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      compute_t<T>* const c = c_row + v * Acc::kWidth;
      if (kPartial && v == kVecs - 1) {
        store_n(c, accumulate ? acc[r][v] + load_n(c, last) : acc[r][v], last);
      } else {
        store(c, accumulate ? acc[r][v] + load(c) : acc[r][v]);
      }
    }
  }
}

template <class T, ALayout kLayout, bool kPartial, int kVecs, int kRows = tile_rows(kVecs)>
OMNIATTN_INLINE void micro_tile_rows(int64_t rows, const TileArgs<T>& args) {
  if constexpr (kRows == 1) {
    micro_tile<T, kLayout, kPartial, 1, kVecs>(args);
  } else if (rows == kRows) {
    micro_tile<T, kLayout, kPartial, kRows, kVecs>(args);
  } else {
    micro_tile_rows<T, kLayout, kPartial, kVecs, kRows - 1>(rows, args);
  }
}

// All rows of one panel, in tiles whose heights differ by at most one.
template <class T, ALayout kLayout, bool kPartial, int kVecs>
void panel_tiles(int64_t m, TileArgs<T> args) {
  const int64_t tiles = (m + tile_rows(kVecs) - 1) / tile_rows(kVecs);
  const int64_t height = m / tiles;
  const int64_t taller = m % tiles;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t rows = height + (tile < taller ? 1 : 0);
    micro_tile_rows<T, kLayout, kPartial, kVecs>(rows, args);
    args.a += kLayout == ALayout::kRows ? rows * args.lda : rows * Operand<T>::kStep;
    args.c += rows * args.ldc;
  }
}

template <class T, ALayout kLayout, int kVecs = kTileVecs>
OMNIATTN_INLINE void partial_panel_tiles(int64_t m, int64_t vecs, const TileArgs<T>& args) {
  if constexpr (kVecs == 1) {
    panel_tiles<T, kLayout, true, 1>(m, args);
  } else if (vecs == kVecs) {
    panel_tiles<T, kLayout, true, kVecs>(m, args);
  } else {
    partial_panel_tiles<T, kLayout, kVecs - 1>(m, vecs, args);
  }
}

// lda counts elements for row-major A, columns (pairs of bf16) for transposed A.
template <class T, ALayout kLayout = ALayout::kRows>
void gemm_tile(const T* a, int64_t lda, Panels<T> b, compute_t<T>* c, int64_t ldc, int64_t m,
               int64_t n, int64_t k, bool accumulate) {
  if (m <= 0) return;
  constexpr int64_t kWidth = Vec<compute_t<T>>::kWidth;
  TileArgs<T> args{a, lda, b.data, b.row_stride, c, ldc, k, kWidth, accumulate};
  for (; n >= kPanelCols<T>; n -= kPanelCols<T>) {
    panel_tiles<T, kLayout, false, kTileVecs>(m, args);
    args.b += b.panel_stride * Operand<T>::kStep;
    args.c += kPanelCols<T>;
  }
  if (n > 0) {
    const int64_t vecs = (n + kWidth - 1) / kWidth;
    args.last = n - (vecs - 1) * kWidth;
    partial_panel_tiles<T, kLayout>(m, vecs, args);
  }
}

// ---- packing ------------------------------------------------------------------------------------
// From storage type S to operand type T. Both helpers fill ceil(n / kPanelCols) panels, with zeros
// behind column n and behind an odd k.

template <class T>
OMNIATTN_INLINE int64_t packed_elements(int64_t k, int64_t n) {
  const int64_t panels = (n + kPanelCols<T> - 1) / kPanelCols<T>;
  return panels * kPanelCols<T> * k_steps<T>(k) * Operand<T>::kStep;
}

// (rows, cols) row-major -> [ceil(rows / kStep)][stride][kStep], zeros up to `padded` columns.
template <class T, class S>
void pack_rows(const S* x, int64_t ldx, int64_t rows, int64_t cols, T* out, int64_t stride,
               int64_t padded) {
  constexpr int64_t kStep = Operand<T>::kStep;
  constexpr int64_t kWidth = Vec<compute_t<T>>::kWidth;
  for (int64_t row = 0; row < rows; row += kStep, x += kStep * ldx, out += kStep * stride) {
    for (int64_t i = 0; i < padded; i += kWidth) {
      if constexpr (kStep == 1) {
        store_n(out + i, load_n(x + i, cols - i), padded - i);
      } else {
        const int64_t second = row + 1 < rows ? cols - i : 0;
        store_pairs_n(out + i * kStep, load_pairs_of_rows_n(x + i, cols - i, x + ldx + i, second),
                      padded - i);
      }
    }
  }
}

// B given as (k, n) row-major.
template <class T, class S>
void pack_b(const S* b, int64_t ldb, int64_t k, int64_t n, T* packed) {
  constexpr int64_t kCols = kPanelCols<T>;
  for (int64_t panel = 0; panel < n; panel += kCols) {
    pack_rows(b + panel, ldb, k, n - panel < kCols ? n - panel : kCols, packed, kCols, kCols);
    packed += kCols * k_steps<T>(k) * Operand<T>::kStep;
  }
}

// One kWidth x kWidth block of B^T, from rows b[0 .. rows) of which `terms` elements are left, to
// `steps` rows of a panel.
template <class T, class S>
OMNIATTN_INLINE void pack_transposed_block(const S* b, int64_t ldb, int64_t rows, int64_t terms,
                                           int64_t steps, T* out) {
  constexpr int kWidth = Vec<compute_t<T>>::kWidth;
  Vec<compute_t<T>> block[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    const int64_t left = i < rows ? terms : 0;
    if constexpr (Operand<T>::kStep == 1) {
      block[i] = load_n(b + i * ldb, left);
    } else {
      block[i] = as_lanes(load_terms_n(b + i * ldb, left));
    }
  }
  transpose(block);
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    if (i >= steps) break;
    T* p = out + i * kPanelCols<T> * Operand<T>::kStep;
    if constexpr (Operand<T>::kStep == 1) {
      store(p, block[i]);
    } else {
      store_pairs(p, as_pairs(block[i]));
    }
  }
}

// B given transposed, as (n, k) row-major.
template <class T, class S>
void pack_bt(const S* b, int64_t ldb, int64_t k, int64_t n, T* packed) {
  constexpr int64_t kStep = Operand<T>::kStep;
  constexpr int64_t kWidth = Vec<compute_t<T>>::kWidth;
  const int64_t steps = k_steps<T>(k);
  for (int64_t panel = 0; panel < n; panel += kPanelCols<T>) {
    for (int64_t column = panel; column < panel + kPanelCols<T>; column += kWidth) {
      T* out = packed + (column - panel) * kStep;
      for (int64_t step = 0; step < steps; step += kWidth) {
        pack_transposed_block<T>(b + column * ldb + step * kStep, ldb, n - column, k - step * kStep,
                                 steps - step, out);
        out += kWidth * kPanelCols<T> * kStep;
      }
    }
    packed += kPanelCols<T> * steps * kStep;
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
