// Batch invariance, a switch of the process: while it is on, ops compute each row of a result in an
// order that depends on neither the number of rows of the call nor their values. They then leave
// out the kernels for few rows and do not choose a level by the size of the problem.
#pragma once

#include <atomic>

namespace omniattn {

inline std::atomic<bool>& batch_invariance() {
  static std::atomic<bool> on{false};
  return on;
}
inline bool is_batch_invariant() { return batch_invariance().load(std::memory_order_relaxed); }

}  // namespace omniattn
