// Matrix-state recurrences on tensor cores (CUDA).
#pragma once

#include "kernels/recurrence/recurrence.h"

namespace omniattn {

// Largest key width whose states fit in registers.
inline constexpr int64_t kMostMmaKeys = 128;

// True if tensor cores take a call: recurrence_on_tiles(), with rows in whole pieces of 16 bytes.
inline bool recurrence_on_mma(const Recurrence& p) {
  const auto whole = [](const StepView& x, int64_t width) {
    return width % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
           (x.batch | x.step | x.head) % 8 == 0;
  };
  return recurrence_on_tiles(p) && p.key_width > 0 && p.key_width <= kMostMmaKeys &&
         whole(p.q, p.key_width) && whole(p.k, p.key_width) && whole(p.v, p.value_width);
}

// As launch_recurrence, without working memory, and launch_recurrence_backward.
Status launch_recurrence_mma(const RecurrenceParams& p, Stream stream);
Status launch_recurrence_backward_mma(const RecurrenceBackwardParams& p, void* memory,
                                      Stream stream);

}  // namespace omniattn
