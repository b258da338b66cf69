// Backward of recurrences with a delta update.
#include "kernels/recurrence/recurrence_backward_chunks.h"

namespace omniattn::OMNIATTN_ISA {

extern const RecurrenceBackwardKernels recurrence_backward_delta;
const RecurrenceBackwardKernels recurrence_backward_delta = kBackwardKernels<DeltaUpdate>;

}  // namespace omniattn::OMNIATTN_ISA
