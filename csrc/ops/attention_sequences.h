// One sequence of a packed, cached or paged batch as a problem of its own, on the CPU, whose
// kernels know no layouts.
#pragma once

#include "ops/attention.h"

namespace omniattn::ops::attention {

AttentionForwardParams of_sequence(AttentionForwardParams f, const Sequence& s);
AttentionBackwardParams of_sequence(AttentionBackwardParams b, const Sequence& s);

// Copies the pages of a sequence into contiguous keys and values in `memory`, for kernels that pack
// them anyway.
void gather_pages(AttentionProblem& p, Tensors& memory);

}  // namespace omniattn::ops::attention
