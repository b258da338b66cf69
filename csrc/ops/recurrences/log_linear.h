// Log-linear attention; log_linear_cpu.cpp defines it.
#pragma once

#include "ops/device.h"
#include "ops/fields.h"

namespace omniattn::ops::log_linear {

// q, k (B, T, Hk, K), v (B, T, Hv, V), g (B, T, Hv) and level_scales (B, T, Hv, L) in A; states (N,
// Hv, L, K, V) of A, position (N).
OMNIATTN_FIELDS(Inputs, Tensor q, k, v, g, level_scales;
                OptTensor initial_state, position, cu_seqlens);
OMNIATTN_FIELDS(Results, Output y, final_state);
OMNIATTN_FIELDS(Incoming, OptTensor grad_y, grad_final_state);
OMNIATTN_FIELDS(Wanted, bool initial_state_grad);
OMNIATTN_FIELDS(Gradients, Output dq, dk, dv, dg, dlevel_scales, dinitial_state);

Results log_linear_attention(const OpCall& call, const Inputs& in);
Gradients log_linear_attention_backward(const OpCall& call, const Incoming& grads, const Inputs& in,
                                        const Wanted& wanted);

}  // namespace omniattn::ops::log_linear
