// How a device runs the gated activations; defined in activation_cpu.cpp and activation_cuda.cpp.
#pragma once

#include "kernels/activation/activation.h"

namespace omniattn::ops::activation {

void run(const char* op, const GluParams& p, int64_t rows);
void run(const char* op, const GluBackwardParams& p, int64_t rows);

}  // namespace omniattn::ops::activation
