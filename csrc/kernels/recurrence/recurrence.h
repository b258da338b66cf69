// Recurrence of a matrix state per sequence and value head, forward and backward:
//
//   S_t = diag(a_t) S_(t-1) + k_t u_t^T     a_t = exp(g_t)     o_t = scale S_t^T q_t
//   u_t = v_t                                        plain: linear attention, RetNet, GLA
//   u_t = beta_t (v_t - (diag(a_t) S_(t-1))^T k_t)   delta: DeltaNet, Gated DeltaNet, KDA
//
// (Katharopoulos et al. 2020, Yang et al. 2024). S is (K, V). Value head h reads key head
// h / (Hv / Hk). An item is one value head of one sequence; sequences are the batch entries, or
// with cu_seqlens the rows between its numbers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"
#include "semantics/arith.h"

namespace omniattn {

enum class StateDecay : int32_t { none, head, channel };
enum class StateUpdate : int32_t { plain, delta };

// A tensor (B, T, H, ...) with unit stride after its heads, or null.
struct HeadRows {
  const void* data;
  int64_t batch, step, head;  // elements between batch entries, steps and heads
};

struct Recurrence {
  DType dtype;  // of q, k and v; all else is in the accumulator type
  StateDecay decay;
  StateUpdate update;
  int64_t batch, steps, key_heads, value_heads, key_dim, value_dim;  // B, T, Hk, Hv, K, V
  int64_t sequences;                                                 // N
  double scale;
  HeadRows q, k;              // (B, T, Hk, K)
  HeadRows v;                 // (B, T, Hv, V)
  HeadRows g;                 // (B, T, Hv), or (B, T, Hv, K) for a decay per channel
  HeadRows beta;              // (B, T, Hv)
  const void* initial_state;  // (N, Hv, K, V), or null
  const int32_t* cu_seqlens;  // (N + 1), or null
};

struct RecurrenceParams {
  Recurrence problem;
  void* o;            // (B, T, Hv, V)
  void* final_state;  // (N, Hv, K, V)
  void* states;       // (state_slots, Hv, K, V), or null
};

struct RecurrenceBackwardParams {
  Recurrence problem;
  HeadRows grad_o;         // (B, T, Hv, V)
  const void* grad_final;  // (N, Hv, K, V), or null
  const void* states;
  void* dq;      // (B, T, Hv, K) in the accumulator type if Hv > Hk, else in that of q
  void* dk;      // the same
  void* dv;      // (B, T, Hv, V)
  void* dg;      // as g, or null
  void* dbeta;   // (B, T, Hv), or null
  void* dstate;  // (N, Hv, K, V), or null
};
static_assert(std::is_trivially_copyable_v<RecurrenceParams>);
static_assert(std::is_trivially_copyable_v<RecurrenceBackwardParams>);

// The forward keeps the states at the starts of runs of this many steps for the backward.
inline constexpr int64_t kStateSteps = 64;

// Slots of `states`: packed sequences need at most one more each than T / kStateSteps.
OMNIATTN_FN int64_t state_slots(const Recurrence& p) {
  return p.cu_seqlens != nullptr ? p.steps / kStateSteps + p.sequences
                                 : p.batch * ceil_div(p.steps, kStateSteps);
}

// One sequence: steps [begin, begin + steps) of batch entry `row`, its states from `slot` on.
struct StateSequence {
  int64_t row, begin, steps, slot;
};
OMNIATTN_FN StateSequence state_sequence(const Recurrence& p, int64_t n) {
  if (p.cu_seqlens == nullptr) return {n, 0, p.steps, n * ceil_div(p.steps, kStateSteps)};
  const int64_t begin = p.cu_seqlens[n];
  return {0, begin, p.cu_seqlens[n + 1] - begin, begin / kStateSteps + n};
}

// Items that a call of a kernel can make use of.
inline constexpr int64_t kHeadsTogether = 8;

struct RecurrenceKernels {
  // Bytes of `memory`.
  int64_t (*forward_bytes)(const Recurrence&);
  int64_t (*backward_bytes)(const Recurrence&);
  // Item n Hv + h is value head h of sequence n.
  void (*forward)(const RecurrenceParams&, void* memory, int64_t begin, int64_t end);
  void (*backward)(const RecurrenceBackwardParams&, void* memory, int64_t begin, int64_t end);
  // Rows of (B, T, Hk): dq or dk as the sum of its value heads, in order.
  void (*add_heads)(const Recurrence&, const void* parts, void* sum, int64_t begin, int64_t end);
};

OMNIATTN_KERNEL_TABLE(RecurrenceKernels, recurrence_kernels)

Status launch_recurrence(const RecurrenceParams& p, Stream stream);
Status launch_recurrence_backward(const RecurrenceBackwardParams& p, Stream stream);

}  // namespace omniattn
