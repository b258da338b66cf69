// The ordered paths of recurrence on CUDA.
#include "kernels/recurrence/recurrence_mma.h"
#include "ops/device.h"
#include "ops/path.h"
#include "ops/recurrences/recurrence.h"

namespace omniattn::ops::recurrence {
namespace {

Status launch_on_tokens(const RecurrenceParams& p) {
  const int64_t bytes = recurrence_bytes(p.recurrence);
  const Tensor memory = scratch(ceil_div(bytes, size_of(DType::f64)), DType::f64);
  return launch_recurrence(p, memory.mutable_data_ptr(), stream());
}

const PathTable<bool(const Recurrence&), Status(const RecurrenceParams&)> kPaths(
    "recurrence",
    {
        {"mma", recurrence_on_mma,
         [](const RecurrenceParams& p) { return launch_recurrence_mma(p, stream()); }},
        {"tokens", [](const Recurrence&) { return true; }, launch_on_tokens},
    });

}  // namespace

Status launch_on_cuda(const RecurrenceParams& p) { return kPaths.first(p.recurrence).run(p); }

}  // namespace omniattn::ops::recurrence
