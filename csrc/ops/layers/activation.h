// Activations as parts of other ops.
#pragma once

#include "ops/fields.h"
#include "ops/tensor.h"

namespace omniattn::ops::activation {

OMNIATTN_FIELDS(Gate, Tensor gate; OptTensor up);
OMNIATTN_FIELDS(GateAndUp, Tensor gate, up);
// clamp: alpha and limit, or nothing.
OMNIATTN_FIELDS(GluOptions, int64_t act; Floats clamp);
OMNIATTN_FIELDS(Activated, Tensor x; int64_t act);
OMNIATTN_FIELDS(InPlace, Written grad_y);
OMNIATTN_FIELDS(GateGradient, Written dgate);

// y = act(gate) * up; see activation.cpp.
Tensor glu(const OpCall& call, const Gate& in, const GluOptions& options);
// Needs no new memory: dgate goes into a tensor of the caller, dup takes grad_y's place.
void glu_backward_inplace(const OpCall& call, const InPlace& grads, const GateAndUp& in,
                          const GluOptions& options, const GateGradient& gradient);

// y = act(x)
Tensor activate(const OpCall& call, const Activated& in);
// dx takes grad_y's place.
void activate_backward_inplace(const OpCall& call, const InPlace& grads, const Activated& in);

}  // namespace omniattn::ops::activation
