// Matrix products over torch's thread pool, for `linear` and the ops built on it; defined in
// gemm_cpu.cpp. On CUDA products are torch's.
#pragma once

#include "kernels/gemm/gemm.h"
#include "ops/tensor.h"

namespace omniattn::ops::gemm {

// A matrix of a product: a row-major tensor or its transpose.
struct Operand {
  const void* data;
  DType dtype;
  int64_t stride;
  bool transposed = false;
};

// c (m, n) of c_dtype, rows at a distance of ldc, = a (m, k) b (k, n) + bias (n).
void multiply(const Operand& a, const Operand& b, const void* bias, void* c, DType c_dtype,
              int64_t ldc, int64_t m, int64_t n, int64_t k, bool accumulate = false);

// out (cols) = sum over the rows of x.
void sum_columns(const Rows& x, DType dtype, void* out);

}  // namespace omniattn::ops::gemm
