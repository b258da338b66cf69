// Parallax; parallax_cpu.cpp defines it.
#pragma once

#include "ops/device.h"
#include "ops/fields.h"

namespace omniattn::ops::parallax {

// q, r (B, Tq, Hq, D), k (B, Tk, Hkv, D), v (B, Tk, Hkv, Dv).
OMNIATTN_FIELDS(Inputs, Tensor q, r, k, v; OptTensor cu_seqlens);
OMNIATTN_FIELDS(Options, SymInt left, right; double scale);
OMNIATTN_FIELDS(Results, Output out);
OMNIATTN_FIELDS(Incoming, OptTensor grad_out);
OMNIATTN_FIELDS(Gradients, Output dq, dr, dk, dv);

Results parallax_attention(const OpCall& call, const Inputs& in, const Options& options);
Gradients parallax_attention_backward(const OpCall& call, const Incoming& grads, const Inputs& in,
                                      const Options& options);

}  // namespace omniattn::ops::parallax
