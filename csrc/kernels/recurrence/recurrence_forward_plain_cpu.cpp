// Forward of recurrences with a plain update.
#include "kernels/recurrence/recurrence_forward_chunks.h"

namespace omniattn::OMNIATTN_ISA {

extern const RecurrenceKernels recurrence_forward_plain;
const RecurrenceKernels recurrence_forward_plain = kForwardKernels<PlainUpdate>;

}  // namespace omniattn::OMNIATTN_ISA
