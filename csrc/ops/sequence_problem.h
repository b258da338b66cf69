// Shared by ops over sequences: boundaries of packed sequences, states, results.
#pragma once

#include "ops/device.h"
#include "ops/fields.h"
#include "ops/sequences.h"

namespace omniattn::ops {

// The states before the first step, and the boundaries of packed sequences.
OMNIATTN_FIELDS(SequenceArguments, OptTensor initial_state, cu_seqlens);

// Base of the checked arguments of an op over the steps of x (B, T, ..), forward and backward.
struct SequenceProblem {
  const char* op;
  DType dtype, acc;
  int64_t batch, steps, sequences;
  Sequences packed;

  SequenceProblem(const char* op_, const char* name, const Tensor& x, int64_t dims,
                  const OptTensor& cu_seqlens)
      : op(op_), dtype(dtype_of(op, name, x)), acc(accumulator(dtype)) {
    with_dims(name, x, dims);
    batch = x.size(0), steps = x.size(1), sequences = batch;
    if (cu_seqlens.has_value()) {
      require(batch == 1, op, name, " must have B=1 with cu_seqlens, got B=", batch);
      const PackedRows rows{"cu_seqlens", *cu_seqlens, steps, steps};
      packed = packed_sequences(op, rows, rows);
      sequences = packed.count;
    }
  }

  const Tensor& with_dims(const char* name, const Tensor& t, int64_t dims) const {
    require(t.dim() == dims, op, name, " must have ", dims, " dimensions, got ", t.dim());
    return t;
  }
  // Checks a dense tensor in A, such as states.
  OptTensor dense(const char* name, const OptTensor& t, Sizes sizes) const {
    if (!t.has_value()) return t;
    require_tensor(op, name, *t, acc);
    require_sizes(op, name, *t, sizes);
    return as_dense(*t);
  }

  // The gradient, in the shape of x; zeros if it is not given.
  static Tensor gradient_or_zeros(const OptTensor& gradient, const Tensor& x, Sizes sizes) {
    return gradient.has_value() ? *gradient : torch::stable::new_zeros(x, sizes);
  }
};

}  // namespace omniattn::ops
