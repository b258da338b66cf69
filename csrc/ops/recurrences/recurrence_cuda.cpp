// The ordered paths of recurrence on CUDA.
#include "kernels/recurrence_mma/recurrence_mma.h"
#include "ops/device.h"
#include "ops/path.h"
#include "ops/recurrences/recurrence.h"

namespace omniattn::ops::recurrence {
namespace {

// Working memory of a call. torch reuses it on the same stream only.
Tensor memory_of(int64_t bytes) {
  return scratch(ceil_div(bytes, size_of(DType::f64)), DType::f64);
}

const PathTable<bool(const Recurrence&), Status(const RecurrenceParams&)> kForwardPaths(
    "recurrence",
    {
        {"mma", recurrence_on_mma,
         [](const RecurrenceParams& p) { return launch_recurrence_mma(p, stream()); }},
        {"tokens", [](const Recurrence&) { return true; },
         [](const RecurrenceParams& p) {
           const Tensor memory = memory_of(recurrence_bytes(p.recurrence));
           return launch_recurrence(p, memory.mutable_data_ptr(), stream());
         }},
    });

const PathTable<bool(const Recurrence&), Status(const RecurrenceBackwardParams&)> kBackwardPaths(
    "recurrence_backward",
    {
        {"mma", recurrence_on_mma,
         [](const RecurrenceBackwardParams& p) {
           const Tensor memory = memory_of(recurrence_backward_mma_bytes(p.recurrence));
           return launch_recurrence_backward_mma(p, memory.mutable_data_ptr(), stream());
         }},
        {"tokens", [](const Recurrence&) { return true; },
         [](const RecurrenceBackwardParams& p) {
           const Tensor memory = memory_of(recurrence_backward_bytes(p.recurrence));
           return launch_recurrence_backward(p, memory.mutable_data_ptr(), stream());
         }},
    });

}  // namespace

Status launch_on_cuda(const RecurrenceParams& p) {
  return kForwardPaths.first(p.recurrence).run(p);
}
Status launch_on_cuda(const RecurrenceBackwardParams& p) {
  return kBackwardPaths.first(p.recurrence).run(p);
}

}  // namespace omniattn::ops::recurrence
