// Backward of recurrences with a bonus.
#include "kernels/recurrence/recurrence_backward_chunks.h"

namespace omniattn::OMNIATTN_ISA {

extern const RecurrenceBackwardKernels recurrence_backward_bonus;
const RecurrenceBackwardKernels recurrence_backward_bonus = kBackwardKernels<BonusUpdate>;

}  // namespace omniattn::OMNIATTN_ISA
