// How a device runs the row normalisations; defined in norm_cpu.cpp and norm_cuda.cpp.
#pragma once

#include "kernels/norm/norm.h"

namespace omniattn::ops::norm {

void run_forward(const char* op, const NormParams& p);
// dweight, dbias: (cols) or null.
void run_backward(const char* op, const NormBackwardParams& p, void* dweight, void* dbias);

}  // namespace omniattn::ops::norm
