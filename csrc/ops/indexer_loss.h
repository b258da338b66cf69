// dsa_indexer_loss: its arguments, and the functions that indexer_loss_cpu.cpp defines.
#pragma once

#include "kernels/indexer/indexer_loss.h"

#include "ops/fields.h"
#include "ops/tensor.h"

namespace omniattn::ops::indexer_loss {

OMNIATTN_FIELDS(Inputs, Tensor q_idx, k_idx; OptTensor w; Tensor q, k, lse;
                OptTensor indices, key_padding);
OMNIATTN_FIELDS(Options, double scale; bool causal, relu);
// loss (B, Tq) in the compute dtype; kept: for the backward (kernels/indexer/indexer_loss.h).
OMNIATTN_FIELDS(Results, Tensor loss; Output kept);

OMNIATTN_FIELDS(Incoming, Tensor grad_loss);
OMNIATTN_FIELDS(Saved, Tensor kept);
OMNIATTN_FIELDS(Gradients, Tensor dq_idx, dk_idx; Output dw);

Results dsa_indexer_loss(const OpCall& call, const Inputs& in, const Options& options);
Gradients dsa_indexer_loss_backward(const OpCall& call, const Incoming& grads, const Inputs& in,
                                    const Saved& saved, const Options& options);

}  // namespace omniattn::ops::indexer_loss
