// How a device runs dropout and uniform_like; defined in random_cpu.cpp and random_cuda.cpp, which
// also take the seed to where their kernels read it.
#pragma once

#include "kernels/random/random.h"
#include "ops/seed.h"

namespace omniattn::ops::random {

void run(const char* op, DropoutParams p, const Tensor& seed);
void run(const char* op, UniformParams p, const Tensor& seed);

}  // namespace omniattn::ops::random
