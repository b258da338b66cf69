// Backward of recurrences with a plain update.
#include "kernels/recurrence/recurrence_backward_chunks.h"

namespace omniattn::OMNIATTN_ISA {

extern const RecurrenceBackwardKernels recurrence_backward_plain;
const RecurrenceBackwardKernels recurrence_backward_plain = kBackwardKernels<PlainUpdate>;

}  // namespace omniattn::OMNIATTN_ISA
