// Forward of recurrences with a delta update.
#include "kernels/recurrence/recurrence_forward_chunks.h"

namespace omniattn::OMNIATTN_ISA {

extern const RecurrenceKernels recurrence_forward_delta;
const RecurrenceKernels recurrence_forward_delta = kForwardKernels<DeltaUpdate>;

}  // namespace omniattn::OMNIATTN_ISA
