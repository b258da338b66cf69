// What the losses share, and how a device runs them; the latter is defined in loss_cpu.cpp and
// loss_cuda.cpp.
#pragma once

#include "kernels/loss/loss.h"
#include "ops/tensor.h"

namespace omniattn::ops::loss {

enum class Reduction : int64_t { none, mean, sum };

struct Options {
  int64_t ignore_index;
  double label_smoothing, z_loss, softcap;
  Reduction reduction;
};

// Targets (...) of logits (..., cols) of `dtype`, checked. The params lack what is computed.
struct Problem {
  const char* op;
  DType acc;
  Sizes leading;
  Tensor targets;
  Reduction reduction;
  CrossEntropyParams params;

  Problem(const char* op, DType dtype, int64_t cols, Sizes leading, const Tensor& target,
          const Options& options);

  // The losses (...), of the compute dtype, as they are or reduced.
  Tensor reduced(const Tensor& losses) const;
  // Weights (...) of the rows in a gradient: grad, which is (...) or with a reduction (), times the
  // reduction's weight of a row.
  Tensor row_weights(const Tensor& grad) const;
};

// All sizes of `t` except the last; `t` has at least one.
inline Sizes leading_sizes(const Tensor& t) {
  return {t.sizes().data(), static_cast<size_t>(t.dim() - 1)};
}

// Whether gradients of logits of `dtype` can be written in another one.
bool writes_gradients(DType dtype, DType grad_dtype);
// Every target must be a class or ignore_index.
void check_targets(const char* op, const CrossEntropyParams& p);
void run_forward(const char* op, const CrossEntropyParams& p);
void run_backward(const char* op, const CrossEntropyBackwardParams& p);
// total () = the sum of p.loss, or their mean over the kept targets.
void run_total(const char* op, const CrossEntropyParams& p, bool mean, void* total);
// weights (rows) = grad, one per row or for all, over the number of kept targets for the mean.
void run_row_weights(const char* op, const CrossEntropyParams& p, bool mean, bool per_row,
                     const void* grad, void* weights);

}  // namespace omniattn::ops::loss
