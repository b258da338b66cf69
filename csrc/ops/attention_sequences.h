// One sequence of a packed, cached or paged batch as a problem of its own, for the CPU
// kernels, which do not support layouts.
#pragma once

#include "ops/attention.h"

namespace omniattn::ops::attention {

AttentionForwardParams of_sequence(AttentionForwardParams f, const Sequence& s);
AttentionBackwardParams of_sequence(AttentionBackwardParams b, const Sequence& s);

// Copies the pages of a sequence to contiguous keys and values in `memory`, for kernels that pack
// them in any case.
void gather_pages(AttentionProblem& p, Tensors& memory);

}  // namespace omniattn::ops::attention
