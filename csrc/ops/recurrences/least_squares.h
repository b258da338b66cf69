// Systems of MesaNet for one token; least_squares_cpu.cpp solves them.
#pragma once

#include "ops/device.h"
#include "ops/fields.h"

namespace omniattn::ops::least_squares {

// q, lamb (B, 1, H, K) and the state (B, H, K, K), in fp32 or fp64.
OMNIATTN_FIELDS(Inputs, Tensor q, lamb, initial_state);
OMNIATTN_FIELDS(Options, int64_t max_iterations; double tolerance);

Tensor mesa_step(const OpCall& call, const Inputs& in, const Options& options);

}  // namespace omniattn::ops::least_squares
