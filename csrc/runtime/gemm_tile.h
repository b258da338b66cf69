// Register-tile matrix product for blocks that fit in L1 and L2:
//
//   gemm_tile<T, layout>(a, lda, b, c, ldc, m, n, k, accumulate)     C (+)= A B
//
//   A  (m, k) row-major, read by broadcast;
//      with ALayout::kTransposed (k, m) row-major, read down its columns
//   B  (k, n) as column panels: packed_panels(...) of pack_b or pack_bt, or row_panels(...) of rows
//   C  (m, n) row-major in compute_t<T>
//
// T is the operand type: double, float, or a 16-bit type that the ISA multiplies (runtime/isa.h).
// Other storage types are widened to float when they are packed; operand_t<S> is the type for S.
// 16-bit operands hold pairs of consecutive k. A is plain rows, since row-major order already has
// such pairs; B, and A when transposed, are [ceil(k / 2)][columns][2], padded with zero if k is
// odd. A may be of computed_t<T> instead, as rows without pairs.
//
// A tile keeps kTileRows x kTileVecs accumulators in registers: 6 x 4 of the 32 AVX-512 or NEON
// registers, 6 x 2 of 16 elsewhere. Narrower remainders of n use taller tiles, so that at least 8
// accumulators hide the latency of the multiply-add. Rows are split evenly over tiles. Tiles are
// compiled once per ISA, in gemm_tile_cpu.cpp.
//
// On AMX (tile_product.h) a block of C is 32 x 32. The caller keeps a TileScope alive, and columns
// of B can be read up to a multiple of 16.
#pragma once

#include <type_traits>

#include "runtime/isa.h"
#include "runtime/tiles.h"
#include "runtime/vec.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

#if defined(OMNIATTN_PAIRS) || defined(__aarch64__)
constexpr int kTileAccumulators = 24;
constexpr int kTileVecs = 4;
#else
constexpr int kTileAccumulators = 12;
constexpr int kTileVecs = 2;
#endif

// At most 8 rows: taller tiles need more row addresses than there are registers.
constexpr int tile_rows(int vecs) {
  return kTileAccumulators / vecs < 8 ? kTileAccumulators / vecs : 8;
}

// True if products use AMX tiles.
constexpr bool kOnTiles = multiplies_on_tiles(kIsa);
// Number of rows of C to compute per call, for callers that call for few rows at a time.
constexpr int64_t kTileRows = kOnTiles ? 32 : tile_rows(kTileVecs);

// Operand type in which elements of storage type S are multiplied.
template <class S>
using operand_t = std::conditional_t<multiplies(kIsa, TypeTraits<S>::kDType), S, compute_t<S>>;

// True if an A that a kernel computed (weights, gradients) stays fp32 next to operands T, split by
// the tiles into pieces (tile_pieces.h): fp16 lacks the range of fp32, bf16 has it.
template <class T>
constexpr bool kSplits = std::is_same_v<T, f16>;
// Type of an A that a kernel computed.
template <class T>
using computed_t = std::conditional_t<kSplits<T>, float, T>;

// Operations of a register tile on one step of k: one element, or one pair of 16-bit numbers.
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

#if defined(OMNIATTN_PAIRS)
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
template <>
struct Operand<f16> {  // multiplied by AMX tiles only
  static constexpr int kStep = 2;
};
// Pairs the elements of two rows of floats, narrowed to bf16.
OMNIATTN_INLINE PairVec load_pairs_of_rows_n(const float* first, int64_t n, const float* second,
                                             int64_t n_second) {
  return narrow_to_pairs<bf16>(load_n(first, n), load_n(second, n_second));
}
#endif

// Number of columns in a panel.
template <class T>
constexpr int64_t kPanelCols = kTileVecs * Vec<compute_t<T>>::kWidth;

template <class T>
OMNIATTN_INLINE int64_t k_steps(int64_t k) {
  return (k + Operand<T>::kStep - 1) / Operand<T>::kStep;
}

}  // namespace

// B as panels of kPanelCols columns. Strides are in columns (pairs of 16-bit numbers).
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

// lda counts elements of a row-major A, columns (or pairs, where A has them) of a transposed A.
template <class T, ALayout kLayout = ALayout::kRows, class A = T>
void gemm_tile(const A* a, int64_t lda, const Panels<T>& b, compute_t<T>* c, int64_t ldc, int64_t m,
               int64_t n, int64_t k, bool accumulate);

namespace {

// Packing.
// Converts from storage type S to operand type T. Both helpers fill ceil(n / kPanelCols) panels,
// with zeros past column n and past an odd k.

template <class T>
OMNIATTN_INLINE int64_t packed_elements(int64_t k, int64_t n) {
  const int64_t panels = (n + kPanelCols<T> - 1) / kPanelCols<T>;
  return panels * kPanelCols<T> * k_steps<T>(k) * Operand<T>::kStep;
}

// (rows, cols) row-major -> [ceil(rows / kStep)][stride][kStep], zeros up to `padded` columns.
template <class T, class S>
void pack_rows(const S* x, int64_t ldx, int64_t rows, int64_t cols, T* out, int64_t stride,
               int64_t padded) {
  static_assert(!std::is_same_v<T, f16> || std::is_same_v<S, f16>);
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

// Transposes one kWidth x kWidth block of B^T, from rows b[0 .. rows) with `terms` remaining
// elements to `steps` rows of `stride` columns.
template <class T, class S>
OMNIATTN_INLINE void pack_transposed_block(const S* b, int64_t ldb, int64_t rows, int64_t terms,
                                           int64_t steps, T* out, int64_t stride) {
  constexpr int kWidth = Vec<compute_t<T>>::kWidth;
  Vec<compute_t<T>> block[kWidth];
  const bool whole = rows >= kWidth && terms >= kWidth;
  if (Operand<T>::kStep == 1 && whole) {  // masked loads took twice as long as all the rest on AVX2
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) block[i] = load(b + i * ldb);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      const int64_t left = i < rows ? terms : 0;
      if constexpr (Operand<T>::kStep == 1) {
        block[i] = load_n(b + i * ldb, left);
      } else {
        block[i] = as_lanes(load_terms_n(b + i * ldb, left));
      }
    }
  }
  transpose(block);
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    if (i >= steps) break;
    T* p = out + i * stride * Operand<T>::kStep;
    if constexpr (Operand<T>::kStep == 1) {
      store(p, block[i]);
    } else {
      store_pairs(p, as_pairs(block[i]));
    }
  }
}

// B given transposed, as (n, k) row-major. Products of n columns read panels only up to a multiple
// of kWidth; a caller that makes no wider ones passes it as `filled`.
template <class T, class S>
void pack_bt(const S* b, int64_t ldb, int64_t k, int64_t n, T* packed, int64_t filled = INT64_MAX) {
  constexpr int64_t kStep = Operand<T>::kStep;
  constexpr int64_t kWidth = Vec<compute_t<T>>::kWidth;
  const int64_t steps = k_steps<T>(k);
  for (int64_t panel = 0; panel < n; panel += kPanelCols<T>) {
    const int64_t end = filled - panel < kPanelCols<T> ? filled : panel + kPanelCols<T>;
    for (int64_t column = panel; column < end; column += kWidth) {
      T* out = packed + (column - panel) * kStep;
      for (int64_t step = 0; step < steps; step += kWidth) {
        pack_transposed_block<T>(b + column * ldb + step * kStep, ldb, n - column, k - step * kStep,
                                 steps - step, out, kPanelCols<T>);
        out += kWidth * kPanelCols<T> * kStep;
      }
    }
    packed += kPanelCols<T> * steps * kStep;
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
