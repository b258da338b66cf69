#include "kernels/gemm/gemm.h"

#include "kernels/gemm/gemm_pieces.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/dot_rows.h"
#include "runtime/gemm_tile.h"
#include "runtime/row.h"
#include "runtime/transpose.h"
#include "semantics/arith.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Rows per item: few enough to give every thread work, enough to make packing B cheap.
constexpr int64_t kBlockM = 96;
constexpr int64_t kMaxItemRows = 1024;
constexpr int64_t kEnoughItems = 8;
constexpr int64_t kDotItem = 64;

bool is_dot(const GemmParams& p) {
  return p.m <= kMaxDotRows && !p.as_many_rows && p.b_transposed && !p.a_transposed &&
         !p.accumulate;
}

// True if A is multiplied in place instead of being packed for each block of columns.
bool reads_a_in_place(const GemmParams& p) {
  return !p.a_transposed && multiplies(kIsa, p.a_dtype);
}

// The grid of blocks of C.
struct Grid {
  int64_t rows, cols;              // of one block
  int64_t row_blocks, col_blocks;  // items = row_blocks * col_blocks
  int64_t depth;                   // rows of a block of B

  // A block of B takes 256 KiB of fp32 and shares an L2 of 1 MiB or more with 96 rows of A. Both
  // push C out of L2; a deep block of B moves C less often, a wide one packs A less often. With
  // tiles, which are faster than L3 and copy A, blocks are deep and wide: 512 KiB of bf16.
  explicit Grid(const GemmParams& p) {
    const bool deep = reads_a_in_place(p);
    depth = kOnTiles ? 1024 : deep ? 512 : 256;
    col_blocks = ceil_div(p.n, deep && !kOnTiles ? 128 : 256);
    cols = round_up(ceil_div(p.n, larger(col_blocks, 1)), kPanelCols<float>);
    col_blocks = ceil_div(p.n, larger(cols, 1));
    const int64_t wanted = ceil_div(kEnoughItems, larger(col_blocks, 1));
    row_blocks = larger(ceil_div(p.m, kMaxItemRows), smaller(wanted, p.m / kBlockM));
    rows = round_up(ceil_div(p.m, larger(row_blocks, 1)), kOnTiles ? kTileRows : 1);
    row_blocks = ceil_div(p.m, larger(rows, 1));
  }
};

// Calls f with a value of the operand type T of a product.
template <class F>
OMNIATTN_INLINE void dispatch_operand(const GemmParams& p, const F& f) {
  if constexpr (has_all_kernels(kIsa)) {
    dispatch_compute(p.b_dtype, f);
  } else {
    dispatch(p.b_dtype, f);
  }
}

// Blocked.

template <class T>
struct Workspace {
  T* b;             // depth x cols of the grid, in panels
  T* a;             // kBlockM x depth, if A cannot be read in place
  compute_t<T>* c;  // rows x cols of the grid, if C is narrower than the sums

  static int64_t b_bytes(const Grid& grid) {
    return packed_elements<T>(grid.depth, grid.cols) * static_cast<int64_t>(sizeof(T));
  }
  static int64_t a_bytes(const Grid& grid) {
    return kBlockM * grid.depth * static_cast<int64_t>(sizeof(T));
  }

  Workspace(void* memory, const Grid& grid) {
    char* const p = static_cast<char*>(memory);
    b = reinterpret_cast<T*>(p);
    a = reinterpret_cast<T*>(p + b_bytes(grid));
    c = reinterpret_cast<compute_t<T>*>(p + b_bytes(grid) + a_bytes(grid));
  }
  static int64_t bytes(const GemmParams& p, const Grid& grid) {
    const bool in_place = p.c_dtype == TypeTraits<compute_t<T>>::kDType;
    const int64_t sums = in_place ? 0 : grid.rows * grid.cols;
    return b_bytes(grid) + a_bytes(grid) + sums * static_cast<int64_t>(sizeof(compute_t<T>));
  }
};

