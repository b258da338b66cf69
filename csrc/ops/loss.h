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

// The linear forms compute logits x weight^T + bias for a chunk of tokens at a time, and with a
// reduction the gradients for an output gradient of 1.
OMNIATTN_FIELDS(Layer, Tensor x, weight; OptTensor bias);
OMNIATTN_FIELDS(Teacher, Tensor teacher_x, teacher_weight; OptTensor teacher_bias, target);
OMNIATTN_FIELDS(Wanted, bool x_grad, weight_grad, bias_grad);
OMNIATTN_FIELDS(LossAndGradients, Tensor loss, dx, dweight, dbias);
OMNIATTN_FIELDS(Gradients, Tensor dx, dweight, dbias);

LossAndGradients linear_cross_entropy(const OpCall& call, const Layer& layer,
                                      const Targets& targets, const Options& options,
                                      const Reduced& reduced, const Wanted& wanted);
Gradients linear_cross_entropy_backward(const OpCall& call, const Incoming& grads,
                                        const Layer& layer, const Targets& targets,
                                        const Options& options, const Wanted& wanted);
LossAndGradients linear_jsd(const OpCall& call, const Layer& layer, const Teacher& teacher,
                            const DivergenceOptions& options, const Reduced& reduced,
                            const Wanted& wanted);
Gradients linear_jsd_backward(const OpCall& call, const Incoming& grads, const Layer& layer,
                              const Teacher& teacher, const DivergenceOptions& options,
                              const Wanted& wanted);

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
  // the reduction's weight of a row. Without grad, as for a gradient of 1.
  Tensor row_weights(const OptTensor& grad) const;
};

// Checks the targets of a cross entropy; returns its params without pointers to results.
CrossEntropyParams cross_entropy_params(const Problem& p, int64_t cols, const Options& options);

// All sizes of `t` except the last; `t` has at least one.
inline Sizes leading_sizes(const Tensor& t) {
  return {t.sizes().data(), static_cast<size_t>(t.dim() - 1)};
}

}  // namespace omniattn::ops::loss
