// Row normalisation: RMSNorm and LayerNorm with an optional fused residual add, forward and
// backward.
//
//   h = x + residual (rounded to H, the dtype of the residual: T, or fp32 if T has 16 bits)
//   mean = center ? avg(h) : 0
//   rstd = 1 / sqrt(avg((h - mean)^2) + eps)
//   y = (h - mean) * rstd * (weight + offset) + bias; with cast_first (h - mean) * rstd is rounded
//       to T, as in Llama. The backward ignores this: rounding has no derivative of its own.
//
// Zhang and Sennrich 2019 (arXiv 1910.07467), Ba et al. 2016 (arXiv 1607.06450). Statistics in fp32
// (fp64 for T = fp64). Work items are rows; each row is read once from memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/sums/sums.h"
#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"

namespace omniattn {

struct NormParams {
  DType dtype;    // T: of x, weight, bias and y
  DType h_dtype;  // H: of residual and h; T without a residual
  int64_t rows, cols;
  const void* x;         // (rows, cols), x_stride between rows
  const void* residual;  // same shape, or null
  const void* weight;    // (cols) or null
  const void* bias;      // (cols) or null
  void* y;               // (rows, cols) contiguous
  void* h;               // (rows, cols) contiguous; only with a residual
  void* stats;           // (rows, 2): mean, rstd in the accumulator type; or null
  int64_t x_stride, residual_stride;
  double eps, offset;
  bool center;
  bool cast_first;  // round (h - mean) * rstd to T
};

struct NormBackwardParams {
  DType dtype;    // T: of grad_y, weight and dx
  DType h_dtype;  // H: of h, grad_h and dh
  int64_t rows, cols;
  const void* grad_y;  // (rows, cols)
  const void* grad_h;  // (rows, cols) or null: gradient of h from its other uses
  const void* h;       // (rows, cols): the normalised values
  const void* weight;  // (cols) or null
  const void* stats;   // (rows, 2)
  void* dx;            // (rows, cols) contiguous
  void* dh;            // dx in H; only if H is not T
  int64_t grad_y_stride, grad_h_stride, h_stride;
  double offset;
  bool center;
};
static_assert(std::is_trivially_copyable_v<NormParams>);
static_assert(std::is_trivially_copyable_v<NormBackwardParams>);

struct NormKernels {
  void (*forward)(const NormParams&, int64_t begin, int64_t end);
  // Adds partial sums over these rows to dweight and dbias, (cols)
  // in the accumulator type or null.
  void (*backward)(const NormBackwardParams&, void* dweight, void* dbias, int64_t begin,
                   int64_t end);
};

OMNIATTN_KERNEL_TABLE(NormKernels, norm_kernels)

Status launch_norm(const NormParams& p, Stream stream);

// Number of partial sums of dweight and dbias in the backward; depends on the shape only.
int64_t norm_backward_shards(const NormBackwardParams& p);
Status launch_norm_backward(const NormBackwardParams& p, const WeightGradients& weights,
                            Stream stream);

}  // namespace omniattn
