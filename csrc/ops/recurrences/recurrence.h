// Shared by the op recurrence and its paths on CUDA, and by decayed_sum.
#pragma once

#include <algorithm>

#include "kernels/recurrence/recurrence.h"
#include "ops/parallel.h"

namespace omniattn::ops::recurrence {

// Number of sequence parts, `bytes` each, that an item of a kernel reads at once, of `count` parts:
// as many as balance the threads as well as single parts do. Parts are independent, so results do
// not depend on the number of threads.
inline int64_t parts_of_item(int64_t sequences, int64_t count, int64_t bytes) {
  constexpr int64_t kMost = 8, kMostBytes = int64_t{1} << 19;
  const int64_t threads = torch::stable::get_num_threads();
  const auto rounds = [&](int64_t n) {
    return n * ceil_div(sequences * ceil_div(count, n), threads);
  };
  int64_t parts = 1;
  for (int64_t n = 2; n <= std::min(count, kMost) && n * bytes <= kMostBytes; ++n) {
    if (rounds(n) <= rounds(1)) parts = n;
  }
  return parts;
}

// Enqueues the kernels of the first path that takes a call.
Status launch_on_cuda(const RecurrenceParams& p);
Status launch_on_cuda(const RecurrenceBackwardParams& p);

}  // namespace omniattn::ops::recurrence
