// Matrix-state recurrences over time, forward and backward. For each sequence and value head, with
// a state S of shape (K, V) and w_t = exp(g_t):
//
//   S_t = diag(w_t) S_{t-1} + k_t u_t^T        o_t = scale (S_t^T q_t + skip * v_t)
//   u_t = beta_t v_t                                       plain update
//   u_t = beta_t (v_t - (diag(w_t) S_{t-1})^T k_t)         delta update
//
// With a bonus, the update is plain and an output reads the state before it, plus a share of its
// own token. With a and b, the update is plain, with a low-rank term of the state before it:
//
//   o_t = scale (S_{t-1} + diag(bonus) k_t v_t^T)^T q_t
//   S_t = diag(w_t) S_{t-1} + k_t v_t^T + b_t c_t^T        c_t = S_{t-1}^T a_t
//
// A plain update may use features phi(q) and phi(k) in place of q and k, and outputs divided by the
// sum of their weights. This sum is an output of values 1, whose state is one more column z:
//
//   z_t = diag(w_t) z_{t-1} + beta_t k_t        o_t = scale S_t^T q_t / divisor(z_t . q_t)
//
// A plain update without features and divisors may have decays of values, x_t = exp(gv_t), too:
//
//   S_t = diag(w_t) S_{t-1} diag(x_t) + k_t u_t^T
//
// Value head h reads key head h / (Hv / Hk) of q, k, a and b. The CPU works on chunks of tokens,
// within which the products are matrix products, as tensor cores do (recurrence_mma.h); other CUDA
// kernels go from token to token with a column of the state in the registers of a warp. Every
// factor of a decay is a product of w's, never the exponential of a difference of sums. The
// backward recomputes a chunk from the state at its start, saved by the forward.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"
#include "semantics/arith.h"
#include "semantics/linear_attention.h"

namespace omniattn {

// An input (B, T, H) or (B, T, H, D); D has unit stride.
struct StepView {
  const void* data;           // null if the tensor is absent
  int64_t batch, step, head;  // elements between batch entries, tokens and heads
};

// Arguments of forward and backward. A is the accumulator type of dtype.
struct Recurrence {
  DType dtype;         // of q, k, v and their gradients
  DType o_dtype;       // of o and its gradient: dtype, or the dtype of A
  bool channel_decay;  // true: g is (B, T, Hv, K), false: (B, T, Hv)
  bool delta;          // delta update; requires beta
  int64_t sequences;   // N: B, or the number of packed sequences
  int64_t steps;       // T: of each sequence, or of all packed sequences together
  int64_t key_heads, value_heads, key_width, value_width;  // Hk, Hv, K, V
  double scale;
  StepView q, k;        // (B, T, Hk, K)
  StepView v;           // (B, T, Hv, V)
  StepView g, beta;     // in A; absent: no decay, ones
  StepView gv;          // (B, T, Hv, V) of A, or absent; only with a plain update without features
  StepView a, b;        // (B, T, Hk, K); both or neither, and only with a channel_decay
  const void* bonus;    // (N, Hv, K) of A contiguous, or null; only with a channel_decay
  const void* skip;     // (N, Hv, V) of A contiguous, or null; only with a plain update
  FeatureMap features;  // of q and k; only with a plain update
  bool normalize;       // divide by sums of weights; only with a plain update and without a skip
  StepView min_denominator;  // smallest divisors, (B, T, Hv) of A, or absent
  double eps;
  const void* initial_state;  // (N, Hv, K, W) of A contiguous, or null for zeros
  const int64_t* boundaries;  // null, or (N + 1): then B = 1 and sequence n has the rows
                              // boundaries[n] .. boundaries[n + 1]

