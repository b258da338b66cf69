// Forward of recurrences with a bonus.
#include "kernels/recurrence/recurrence_forward_chunks.h"

namespace omniattn::OMNIATTN_ISA {

extern const RecurrenceKernels recurrence_forward_bonus;
const RecurrenceKernels recurrence_forward_bonus = kForwardKernels<BonusUpdate>;

}  // namespace omniattn::OMNIATTN_ISA
