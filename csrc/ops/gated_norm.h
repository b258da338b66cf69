// How a device runs the gated and grouped normalisations; defined in gated_norm_cpu.cpp and
// gated_norm_cuda.cpp.
#pragma once

#include "kernels/norm/gated_norm.h"

namespace omniattn::ops::gated_norm {

void run_forward(const char* op, const GatedNormParams& p);
// dweight, dbias: (groups * cols) or null.
void run_backward(const char* op, const GatedNormBackwardParams& p, void* dweight, void* dbias);

}  // namespace omniattn::ops::gated_norm
