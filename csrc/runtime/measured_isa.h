// The level that an op's kernels run on. A product-only level (runtime/isa.h) may be slower than
// the one below it where there is little to multiply.
//
// The least number of multiply-adds for a level is measured on a family of CPUs
// (benchmarks/level_choice.py) and set when Python loads the ops. It is 0 without a record.
#pragma once

#include <atomic>

#include "runtime/batch_invariance.h"
#include "runtime/cpu_isa.h"

namespace omniattn {

enum class MeasuredOp : int32_t { attention = 0, moe_experts = 1 };
inline constexpr int32_t kMeasuredOpCount = 2;

inline std::atomic<int64_t>& least_madds(MeasuredOp op, Isa isa) {
  static std::atomic<int64_t> least[kMeasuredOpCount][kIsaCount] = {};
  return least[static_cast<int32_t>(op)][static_cast<int32_t>(isa)];
}

// The highest level up to the active one that multiplies these factors and is fast at `madds`
// multiply-adds; with batch invariance the highest level that multiplies them, whatever their
// number.
inline Isa isa_for(MeasuredOp op, DType factors, int64_t madds) {
  Isa isa = active_isa();
  const auto suits = [&] {
    const int64_t least = least_madds(op, isa).load(std::memory_order_relaxed);
    const bool fast = is_batch_invariant() || madds >= least;
    return has_all_kernels(isa) || (multiplies(isa, factors) && fast);
  };
  while (!has_isa(isa) || !suits()) {
    isa = static_cast<Isa>(static_cast<int32_t>(isa) - 1);
  }
  return isa;
}

}  // namespace omniattn
