// dsa_indexer_loss: its checked arguments, and both passes, which indexer_loss_cpu.cpp and
// indexer_loss_cuda.cpp define.
#pragma once

#include "kernels/indexer/indexer_loss.h"

#include "ops/fields.h"
#include "ops/tensor.h"

namespace omniattn::ops::indexer_loss {

OMNIATTN_FIELDS(Inputs, Tensor q_idx, k_idx; OptTensor w; Tensor q, k, lse;
                OptTensor indices, key_padding);
OMNIATTN_FIELDS(Options, double scale; bool causal, relu);
OMNIATTN_FIELDS(Gradients, Tensor dq_idx, dk_idx; Output dw);

// Checked arguments of both passes.
struct Call {
  const char* op;
  Tensor q_idx, k_idx, q, k, lse;
  OptTensor w, indices, real;
  DType acc;
  IndexerLossParams p;

  Call(const char* op, const Inputs& in, const Options& options);
};

// Computes the loss (B, Tq), which has elements, and `kept`, if it is wanted.
void forward(const Call& call, const Tensor& loss, const Output& kept);
// `grad` and `kept` are contiguous.
Gradients backward(const Call& call, const Tensor& grad, const Tensor& kept);

}  // namespace omniattn::ops::indexer_loss
