// Normalisation of groups of the last dimension with an optional gate, forward and backward.
//
//   v = gate == before ? x act(z) : x
//   mean = center ? avg(v) : 0                         over the columns of one group
//   rstd = 1 / sqrt(avg((v - mean)^2) + eps)
//   y = ((v - mean) rstd weight + bias) (gate == after ? act(z) : 1)
//   with cast_first (v - mean) rstd is rounded to T, and again before the gate multiplies it
//
// Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) gates before the norm, Gated DeltaNet (Yang et al.
// 2024, arXiv 2412.06464) after it; RetNet and RWKV normalise each head (Wu and He 2018, arXiv
// 1803.08494). Statistics in fp32 (fp64 for T = fp64). Work items are rows with all their groups.
// Each sweep over a row recomputes act(z); the second sweep of the backward may use sigmoids kept
// by the first. The forward saves only the statistics.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/sums/sums.h"
#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"
#include "semantics/activation_rules.h"

namespace omniattn {

// Numbered as in python/omniattn/ops/norm.py.
enum class GatePlace : int32_t { none = 0, before = 1, after = 2 };
inline constexpr int64_t kGatePlaces = 3;

struct GatedNormParams {
  DType dtype;
  GatePlace place;
  Activation act;  // silu or sigmoid
  bool center;
  int64_t rows, groups, cols;  // cols: columns of one group
  const void *x, *z;           // (rows, groups * cols); z null without a gate
  const void *weight, *bias;   // (groups * cols) or null
  void* y;                     // (rows, groups * cols) contiguous
  void* stats;                 // (rows, groups, 2): mean, rstd in the accumulator type; or null
  int64_t x_stride, z_stride;
  double eps;
  bool cast_first;
};

struct GatedNormBackwardParams {
  DType dtype;
  GatePlace place;
  Activation act;
  bool center;
  int64_t rows, groups, cols;
  const void *grad_y, *x, *z;
  const void *weight, *bias;
  const void* stats;
  void *dx, *dz;  // (rows, groups * cols) contiguous; dz null without a gate
  int64_t grad_y_stride, x_stride, z_stride;
};
static_assert(std::is_trivially_copyable_v<GatedNormParams>);
static_assert(std::is_trivially_copyable_v<GatedNormBackwardParams>);

struct GatedNormKernels {
  void (*forward)(const GatedNormParams&, int64_t begin, int64_t end);
  // Adds to dweight and dbias, (groups * cols) in the accumulator type or null.
  void (*backward)(const GatedNormBackwardParams&, void* dweight, void* dbias, int64_t begin,
                   int64_t end);
};

OMNIATTN_KERNEL_TABLE(GatedNormKernels, gated_norm_kernels)

Status launch_gated_norm(const GatedNormParams& p, Stream stream);

// Number of partial sums of dweight and dbias in the backward; depends on the shape only.
int64_t gated_norm_backward_shards(const GatedNormBackwardParams& p);
Status launch_gated_norm_backward(const GatedNormBackwardParams& p, const WeightGradients& weights,
                                  Stream stream);

}  // namespace omniattn
