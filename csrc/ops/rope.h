// How a device runs the rotary embedding, alone and with the norm of each head; defined in
// rope_cpu.cpp and rope_cuda.cpp.
#pragma once

#include "kernels/rope/norm_rope.h"
#include "kernels/rope/rope.h"

namespace omniattn::ops::rope {

// Positions of `entries` batch entries must be rows of the tables.
void check_positions(const char* op, const RopeParams& p, int64_t entries);

void run(const char* op, const RopeParams& p, int64_t batch);
void run_forward(const char* op, const NormRopeParams& p, int64_t batch);
// dweight: (dim) in the compute type, or null.
void run_backward(const char* op, const NormRopeBackwardParams& p, int64_t batch, void* dweight);

}  // namespace omniattn::ops::rope
