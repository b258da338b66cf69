// How a device runs the causal convolution; defined in conv_cpu.cpp and conv_cuda.cpp.
#pragma once

#include "kernels/conv/conv.h"

namespace omniattn::ops::conv {

void run_forward(const char* op, const CausalConvParams& p);
// dweight: (K, D), dbias: (D), or null.
void run_backward(const char* op, const CausalConvBackwardParams& p, void* dweight, void* dbias);

}  // namespace omniattn::ops::conv
