// CUDA launchers of RMSNorm and rotary embedding of heads, see norm_rope.h.
#pragma once

#include "kernels/rope/norm_rope.h"
#include "runtime/stream.h"

namespace omniattn {

Status launch_norm_rope(const NormRopeParams& p, int64_t batch, Stream stream);

// Partial sums of dweight that the backward keeps; depends on the shape only.
int64_t norm_rope_backward_shards(const NormRopeBackwardParams& p, int64_t batch);

// dweight (dim), the sum of `partial` (shards, dim) in the compute type; or both null.
Status launch_norm_rope_backward(const NormRopeBackwardParams& p, int64_t batch, void* partial,
                                 void* dweight, Stream stream);

}  // namespace omniattn
