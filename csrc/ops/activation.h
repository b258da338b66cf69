// Activations as parts of other ops.
#pragma once

#include <vector>

#include "ops/tensor.h"

namespace omniattn::ops::activation {

// y = act(gate) * up; see activation.cpp.
Tensor glu(const Tensor& gate, const OptTensor& up, int64_t act, std::vector<double> clamp);
// Needs no new memory: dgate goes into a tensor of the caller, dup takes grad_y's place.
void glu_backward_inplace(const Tensor& grad_y, const Tensor& gate, const Tensor& up, int64_t act,
                          std::vector<double> clamp, const Tensor& dgate);

// y = act(x)
Tensor activate(const Tensor& x, int64_t act);
// dx takes grad_y's place.
void activate_backward_inplace(const Tensor& grad_y, const Tensor& x, int64_t act);

}  // namespace omniattn::ops::activation
