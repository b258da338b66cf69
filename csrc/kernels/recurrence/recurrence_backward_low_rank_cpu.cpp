// Backward of recurrences with a low-rank update.
#include "kernels/recurrence/recurrence_backward_chunks.h"

namespace omniattn::OMNIATTN_ISA {

extern const RecurrenceBackwardKernels recurrence_backward_low_rank;
const RecurrenceBackwardKernels recurrence_backward_low_rank = kBackwardKernels<LowRankUpdate>;

}  // namespace omniattn::OMNIATTN_ISA
