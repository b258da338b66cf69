// The inputs of Mamba-3's recurrence; mamba3_cpu.cpp defines them.
#pragma once

#include "ops/device.h"
#include "ops/fields.h"
#include "ops/sequence_problem.h"

namespace omniattn::ops::mamba3 {

// q, k (B, T, R, G, N); dt, trap (B, T, H), q_bias, k_bias (H, R, N), angles (B, T, H, P) in A; the
// state is theta (S, H, P).
OMNIATTN_FIELDS(Inputs, Tensor q, k, dt, trap, q_bias, k_bias, angles);
OMNIATTN_FIELDS(Options, bool interleaved);
OMNIATTN_FIELDS(Results, Output queries, keys, weights, reads, phases);
OMNIATTN_FIELDS(Incoming, OptTensor grad_queries, grad_keys, grad_weights, grad_reads, grad_phases);
OMNIATTN_FIELDS(Saved, Tensor phases);
OMNIATTN_FIELDS(Gradients, Output dq, dk, ddt, dtrap, dq_bias, dk_bias, dangles, dinitial_state);

Results mamba3_inputs(const OpCall& call, const Inputs& in, const SequenceArguments& sequences,
                      const Options& options);
Gradients mamba3_inputs_backward(const OpCall& call, const Incoming& grads, const Inputs& in,
                                 const SequenceArguments& sequences, const Saved& saved,
                                 const Options& options);

}  // namespace omniattn::ops::mamba3
