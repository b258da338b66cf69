// One sequence of a packed, cached or paged batch as a problem of its own, for the CPU
// kernels, which do not support layouts.
#pragma once

#include "kernels/attention_tangents/attention_tangents.h"
#include "ops/attention/attention.h"

namespace omniattn::ops::attention {

AttentionForwardParams of_sequence(AttentionForwardParams f, const Sequence& s);
AttentionBackwardParams of_sequence(AttentionBackwardParams b, const Sequence& s);
AttentionTangentParams of_sequence(AttentionTangentParams x, const Sequence& s);

// Computes tangents, with splits and a workspace that it sets itself; not called without queries or
// keys. Defined in attention_cpu.cpp.
void run_tangents(AttentionTangentParams x, const Call& call);

// True if only the decode kernels read the keys and values of a problem where they are.
inline bool is_gathered(const AttentionProblem& p) { return p.pages.table != nullptr || p.is_int8; }
// Copies the pages of a sequence, or its rows of int8, to contiguous keys and values of its dtype
// in `memory`, for kernels that pack them in any case.
void gather_rows(AttentionProblem& p, Tensors& memory);

}  // namespace omniattn::ops::attention
