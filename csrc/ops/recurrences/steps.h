// Single steps of recurrences, without gradients; steps_cpu.cpp defines them. All but mesa_step
// update states in place.
#pragma once

#include "ops/fields.h"
#include "ops/tensor.h"

namespace omniattn::ops::steps {

// x (B, 1, D), weight (D, K), states (B, D, W): the last W >= K - 1 inputs.
OMNIATTN_FIELDS(Conv, Tensor x, weight; OptTensor bias);
OMNIATTN_FIELDS(ConvOptions, bool silu);
// x, z (B, 1, H, P), dt (B, 1, H), A (H), B, C (B, 1, G, N), D (H) or (H, P), dt_bias (H), states
// (B, H, P, N).
OMNIATTN_FIELDS(Ssd, Tensor x, dt, A, B, C; OptTensor D, z, dt_bias);
OMNIATTN_FIELDS(SsdOptions, bool dt_softplus; double least, largest);
OMNIATTN_FIELDS(State, Written initial_state);
// q, lamb (B, 1, H, K) and the state after the token (B, H, K, K), in fp32 or fp64.
OMNIATTN_FIELDS(Mesa, Tensor q, lamb, initial_state);
OMNIATTN_FIELDS(MesaOptions, int64_t max_iterations; double tolerance);

Tensor causal_conv1d_inplace(const OpCall& call, const Conv& in, const State& state,
                             const ConvOptions& options);
Tensor ssd_inplace(const OpCall& call, const Ssd& in, const State& state,
                   const SsdOptions& options);
Tensor mesa_step(const OpCall& call, const Mesa& in, const MesaOptions& options);

}  // namespace omniattn::ops::steps
