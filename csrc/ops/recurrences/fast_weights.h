// Fast weights: TTT-Linear and Titans; fast_weights_cpu.cpp defines them.
#pragma once

#include "ops/device.h"
#include "ops/fields.h"

namespace omniattn::ops::fast_weights {

// q, k (B, T, H, K), v (B, T, H, V); step, keep, gate (B, T, H) and w, b (H, V) in A; states (N, H,
// R, V) of A, position (N).
OMNIATTN_FIELDS(Inputs, Tensor q, k, v; OptTensor step, keep, gate, w, b;
                OptTensor weights, momentum, anchor, position, cu_seqlens);
OMNIATTN_FIELDS(Options, int64_t mini_batch_size; double eps, scale; bool descent, bias, residual);
OMNIATTN_FIELDS(Results, Output y, weights_final, momentum_final, anchor_final);
OMNIATTN_FIELDS(Incoming, OptTensor grad_y, grad_weights_final, grad_momentum_final,
                grad_anchor_final);
OMNIATTN_FIELDS(Gradients, Output dq, dk, dv, dstep, dkeep, dgate, dw, db, dweights, dmomentum,
                danchor);

Results fast_weights(const OpCall& call, const Inputs& in, const Options& options);
Gradients fast_weights_backward(const OpCall& call, const Incoming& grads, const Inputs& in,
                                const Options& options);

}  // namespace omniattn::ops::fast_weights
