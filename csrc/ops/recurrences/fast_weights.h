// Fast weights: TTT-Linear, Titans and ATLAS; fast_weights_cpu.cpp defines them.
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

// As above, with step (B, T, H, J), theta (B, T, H), and keys and values (N, J - 1, H, K or V) of
// A.
OMNIATTN_FIELDS(AtlasInputs, Tensor q, k, v, step; OptTensor theta, keep, gate;
                OptTensor weights, momentum, anchor, keys, values, position, cu_seqlens);
OMNIATTN_FIELDS(AtlasOptions, int64_t mini_batch_size; double scale);
OMNIATTN_FIELDS(AtlasResults, Output y, weights_final, momentum_final, anchor_final, keys_final,
                values_final);
OMNIATTN_FIELDS(AtlasIncoming, OptTensor grad_y, grad_weights_final, grad_momentum_final,
                grad_anchor_final, grad_keys_final, grad_values_final);
OMNIATTN_FIELDS(AtlasGradients, Output dq, dk, dv, dstep, dtheta, dkeep, dgate, dweights, dmomentum,
                danchor, dkeys, dvalues);

AtlasResults atlas_linear(const OpCall& call, const AtlasInputs& in, const AtlasOptions& options);
AtlasGradients atlas_linear_backward(const OpCall& call, const AtlasIncoming& grads,
                                     const AtlasInputs& in, const AtlasOptions& options);

}  // namespace omniattn::ops::fast_weights
