// RMSNorm of each head, then the rotary embedding, in one pass (QK-norm as in Qwen3 and Gemma 3):
//
//   y = rotate(x rstd (weight + offset)),  rstd = 1 / sqrt(avg(x^2) + eps) over the head
//
// Backward: the gradient is rotated back, g = rotate^-1(grad_y), and with m = g (weight + offset)
//
//   dx = rstd (m - x rstd^2 avg(m x)),  dweight = sum of g x rstd
//
// Computed in fp32 (fp64 for fp64) and rounded once. With cast_first, x rstd and its product
// with the weight are rounded too, as in Llama's norm before a rotary embedding. A work item
// is a token with all its heads.
#pragma once

#include "kernels/rope/rope.h"

namespace omniattn {

struct NormRopeParams {
  RopeParams rope;     // tensors[0]: x and y, which must not overlap
  const void* weight;  // (dim) or null
  void* rstd;          // (batch, tokens, heads) in the compute type, or null
  double eps, offset;
  bool cast_first;  // round x rstd, and its product with the weight
};

struct NormRopeBackwardParams {
  RopeParams rope;  // tensors[0]: grad_y and dx
  const void* x;    // (batch, tokens, heads, dim)
  int64_t x_batch, x_token, x_head;
  const void* weight;
  const void* rstd;
  double offset;
};
static_assert(std::is_trivially_copyable_v<NormRopeParams>);
static_assert(std::is_trivially_copyable_v<NormRopeBackwardParams>);

struct NormRopeKernels {
  void (*forward)(const NormRopeParams&, int64_t begin, int64_t end);
  // Adds to dweight, (dim) in the compute type or null.
  void (*backward)(const NormRopeBackwardParams&, void* dweight, int64_t begin, int64_t end);
};

OMNIATTN_KERNEL_TABLE(NormRopeKernels, norm_rope_kernels)

Status launch_norm_rope(const NormRopeParams& p, int64_t batch, Stream stream);

// Number of partial sums of dweight in the backward; depends on the shape only.
int64_t norm_rope_backward_shards(const NormRopeBackwardParams& p, int64_t batch);

// dweight (dim) is the sum of `partial` (shards, dim), in the compute type; both may be null.
Status launch_norm_rope_backward(const NormRopeBackwardParams& p, int64_t batch, void* partial,
                                 void* dweight, Stream stream);

}  // namespace omniattn
