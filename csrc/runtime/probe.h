// Measurements of one ISA for tests and benchmarks: SIMD functions element by element, register
// tiles on the caller's blocks, and peak rates of the machine. Part of `_kernels` only.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"

namespace omniattn {

enum class VecFunction : int32_t {
  copy,  // load and store, whole vectors and a partial one
  exp,
  exp2,
  log,
  tanh,
  normal,  // the cumulative distribution function
  sigmoid,
  sqrt,
  round,
  floor,
  abs,
  negate,
  sin,
  cos,
};

enum class BLayout : int32_t { rows, packed_rows, packed_transposed };

// C (m, n) (+)= op(A) B with B (k, n), or (n, k) for packed_transposed. `dtype` is the storage
// type; A is in its operand type and C in its compute type.
struct TileProbe {
  DType dtype;
  BLayout b_layout;
  bool a_transposed, accumulate;
  int64_t m, n, k;
  const void* a;
  int64_t lda;
  const void* b;
  int64_t ldb;
  void* packed;  // packed_bytes(...) bytes, unless b_layout is rows
  void* c;
  int64_t ldc;
};
static_assert(std::is_trivially_copyable_v<TileProbe>);

struct ProbeKernels {
  DType (*operand)(DType storage);
  int64_t (*packed_bytes)(DType storage, int64_t k, int64_t n);

  // y[i] = f(x[i]), x and y of storage type `dtype`.
  void (*map)(VecFunction f, DType dtype, const void* x, void* y, int64_t n);
  // Sum and maximum of whole vectors; n is a multiple of the width.
  void (*reduce)(DType dtype, const void* x, int64_t n, double* sum, double* maximum);
  void (*pack)(const TileProbe&);
  // Runs the product without the packing, `repeats` times.
  void (*tile)(const TileProbe&, int64_t repeats);

  // FLOPs of `rounds` rounds of independent multiply-adds on operands of `dtype`; on tiles,
  // including the loads of their operands from L1. 0 if the ISA has no such instruction (bf16 or
  // f16 without a dot product).
  double (*multiply_adds)(DType operand, int64_t rounds);
  // Sum of n floats; a[i] = b[i] + s c[i] with and without write-allocate.
  float (*read)(const float* x, int64_t n);
  void (*triad)(float* a, const float* b, const float* c, float s, int64_t n, bool stream);
};

OMNIATTN_PRODUCT_KERNEL_TABLE(ProbeKernels, probe_kernels)

}  // namespace omniattn
