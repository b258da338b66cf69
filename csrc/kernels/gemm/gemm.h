// Matrix product C = A B + bias for matrices larger than the caches, and the column sums that the
// backward of `linear` needs.
//
//   A (m, k), B (k, n), C (m, n), each row-major; A and B may be stored transposed
//
// Blocked as in Goto and van de Geijn 2008 (doi 10.1145/1356052.1356053): a work item is a block of
// C. For each block of k, its part of B is packed into panels that stay in L2, and the register
// tiles of runtime/gemm_tile.h run over rows of A. Each item packs its own part of B, which costs
// 25 / rows of its time; in return no thread ever waits for another. Sums are in compute precision,
// in an order that depends on k alone.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"

namespace omniattn {

// Up to this many rows, B^T is streamed once and multiplied with all rows of A;
// an item is a group of columns.
inline constexpr int64_t kMaxDotRows = 4;

struct GemmParams {
  // A and B have one dtype, or A has the compute type of B's dtype: bf16 products narrow such an A,
  // fp16 products split it (runtime/tile_pieces.h). C has the dtype of A or B, or the compute type.
  DType a_dtype, b_dtype, c_dtype;
  int64_t m, n, k;
  const void* a;     // (m, k), or (k, m) where a_transposed
  const void* b;     // (k, n), or (n, k) where b_transposed
  const void* bias;  // (n) of b_dtype, or null
  void* c;           // (m, n)
  int64_t lda, ldb, ldc;
  bool a_transposed, b_transposed;
  bool accumulate;  // C += A B; C is in compute type and there is no bias
  // C is (n, m), in a type narrower than the sums; needs tiles with fp32 A and fp16 B.
  bool c_transposed = false;

  // 2 or 3: fp32 in this many pieces of bf16 (gemm_pieces.h), on levels with bf16 tiles,
  // for more than kMaxDotRows rows. Needs the exponents of the rows of A and of the columns
  // of B, which must all be finite.
  int64_t split_bf16 = 0;
  const float *a_exponents = nullptr, *b_exponents = nullptr;

  // Few rows are multiplied in the order of many.
  bool as_many_rows = false;
};
static_assert(std::is_trivially_copyable_v<GemmParams>);

struct GemmKernels {
  int64_t (*items)(const GemmParams&);
  int64_t (*workspace_bytes)(const GemmParams&);  // per thread
  void (*run)(const GemmParams&, void* workspace, int64_t begin, int64_t end);

  // out (cols) = sum over rows of x (rows, cols), for columns [begin, end).
  void (*column_sums)(DType dtype, const void* x, int64_t stride, int64_t rows, void* out,
                      int64_t begin, int64_t end);

  // Exponents of rows or columns [begin, end) of x (rows, cols), for products in pieces; infinity
  // if an element is not finite. Null without tiles of bf16.
  void (*exponents)(const float* x, int64_t stride, int64_t rows, int64_t cols, bool of_columns,
                    float* out, int64_t begin, int64_t end);
};

OMNIATTN_PRODUCT_KERNEL_TABLE(GemmKernels, gemm_kernels)

}  // namespace omniattn
