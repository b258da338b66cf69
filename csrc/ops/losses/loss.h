// Shared by the loss ops: checked rows of logits, their weights and reduction.
#pragma once

#include "kernels/loss/divergence.h"
#include "kernels/loss/loss.h"
#include "ops/fields.h"
#include "ops/tensor.h"

namespace omniattn::ops::loss {

enum class Reduction : int64_t { none, mean, sum };

// target (...) int64, logits (..., V); class_weight (V).
OMNIATTN_FIELDS(Targets, Tensor target; OptTensor class_weight);
// Options of cross entropies; see kernels/loss/loss.h.
OMNIATTN_FIELDS(Options, int64_t ignore_index;
                double label_smoothing, z_loss, softcap, temperature);
// Options of divergences; see kernels/loss/divergence.h.
OMNIATTN_FIELDS(DivergenceOptions, int64_t ignore_index; double beta, temperature);
// 0: none, 1: mean over kept targets, 2: sum.
OMNIATTN_FIELDS(Reduced, int64_t reduction);
OMNIATTN_FIELDS(Incoming, Tensor grad);

// Checked rows (...) of logits (..., cols) of `dtype`, and their weights.
struct Problem {
  const char* op;
  DType acc;
  Sizes leading;
  OptTensor targets, class_weight;
  Reduction reduction;
  LossRows rows;

  Problem(const char* op, DType dtype, int64_t cols, Sizes leading, const OptTensor& target,
          int64_t ignore_index, const OptTensor& class_weight, int64_t reduction);

  // The losses (...) in the compute dtype, reduced if there is a reduction.
  Tensor reduced(const Tensor& losses) const;
  // Weights (...) of the rows in a gradient: grad, of shape (...), or () with a reduction, times
  // the reduction's weight of a row. Without grad, the gradient is taken as 1. If `divides` is
  // false, a mean is treated as a sum.
  Tensor row_weights(const OptTensor& grad, bool divides = true) const;
};

// Checks the targets of a cross entropy; returns its params without pointers to results.
CrossEntropyParams cross_entropy_params(const Problem& p, int64_t cols, const Options& options);

// All sizes of `t` except the last; `t` has at least one.
inline Sizes leading_sizes(const Tensor& t) {
  return {t.sizes().data(), static_cast<size_t>(t.dim() - 1)};
}

}  // namespace omniattn::ops::loss
