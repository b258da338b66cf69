// Backward of matrix-state recurrences, see recurrence.h: chooses the kernels of the update of a
// call. Each update is compiled in a file of its own, since all of them take half a minute.
#include "kernels/recurrence/recurrence_policy.h"

namespace omniattn::OMNIATTN_ISA {

extern const RecurrenceBackwardKernels recurrence_backward_plain, recurrence_backward_delta;
extern const RecurrenceBackwardKernels recurrence_backward_bonus, recurrence_backward_low_rank;

namespace {

const RecurrenceBackwardKernels& kernels_of(const Recurrence& p) {
  return of_update(p, recurrence_backward_plain, recurrence_backward_delta,
                   recurrence_backward_bonus, recurrence_backward_low_rank);
}

int64_t bytes(const Recurrence& p, int64_t shards, int64_t parts) {
  return kernels_of(p).bytes(p, shards, parts);
}
void backward(const RecurrenceBackwardParams& params, void* memory, int64_t begin, int64_t end) {
  kernels_of(params.recurrence).backward(params, memory, begin, end);
}

}  // namespace

extern const RecurrenceBackwardKernels recurrence_backward_kernels_table;
const RecurrenceBackwardKernels recurrence_backward_kernels_table{bytes, backward};

}  // namespace omniattn::OMNIATTN_ISA
