// Sums of decayed products; decayed_sum_cpu.cpp defines them. Only the CPU has a kernel: context
// parallelism runs the definition on other devices.
#pragma once

#include "ops/device.h"
#include "ops/fields.h"

namespace omniattn::ops::decayed_sum {

// k (B, T, Hk, K), v (B, T, Hv, V) of k's dtype or of A; g (B, T, Hv, K) or (B, T, Hv, 1), beta (B,
// T, Hv) and gv (B, T, Hv, V) of A.
OMNIATTN_FIELDS(Inputs, Tensor k, v; OptTensor g, beta, gv);
OMNIATTN_FIELDS(Options, int64_t feature_map; bool from_start, before_own);
// (B, Hv, K, V), (B, Hv, K), and (B, Hv, V) with gv.
OMNIATTN_FIELDS(Results, Output sum, decay, value_decay);

Results decayed_sum(const OpCall& call, const Inputs& in, const Options& options);

}  // namespace omniattn::ops::decayed_sum