// Calls f(typed pointer to element `offset` of x) for the dtypes that widen to T and for T itself.
template <class T, class F>
OMNIATTN_INLINE void with_elements(DType dtype, const void* x, int64_t offset, const F& f) {
  dispatch(dtype, [&]<class S>(S) {
    if constexpr (TypeTraits<T>::kDType == TypeTraits<S>::kDType ||
                  (TypeTraits<T>::kDType == DType::f32 && sizeof(S) == 2)) {
      f(static_cast<const S*>(x) + offset);
    } else {
      OMNIATTN_FAIL("gemm: an operand has a dtype that does not widen to the product's");
    }
  });
}

template <class T>
void pack_b_block(const GemmParams& p, int64_t k, int64_t rows, int64_t n, int64_t cols,
                  T* packed) {
  const int64_t offset = p.b_transposed ? n * p.ldb + k : k * p.ldb + n;
  with_elements<T>(p.b_dtype, p.b, offset, [&](const auto* b) {
    if (p.b_transposed) {
      pack_bt(b, p.ldb, rows, cols, packed);
    } else {
      pack_b(b, p.ldb, rows, cols, packed);
    }
  });
}

// C block (+)= fp32 rows of A times the packed block of B; bf16 products narrow these rows.
template <class T>
void multiply_computed_rows(const GemmParams& p, int64_t row, int64_t rows, int64_t k,
                            int64_t depth, int64_t cols, const Workspace<T>& work,
                            const Panels<T>& b, float* c, int64_t ldc, bool accumulate) {
  const auto* const a = static_cast<const float*>(p.a);
  if constexpr (kSplits<T>) {
    const float* const first = p.a_transposed ? a + k * p.lda + row : a + row * p.lda + k;
    const auto multiply = p.a_transposed ? &gemm_tile<T, ALayout::kTransposed, float>
                                         : &gemm_tile<T, ALayout::kRows, float>;
    multiply(first, p.lda, b, c, ldc, rows, cols, depth, accumulate);
  } else if (p.a_transposed) {
    pack_rows(a + k * p.lda + row, p.lda, depth, rows, work.a, kBlockM, rows);
    gemm_tile<T, ALayout::kTransposed>(work.a, kBlockM, b, c, ldc, rows, cols, depth, accumulate);
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      const float* const from = a + (row + r) * p.lda + k;
      T* const to = work.a + r * depth;
      for_row<float>(depth, [&](int64_t i, auto part) { part.store(to + i, part.load(from + i)); });
    }
    gemm_tile<T>(work.a, depth, b, c, ldc, rows, cols, depth, accumulate);
  }
}

// C block (+)= A[row .. row + rows) * the packed block of B that starts at k.
template <class T>
void multiply_rows(const GemmParams& p, int64_t row, int64_t rows, int64_t k, int64_t depth,
                   int64_t cols, const Workspace<T>& work, compute_t<T>* c, int64_t ldc,
                   bool accumulate) {
  const Panels<T> b = packed_panels<T>(work.b, depth);
  if constexpr (Operand<T>::kStep == 2) {
    if (p.a_dtype == DType::f32) {
      return multiply_computed_rows(p, row, rows, k, depth, cols, work, b, c, ldc, accumulate);
    }
  }
  if (p.a_transposed) {
    with_elements<T>(p.a_dtype, p.a, k * p.lda + row, [&](const auto* a) {
      pack_rows(a, p.lda, depth, rows, work.a, kBlockM, rows);
    });
    gemm_tile<T, ALayout::kTransposed>(work.a, kBlockM, b, c, ldc, rows, cols, depth, accumulate);
  } else if (p.a_dtype == TypeTraits<T>::kDType) {
    const T* const a = static_cast<const T*>(p.a) + row * p.lda + k;
    gemm_tile<T>(a, p.lda, b, c, ldc, rows, cols, depth, accumulate);
  } else if constexpr (Operand<T>::kStep == 1) {
    with_elements<T>(p.a_dtype, p.a, row * p.lda + k, [&](const auto* a) {
      pack_rows(a, p.lda, rows, depth, work.a, depth, depth);
    });
    gemm_tile<T>(work.a, depth, b, c, ldc, rows, cols, depth, accumulate);
  } else {
    OMNIATTN_FAIL("gemm: rows must have the dtype that the product multiplies");
  }
}

