// Forward of recurrences with a low-rank update.
#include "kernels/recurrence/recurrence_forward_chunks.h"

namespace omniattn::OMNIATTN_ISA {

extern const RecurrenceKernels recurrence_forward_low_rank;
const RecurrenceKernels recurrence_forward_low_rank = kForwardKernels<LowRankUpdate>;

}  // namespace omniattn::OMNIATTN_ISA
