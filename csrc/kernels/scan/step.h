// One token of the states of Mamba and of Mamba-2, as in decoding. For each row p of head h of
// group g, with states n and dt = softplus(dt + bias), or without softplus, between two limits:
//
//   h[p, n] = e^(dt A) h[p, n] + dt x[p] B[g, n]
//   y[p] = (sum_n C[g, n] h[p, n] + D x[p]) silu(z[p])
//
// A head of Mamba is a channel, has one row and an A for each state. A head of Longhorn has neither
// A nor softplus: its rule is that of selective.h. The scan
// transposes states to have channels in the lanes of vectors; a single step reads and
// writes states in their own layout.
#pragma once

#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "semantics/arith.h"

namespace omniattn {

// Rows of one batch entry each, `batch` elements apart.
struct StepRows {
  const void* data;
  int64_t batch;
};

// A is the accumulator type of dtype.
enum class StepRule : int { of_head, of_states, longhorn };

struct StateStep {
  DType dtype;  // of x, dt, z, B, C and y
  bool softplus;
  double least, largest;                        // limits of dt
  int64_t batch, heads, width, groups, states;  // B, H, P, G, N
  StepRows x, dt, z, b, c;                      // (H, P), (H), (H, P) or null, (G, N), (G, N)
  const void *decay, *skip, *bias;              // A, D: (H) or (H, P), (H); the last two may be
                                                // null
  StepRule rule;                                // A is (H), (H, N) or null
  bool skip_of_rows;                            // true: D is (H, P)
  const void* before;                           // null: zeros; may be `state`
  void* state;                                  // (B, H, P, N) of A, or (B, H, N, P)
  bool states_first;                            // state is (B, H, N, P); needs one A per head
  void* y;                                      // (B, H, P)

  OMNIATTN_FN int64_t group_heads() const { return groups > 0 ? heads / groups : 0; }
};
static_assert(std::is_trivially_copyable_v<StateStep>);

// Heads per item if each state has its own decay, all of one group; otherwise an item is one head.
inline constexpr int64_t kStepHeads = 64;
OMNIATTN_FN int64_t step_items(const StateStep& p) {
  if (p.rule == StepRule::of_head) return p.batch * p.heads;
  return p.batch * p.groups * ceil_div(p.group_heads(), kStepHeads);
}

struct StateStepKernels {
  void (*run)(const StateStep&, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(StateStepKernels, state_step_kernels)

}  // namespace omniattn
