// The paths of the op recurrence on CUDA.
#pragma once

#include "kernels/recurrence/recurrence.h"

namespace omniattn::ops::recurrence {

// Enqueues the kernels of the first path that takes a call.
Status launch_on_cuda(const RecurrenceParams& p);
Status launch_on_cuda(const RecurrenceBackwardParams& p);

}  // namespace omniattn::ops::recurrence
