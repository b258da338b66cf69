// Matrix products on torch's thread pool, for `linear` and the ops built on it; defined in
// gemm_cpu.cpp. On CUDA the products are torch's (gemm_cuda.cpp).
#pragma once

#include <span>
#include <vector>

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

// c (m, n) of c_dtype with row stride ldc = a (m, k) b (k, n) + bias (n). With split_bf16 = 2 or 3,
// tiles multiply fp32 in pieces of bf16 (kernels/gemm/gemm_pieces.h) if all elements are finite.
void multiply(const Operand& a, const Operand& b, const void* bias, void* c, DType c_dtype,
              int64_t ldc, int64_t m, int64_t n, int64_t k, bool accumulate = false,
              int64_t split_bf16 = 0);

// Runs all products; their operands must have the same dtypes.
void multiply_each(std::span<const GemmParams> products);
// Runs only the products that pieces of bf16 support; returns which ones.
std::vector<bool> multiply_in_pieces(std::span<const GemmParams> products);

inline void require_split_bf16(const char* op, int64_t split_bf16) {
  require(split_bf16 == 0 || split_bf16 == 2 || split_bf16 == 3, op,
          "split_bf16 must be 0, 2 or 3, got ", split_bf16);
}

// out (cols) = sum over the rows of x.
void sum_columns(const Rows& x, DType dtype, void* out);

}  // namespace omniattn::ops::gemm
