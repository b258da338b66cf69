// What the losses share.
#pragma once

#include "kernels/loss/divergence.h"
#include "kernels/loss/loss.h"
#include "ops/tensor.h"

namespace omniattn::ops::loss {

enum class Reduction : int64_t { none, mean, sum };

// Rows (...) of logits (..., cols) of `dtype`, and how much they count, checked.
struct Problem {
  const char* op;
  DType acc;
  Sizes leading;
  OptTensor targets, class_weight;
  Reduction reduction;
  LossRows rows;

  Problem(const char* op, DType dtype, int64_t cols, Sizes leading, const OptTensor& target,
          int64_t ignore_index, const OptTensor& class_weight, int64_t reduction);

  // The losses (...), of the compute dtype, as they are or reduced.
  Tensor reduced(const Tensor& losses) const;
  // Weights (...) of the rows in a gradient: grad, which is (...) or with a reduction (), times the
  // reduction's weight of a row; without a grad for one of 1.
  Tensor row_weights(const OptTensor& grad) const;
};

// Of cross entropies; see loss.h.
struct Options {
  double label_smoothing, z_loss, softcap, temperature;
};

// The targets of a cross entropy checked, and its params without what is computed.
CrossEntropyParams cross_entropy_params(const Problem& p, int64_t cols, const Options& options);

// All sizes of `t` except the last; `t` has at least one.
inline Sizes leading_sizes(const Tensor& t) {
  return {t.sizes().data(), static_cast<size_t>(t.dim() - 1)};
}

}  // namespace omniattn::ops::loss
