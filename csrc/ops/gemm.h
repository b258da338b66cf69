// Matrix products over torch's thread pool, for `linear` and the ops built on it.
#pragma once

#include "kernels/gemm/gemm.h"
#include "ops/parallel.h"
#include "ops/tensor.h"

namespace omniattn::ops {

inline void run_gemm(const GemmParams& p) {
  const GemmKernels& kernels = gemm_kernels(p.a_dtype);
  const int64_t items = kernels.items(p);
  const int64_t bytes = kernels.workspace_bytes(p);
  const int64_t threads = std::min<int64_t>(items, torch::stable::get_num_threads());
  const int64_t floats = bytes / 4 * threads;
  const Tensor workspace = empty_tensor({&floats, 1}, DType::f32);
  char* const memory = static_cast<char*>(workspace.mutable_data_ptr());
  parallel_queue(items, threads, [&](int64_t thread, int64_t item) {
    kernels.run(p, memory + thread * bytes, item, item + 1);
  });
}

// A matrix of a product: a row-major tensor or its transpose.
struct Operand {
  const void* data;
  DType dtype;
  int64_t stride;
  bool transposed = false;
};

// c (m, n) of c_dtype, rows at a distance of ldc, = a (m, k) b (k, n) + bias (n).
inline void multiply(const Operand& a, const Operand& b, const void* bias, void* c, DType c_dtype,
                     int64_t ldc, int64_t m, int64_t n, int64_t k, bool accumulate = false) {
  GemmParams p{};
  p.a_dtype = a.dtype;
  p.b_dtype = b.dtype;
  p.c_dtype = c_dtype;
  p.m = m;
  p.n = n;
  p.k = k;
  p.a = a.data;
  p.b = b.data;
  p.bias = bias;
  p.c = c;
  p.lda = a.stride;
  p.ldb = b.stride;
  p.ldc = ldc;
  p.a_transposed = a.transposed;
  p.b_transposed = b.transposed;
  p.accumulate = accumulate;
  run_gemm(p);
}

// out (cols) = sum over the rows of x.
inline void sum_columns(const Rows& x, DType dtype, void* out) {
  const auto sums = gemm_kernels(dtype).column_sums;
  // Whole cache lines of about 256 KiB per task.
  const int64_t grain = std::max<int64_t>(64, (65536 / std::max<int64_t>(1, x.rows) + 63) & ~63);
  const int64_t blocks = (x.cols + grain - 1) / grain;
  parallel_ranges(blocks, 1, [&](int64_t begin, int64_t end) {
    sums(dtype, x.data(), x.stride, x.rows, out, begin * grain, std::min(end * grain, x.cols));
  });
}

}  // namespace omniattn::ops
