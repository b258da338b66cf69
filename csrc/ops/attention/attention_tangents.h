// Tangents of attention and of its gradients; attention_tangents_cpu.cpp defines them. Only the CPU
// has a kernel: elsewhere Python evaluates the definition in tiles.
#pragma once

#include "ops/device.h"
#include "ops/fields.h"

namespace omniattn::ops::attention_tangents {

OMNIATTN_FIELDS(Heads, Tensor q, k, v);
// Tangents of q, k and v; None: 0.
OMNIATTN_FIELDS(Tangents, OptTensor tangent_q, tangent_k, tangent_v);
// Gradients of out and lse, and tangents of them. No gradient is wanted without grad_out.
OMNIATTN_FIELDS(Gradients, OptTensor grad_out, grad_lse, tangent_grad_out, tangent_grad_lse);
// Results of attention, and its other arguments.
OMNIATTN_FIELDS(Saved, Tensors aux; OptTensor seed; Tensor out, lse, lse_tail);
OMNIATTN_FIELDS(Rules, SymInts mask; Ints score; Floats params);
OMNIATTN_FIELDS(Results, Tensor tangent_out, tangent_lse;
                Tensor tangent_grad_q, tangent_grad_k, tangent_grad_v);

Results attention_tangents(const OpCall& given, const Heads& heads, const Tangents& tangents,
                           const Gradients& grads, const Saved& saved, const Rules& rules);

}  // namespace omniattn::ops::attention_tangents