template <class C>
void start_rows(const GemmParams& p, int64_t n, int64_t rows, int64_t cols, C* c, int64_t ldc) {
  if (p.bias != nullptr) {
    with_elements<C>(p.b_dtype, p.bias, n, [&](const auto* bias) {
      for (int64_t r = 0; r < rows; ++r) {
        for_row<C>(cols,
                   [&](int64_t i, auto part) { part.store(c + r * ldc + i, part.load(bias + i)); });
      }
    });
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      for_row<C>(cols, [&](int64_t i, auto part) { part.store(c + r * ldc + i, Vec<C>(C(0))); });
    }
  }
}

template <class T>
void run_item(const GemmParams& p, const Grid& grid, int64_t item, const Workspace<T>& work) {
  using C = compute_t<T>;
  const int64_t n = item % grid.col_blocks * grid.cols;
  const int64_t cols = smaller(grid.cols, p.n - n);
  const int64_t m = item / grid.col_blocks * grid.rows;
  const int64_t rows = smaller(grid.rows, p.m - m);
  const bool in_place = p.c_dtype == TypeTraits<C>::kDType;
  C* const c = in_place ? static_cast<C*>(p.c) + m * p.ldc + n : work.c;
  const int64_t ldc = in_place ? p.ldc : grid.cols;

  const bool started = p.bias != nullptr || p.k == 0;
  if (started && !p.accumulate) start_rows(p, n, rows, cols, c, ldc);
  for (int64_t k = 0; k < p.k; k += grid.depth) {
    const int64_t depth = smaller(grid.depth, p.k - k);
    pack_b_block(p, k, depth, n, cols, work.b);
    for (int64_t r = 0; r < rows; r += kBlockM) {
      multiply_rows(p, m + r, smaller(kBlockM, rows - r), k, depth, cols, work, c + r * ldc, ldc,
                    k > 0 || started || p.accumulate);
    }
  }
  if (!in_place) {
    dispatch(p.c_dtype, [&]<class S>(S) {
      if constexpr (sizeof(S) == 2 && sizeof(C) == 4) {
        if constexpr (kSplits<T>) {
          if (p.c_transposed) {
            return store_transposed(c, ldc, rows, cols, 1.0f, static_cast<S*>(p.c) + n * p.ldc + m,
                                    p.ldc);
          }
        }
        for (int64_t r = 0; r < rows; ++r) {
          S* const out = static_cast<S*>(p.c) + (m + r) * p.ldc + n;
          for_row<S>(
              cols, [&](int64_t i, auto part) { part.store(out + i, part.load(c + r * ldc + i)); });
        }
      } else {
        OMNIATTN_FAIL("gemm: sums can be narrowed to 16 bits only");
      }
    });
  }
}

// Products in pieces of bf16.

constexpr bool kMakesPieces = kOnTiles && multiplies(kIsa, DType::bf16);

#if defined(OMNIATTN_PAIRS)
template <class T>
PieceWorkspace<T> piece_workspace(const GemmParams& p, const Grid& grid, void* memory) {
  return {memory, p, piece_depth(grid.depth, p.split_bf16), grid.rows, grid.cols};
}

template <class T>
void run_in_pieces(const GemmParams& p, void* memory, int64_t begin, int64_t end) {
  const Grid grid(p);
  const PieceWorkspace<T> work = piece_workspace<T>(p, grid, memory);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item % grid.col_blocks * grid.cols, cols = smaller(grid.cols, p.n - n);
    const int64_t m = item / grid.col_blocks * grid.rows, rows = smaller(grid.rows, p.m - m);
    p.split_bf16 == 2 ? multiply_pieces<2>(p, m, rows, n, cols, work)
                      : multiply_pieces<3>(p, m, rows, n, cols, work);
    finish_pieces(p, m, rows, n, cols, work.sums, work.cols);
  }
}
#endif

