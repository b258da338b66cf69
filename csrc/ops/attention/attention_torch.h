// Kernels of torch for attention, called through its dispatcher: flash's and cuDNN's.
#pragma once

#include "ops/attention/attention.h"

namespace omniattn::ops::attention {

// Why a kernel does not take a call; null if it does.
const char* why_not_flash(const Call& call);
const char* why_not_cudnn(const Call& call);

TorchResults run_flash(const Call& call);
TorchResults run_cudnn(const Call& call);
// Adds to dq in any order, unless torch.use_deterministic_algorithms(True).
TorchGradients run_flash(const Call& call, const TorchBackward& b);

}  // namespace omniattn::ops::attention
