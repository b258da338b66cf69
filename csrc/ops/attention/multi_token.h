// Multi-token attention; multi_token_cpu.cpp defines it.
#pragma once

#include "ops/device.h"
#include "ops/fields.h"

namespace omniattn::ops::multi_token {

// q (B, Tq, Hq, D), k (B, Tk, Hkv, D), v (B, Tk, Hkv, Dv), weight (Hq, cq, ck), head_weight
// (Hq / C, C, C).
OMNIATTN_FIELDS(Inputs, Tensor q, k, v, weight, head_weight);
OMNIATTN_FIELDS(Options, bool causal; double scale; SymInt lead);
OMNIATTN_FIELDS(Results, Output out);
OMNIATTN_FIELDS(Incoming, OptTensor grad_out);
OMNIATTN_FIELDS(Wanted, bool q_grad, k_grad, v_grad, weight_grad, head_weight_grad);
OMNIATTN_FIELDS(Gradients, Output dq, dk, dv, dweight, dhead_weight);

Results multi_token_attention(const OpCall& call, const Inputs& in, const Options& options);
Gradients multi_token_attention_backward(const OpCall& call, const Incoming& grads,
                                         const Inputs& in, const Options& options,
                                         const Wanted& wanted);

}  // namespace omniattn::ops::multi_token
