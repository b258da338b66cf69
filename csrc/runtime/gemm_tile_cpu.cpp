// The register tiles of gemm_tile.h, compiled once for all kernels of an ISA.
#include "runtime/gemm_tile.h"

#include "runtime/assert.h"
#include "runtime/dispatch.h"
#if defined(OMNIATTN_PAIRS)
#include "runtime/tile_pieces.h"
#include "runtime/tile_product.h"
#endif

namespace omniattn::OMNIATTN_ISA {
namespace {

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
  const T* a = args.a;
  const T* b = args.b;
  compute_t<T>* c_row = args.c;
  const int64_t lda = args.lda;
  const int64_t ldc = args.ldc;
  const int64_t last = args.last;
  // Tells the compiler the range of `last`, so that it makes the mask before the loop.
  if (last < 1 || last > Acc::kWidth) __builtin_unreachable();
  const bool accumulate = args.accumulate;

  // Prefetches C, which is read only at the end.
  Acc acc[kRows][kVecs];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      __builtin_prefetch(c_row + r * ldc + v * Acc::kWidth, 1, 3);
      acc[r][v] = zero<compute_t<T>>();
    }
  }

  const int64_t a_step = kLayout == ALayout::kRows ? Op::kStep : lda * Op::kStep;
  const int64_t b_step = args.ldb * Op::kStep;
#pragma GCC unroll 2
  for (int64_t k = args.k / Op::kStep; k > 0; --k, a += a_step, b += b_step) {
    tile_step<T, kLayout, kPartial, false>(acc, a, lda, b, last);
  }
  if (Op::kStep == 2 && args.k % 2 != 0) {
    tile_step<T, kLayout, kPartial, true>(acc, a, lda, b, last);
  }

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

// Splits rows into tiles whose heights differ by at most one.
struct Heights {
  int64_t tiles, least, taller;  // `taller` of the tiles have one row more

  OMNIATTN_INLINE Heights(int64_t rows, int64_t most) : tiles((rows + most - 1) / most) {
    least = rows / tiles;
    taller = rows - least * tiles;
  }
};

// Computes all rows of one panel. `args` is a reference: a copy would be written in words and read
// back in vectors at once, which waits for the stores and took up to a tenth of a recurrence.
template <class T, ALayout kLayout, bool kPartial, int kVecs>
OMNIATTN_INLINE void panel_tiles(const Heights& heights, TileArgs<T>& args, const T* a,
                                 compute_t<T>* c) {
  for (int64_t tile = 0; tile < heights.tiles; ++tile) {
    const int64_t rows = heights.least + (tile < heights.taller ? 1 : 0);
    args.a = a, args.c = c;
    micro_tile_rows<T, kLayout, kPartial, kVecs>(rows, args);
    a += kLayout == ALayout::kRows ? rows * args.lda : rows * Operand<T>::kStep;
    c += rows * args.ldc;
  }
}

template <class T, ALayout kLayout, int kVecs = kTileVecs>
OMNIATTN_INLINE void partial_panel_tiles(int64_t m, int64_t vecs, TileArgs<T>& args, const T* a,
                                         compute_t<T>* c) {
  if constexpr (kVecs > 1) {
    if (vecs < kVecs) return partial_panel_tiles<T, kLayout, kVecs - 1>(m, vecs, args, a, c);
  }
  panel_tiles<T, kLayout, true, kVecs>({m, tile_rows(kVecs)}, args, a, c);
}

// Computes all of C.
template <class T, ALayout kLayout>
void multiply_in_vectors(const T* a, int64_t lda, const Panels<T>& b, compute_t<T>* c, int64_t ldc,
                         int64_t m, int64_t n, int64_t k, bool accumulate) {
  constexpr int64_t kWidth = Vec<compute_t<T>>::kWidth;
  TileArgs<T> args{a, lda, b.data, b.row_stride, c, ldc, k, kWidth, accumulate};
  if (n >= kPanelCols<T>) {
    const Heights heights(m, tile_rows(kTileVecs));
    for (; n >= kPanelCols<T>; n -= kPanelCols<T>, c += kPanelCols<T>) {
      panel_tiles<T, kLayout, false, kTileVecs>(heights, args, a, c);
      args.b += b.panel_stride * Operand<T>::kStep;
    }
  }
  if (n > 0) {
    const int64_t vecs = (n + kWidth - 1) / kWidth;
    args.last = n - (vecs - 1) * kWidth;
    partial_panel_tiles<T, kLayout>(m, vecs, args, a, c);
  }
}

}  // namespace

template <class T, ALayout kLayout, class A>
void gemm_tile(const A* a, int64_t lda, const Panels<T>& b, compute_t<T>* c, int64_t ldc, int64_t m,
               int64_t n, int64_t k, bool accumulate) {
  if (m <= 0) return;
  OMNIATTN_ASSERT(n >= 0 && k >= 0 && (m == 1 || ldc >= n));
  OMNIATTN_ASSERT(n == 0 || k == 0 || (a != nullptr && b.data != nullptr && c != nullptr));
#if defined(OMNIATTN_PAIRS)
  if constexpr (!std::is_same_v<A, T>) {
    multiply_pieces_on_tiles<kLayout>(a, lda, b, c, ldc, m, n, k, accumulate);
  } else if constexpr (kOnTiles) {
    multiply_on_tiles<kLayout>(a, lda, b, c, ldc, m, n, k, accumulate);
  } else
#endif
  {
    multiply_in_vectors<T, kLayout>(a, lda, b, c, ldc, m, n, k, accumulate);
  }
}

// Takes the addresses of the tiles of every type that the ISA multiplies, which makes this file
// compile them.
[[gnu::used]] static void instantiate(DType dtype, const void** tiles) {
  dispatch(dtype, [&]<class S>(S) {
    using T = operand_t<S>;
    tiles[0] = reinterpret_cast<const void*>(&gemm_tile<T, ALayout::kRows>);
    tiles[1] = reinterpret_cast<const void*>(&gemm_tile<T, ALayout::kTransposed>);
    if constexpr (kSplits<T>) {
      tiles[2] = reinterpret_cast<const void*>(&gemm_tile<T, ALayout::kRows, computed_t<T>>);
      tiles[3] = reinterpret_cast<const void*>(&gemm_tile<T, ALayout::kTransposed, computed_t<T>>);
    }
  });
}

}  // namespace omniattn::OMNIATTN_ISA