// Few rows.

// Items [begin, end) of kDotItem columns each.
template <class SA, class SB>
void dot_columns(const GemmParams& p, int64_t begin, int64_t end) {
  using C = compute_t<SB>;
  const int64_t first = begin * kDotItem, last = smaller(end * kDotItem, p.n);
  const SB* const b = static_cast<const SB*>(p.b) + first * p.ldb;
  dot_rows(static_cast<const SA*>(p.a), p.lda, p.m, b, p.ldb, last - first, p.k,
           [&](int64_t r, int64_t n, C sum) {
             n += first;
             sum += p.bias != nullptr ? widen(static_cast<const SB*>(p.bias)[n]) : C(0);
             if (p.c_dtype == TypeTraits<C>::kDType) {
               static_cast<C*>(p.c)[r * p.ldc + n] = sum;
             } else {
               static_cast<SB*>(p.c)[r * p.ldc + n] = narrow<SB>(sum);
             }
           });
}

void run_dot(const GemmParams& p, int64_t begin, int64_t end) {
  dispatch(p.b_dtype, [&]<class SB>(SB) {
    if (p.a_dtype == p.b_dtype) {
      dot_columns<SB, SB>(p, begin, end);
    } else {
      dot_columns<compute_t<SB>, SB>(p, begin, end);
    }
  });
}

// Entries.

int64_t items(const GemmParams& p) {
  if (is_dot(p)) return ceil_div(p.n, kDotItem);
  const Grid grid(p);
  return grid.row_blocks * grid.col_blocks;
}

int64_t workspace_bytes(const GemmParams& p) {
  if (is_dot(p)) return 0;
  int64_t bytes = 0;
#if defined(OMNIATTN_PAIRS)
  if constexpr (kMakesPieces) {
    if (p.split_bf16 > 0) return piece_workspace<bf16>(p, Grid(p), nullptr).bytes;
  }
#endif
  dispatch_operand(p, [&]<class T>(T) { bytes = Workspace<T>::bytes(p, Grid(p)); });
  return bytes;
}

void run(const GemmParams& p, void* workspace, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, items(p));
  if (is_dot(p)) return run_dot(p, begin, end);
  const TileScope tiles;
#if defined(OMNIATTN_PAIRS)
  if constexpr (kMakesPieces) {
    if (p.split_bf16 > 0) return run_in_pieces<bf16>(p, workspace, begin, end);
  }
#endif
  dispatch_operand(p, [&]<class T>(T) {
    const Grid grid(p);
    const Workspace<T> work(workspace, grid);
    for (int64_t item = begin; item < end; ++item) run_item(p, grid, item, work);
  });
}

// Adds sums of 64 rows to the total, so that the rounding error grows with rows / 64.
template <class T>
void column_sums(const T* x, int64_t stride, int64_t rows, T* out, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  for_row<T>(end - begin, [&](int64_t i, auto part) {
    Vec<C> total = zero<C>();
    for (int64_t first = 0; first < rows; first += 64) {
      Vec<C> sum = zero<C>();
      for (int64_t r = first; r < smaller(first + 64, rows); ++r) {
        sum += part.load(x + r * stride + begin + i);
      }
      total += sum;
    }
    part.store(out + begin + i, total);
  });
}

void column_sums_any(DType dtype, const void* x, int64_t stride, int64_t rows, void* out,
                     int64_t begin, int64_t end) {
  OMNIATTN_ASSERT(0 <= begin && begin <= end);
  OMNIATTN_ASSERT_ROWS(x, stride, rows, end);
  dispatch(dtype, [&]<class T>(T) {
    column_sums(static_cast<const T*>(x), stride, rows, static_cast<T*>(out), begin, end);
  });
}

}  // namespace

extern const GemmKernels gemm_kernels_table;
const GemmKernels gemm_kernels_table{items, workspace_bytes, run, column_sums_any,
                                     kMakesPieces ? exponents : nullptr};

}  // namespace omniattn::OMNIATTN_ISA
