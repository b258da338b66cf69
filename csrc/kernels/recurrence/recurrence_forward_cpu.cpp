// Forward of matrix-state recurrences, see recurrence.h: chooses the kernels of the update of a
// call. Each update is compiled in a file of its own, since all of them take half a minute.
#include "kernels/recurrence/recurrence_policy.h"

namespace omniattn::OMNIATTN_ISA {

extern const RecurrenceKernels recurrence_forward_plain, recurrence_forward_delta;
extern const RecurrenceKernels recurrence_forward_bonus, recurrence_forward_low_rank;

namespace {

const RecurrenceKernels& kernels_of(const Recurrence& p) {
  return of_update(p, recurrence_forward_plain, recurrence_forward_delta, recurrence_forward_bonus,
                   recurrence_forward_low_rank);
}

int64_t bytes(const Recurrence& p, int64_t heads) { return kernels_of(p).bytes(p, heads); }
void forward(const RecurrenceParams& params, void* memory, int64_t begin, int64_t end) {
  kernels_of(params.recurrence).forward(params, memory, begin, end);
}

}  // namespace

extern const RecurrenceKernels recurrence_kernels_table;
const RecurrenceKernels recurrence_kernels_table{bytes, forward};

}  // namespace omniattn::OMNIATTN_ISA