  // Columns of a state, W: V, plus one for the sums if normalize.
  OMNIATTN_FN int64_t state_width() const { return value_width + normalize; }
  OMNIATTN_FN int64_t key_head_of(int64_t head) const { return head / (value_heads / key_heads); }
};

struct RecurrenceParams {
  Recurrence recurrence;
  int64_t heads;      // value heads per item on the CPU
  void* o;            // (B, T, Hv, V) of o_dtype, contiguous
  void* final_state;  // (N, Hv, K, W) of A contiguous
  void* states;       // (recurrence_slots, Hv, K W) of A, or null: saved for the backward
};

// Outputs are contiguous and have the shapes of the tensors whose gradients they are; dg, dgv,
// dbeta, dbonus, dskip, dmin_denominator and dinitial_state may be null. With several shards dq,
// dk, da and db are of A and hold the sums over the value heads of each shard, (shards, B, T, Hk,
// K).
struct RecurrenceBackwardParams {
  Recurrence recurrence;
  int64_t shards;                // equal parts of the value heads of a key head, 1 on CUDA
  int64_t parts;                 // number of these parts per item on the CPU
  StepView grad_o;               // (B, T, Hv, V) of o_dtype, or absent for zeros
  const void* grad_final_state;  // as initial_state
  const void* states;            // from the forward
  void *dq, *dk, *dv;
  void *da, *db;  // if there are a and b
  // Gradients in A.
  void *dg, *dgv, *dbeta, *dbonus, *dskip, *dmin_denominator, *dinitial_state;
};
static_assert(std::is_trivially_copyable_v<RecurrenceParams>);
static_assert(std::is_trivially_copyable_v<RecurrenceBackwardParams>);

// Tokens of a chunk of the backward; the forward saves states at the starts of chunks. A decay per
// channel cannot be factored out of the products of a chunk, whose cost grows with its length.
OMNIATTN_FN int64_t recurrence_chunk(bool channel_decay) { return channel_decay ? 16 : 32; }
OMNIATTN_FN int64_t recurrence_chunk(const Recurrence& p) {
  return recurrence_chunk(p.channel_decay || p.gv.data != nullptr);
}

// Slots of states. Sequence n of a batch begins at slot n ceil(T / chunk), a packed sequence at
// slot boundaries[n] / chunk + n, which leaves room for earlier sequences of any lengths.
OMNIATTN_FN int64_t recurrence_slots(const Recurrence& p) {
  const int64_t chunk = recurrence_chunk(p);
  return p.boundaries != nullptr ? p.steps / chunk + p.sequences
                                 : p.sequences * ceil_div(p.steps, chunk);
}

// One sequence: number, batch entry, first row, number of tokens, first slot of states.
struct RecurrenceSequence {
  int64_t index, batch, begin, count, slot;
};
OMNIATTN_FN RecurrenceSequence recurrence_sequence(const Recurrence& p, int64_t n) {
  const int64_t chunk = recurrence_chunk(p);
  if (p.boundaries == nullptr) return {n, n, 0, p.steps, n * ceil_div(p.steps, chunk)};
  const int64_t begin = p.boundaries[n];
  return {n, 0, begin, p.boundaries[n + 1] - begin, begin / chunk + n};
}

// True if a state meets rows of q, k and v as they are but for decays of keys, and there are more
// tokens than half a chunk.
OMNIATTN_FN bool plain_rows(const Recurrence& p) {
  const int64_t tokens = p.boundaries == nullptr ? p.steps : p.steps / larger(p.sequences, 1);
  return p.features == FeatureMap::identity && !p.normalize && p.gv.data == nullptr &&
         tokens > recurrence_chunk(p) / 2;
}
// True if a call is faster on tiles, where the machine has them.
OMNIATTN_FN bool recurrence_on_tiles(const Recurrence& p) {
  return p.dtype == DType::bf16 && !p.channel_decay && plain_rows(p);
}

struct RecurrenceKernels {
  // Item n ceil(Hv / heads) + i is part i of the value heads of sequence n. `memory` has
  // bytes(params.recurrence, params.heads) bytes.
  int64_t (*bytes)(const Recurrence&, int64_t heads);
  void (*forward)(const RecurrenceParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(RecurrenceKernels, recurrence_kernels)
// Kernels for calls with recurrence_on_tiles().
OMNIATTN_BF16_TILE_KERNEL_TABLE(RecurrenceKernels, recurrence_tile_kernels)

struct RecurrenceBackwardKernels {
  // Part h shards + s of a sequence is key head h with shard s of its value heads; their gradients
  // of q, k, a and b are added in order. Item n ceil(Hk shards / parts) + i has `parts` parts of
  // sequence n. `memory` has bytes(params.recurrence, params.shards, params.parts) bytes.
  int64_t (*bytes)(const Recurrence&, int64_t shards, int64_t parts);
  void (*backward)(const RecurrenceBackwardParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(RecurrenceBackwardKernels, recurrence_backward_kernels)
OMNIATTN_BF16_TILE_KERNEL_TABLE(RecurrenceBackwardKernels, recurrence_tile_backward_kernels)

// Bytes of working memory on CUDA; they depend on shapes only.
int64_t recurrence_bytes(const Recurrence& p);
int64_t recurrence_backward_bytes(const Recurrence& p);
Status launch_recurrence(const RecurrenceParams& p, void* memory, Stream stream);
Status launch_recurrence_backward(const RecurrenceBackwardParams& p, void* memory, Stream stream);

}  // namespace omniattn
