// Mixture of experts (Shazeer et al. 2017, arXiv 1701.06538), from routed tokens to their outputs:
//
//   y[n] = sum_s weight[n, s] (W_down,e h + b_down,e)        e = index[n, s]
//   h = act(gate) * up, or act(pre) for experts without a gate      pre = W_up,e x[n] + b_up,e
//
// The (token, slot) pairs are sorted stably by expert; row r of every (rows, ...) array belongs to
// the r-th pair. A work item of a product is a block, of at most kMoeBlockRows rows of one expert,
// times some columns of the expert's weights. Blocks depend on the routing alone, sums have a fixed
// order, and the slots of a token are added in order, so results do not depend on threads.
//
// forward    gather (tokens to rows), up (first product, with the activation as its epilogue),
//            project (second product), combine
// backward   gather, up_backward (grad_y W_down, with the activation's backward as its epilogue),
//            project (times W_up), combine; the gradients of the weights are plain products, gemm.h
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "semantics/activation_rules.h"
#include "semantics/arith.h"

namespace omniattn {

inline constexpr int64_t kMoeBlockRows = 512;
// Features of h, or columns of y, in one item.
inline constexpr int64_t kMoeFeatures = 128;

// Place of the gate in `pre` (columns): none, its first half, or its even elements.
enum class MoeGate : int32_t { none = 0, halves = 1, interleaved = 2 };
inline constexpr int64_t kMoeGateCount = 3;

struct MoeBlock {
  int64_t expert, row, rows;
};

// Operand B of a product for each expert: element (k, n) of expert e is
// data[e * expert + k * k_stride + n * n_stride]; k_stride or n_stride is 1.
struct MoeMatrix {
  const void* data;
  int64_t expert, k_stride, n_stride;
  bool as_many_rows;  // few rows are multiplied in the order of many
};

// How h is computed from pre.
struct MoeHidden {
  Activation act;
  MoeGate gate;
  Clamp clamp;
  int64_t features;

  OMNIATTN_FN int64_t columns() const { return gate == MoeGate::none ? features : 2 * features; }
};

// In all structs dtype is that of the op's tensors. `operand` and `computed` arrays hold operands
// of products: rows of tensors, and values that kernels computed (MoeKernels::operands).
// `compute` arrays hold sums (compute_t).
struct MoeOperands {
  DType tensor, computed;
};

struct MoeGatherParams {
  DType dtype;
  int64_t cols, x_stride;
  const int64_t* tokens;  // (rows)
  const void* x;          // (tokens, cols)
  void* out;              // (rows, cols) operand
};

struct MoeUpParams {
  DType dtype;
  MoeHidden hidden_of;
  int64_t k;
  const MoeBlock* blocks;
  int64_t block_count;
  const void* x;     // (rows, k) operand
  MoeMatrix up;      // (k, columns)
  const void* bias;  // (experts, columns) or null
  const void* made;  // (rows, columns) compute: finished product with bias; null to compute it
  void* pre;         // (rows, columns) of dtype, or null
  void* hidden;      // (rows, features) computed, or null
};

struct MoeUpBackwardParams {
  DType dtype;
  MoeHidden hidden_of;
  int64_t k;
  const MoeBlock* blocks;
  int64_t block_count;
  const void* grad_y;     // (rows, k) operand
  MoeMatrix down;         // (k, features)
  const void* down_bias;  // (experts, k) or null
  const void* made;       // (rows, features) compute: finished grad_y W_down; null to compute it
  const void* pre;        // (rows, columns) of dtype
  const void* weight;     // (rows) compute
  void* grad_pre;         // (rows, columns) computed
  void* weighted_hidden;  // (rows, features) computed: weight * h
  void* grad_weight;      // (rows, feature blocks) compute: parts of grad_y . f(x)
};

struct MoeProjectParams {
  DType dtype;
  int64_t k, n;
  const MoeBlock* blocks;
  int64_t block_count;
  const void* a;     // (rows, k) computed
  MoeMatrix b;       // (k, n)
  const void* bias;  // (experts, n) or null
  void* out;         // (rows, n) compute
};

struct MoeCombineParams {
  DType dtype;
  int64_t cols, slots;
  const void* rows;            // (rows, cols) compute
  const int64_t* row_of_slot;  // (tokens, slots), -1: none
  const void* weight;          // (tokens, slots) compute, or null for 1
  void* y;                     // (tokens, cols)
};

struct MoeBiasGradParams {
  DType dtype;
  int64_t cols;
  const int64_t* offsets;  // (experts + 1), rows of each expert
  const void* x;           // (rows, cols) computed or operand
  bool computed;
  const void* weight;  // (rows) compute, or null for 1
  void* out;           // (experts, cols)
};

// out (tokens, slots) = the sum of the parts in each slot's row; 0 for a slot without a row.
struct MoeSlotSumParams {
  DType dtype;  // of rows and out
  int64_t parts;
  const int64_t* row_of_slot;  // (tokens, slots), -1: none
  const void* rows;            // (rows, parts)
  void* out;
};
static_assert(std::is_trivially_copyable_v<MoeUpParams>);
static_assert(std::is_trivially_copyable_v<MoeUpBackwardParams>);
static_assert(std::is_trivially_copyable_v<MoeProjectParams>);

struct MoeKernels {
  MoeOperands (*operands)(DType dtype);
  int64_t (*workspace_bytes)(DType dtype);  // per thread, for the three products

  void (*gather)(const MoeGatherParams&, int64_t begin, int64_t end);  // item: row
  // Items: groups of kMoeFeatures features of each block (project: of 2 kMoeFeatures columns).
  void (*up)(const MoeUpParams&, void* workspace, int64_t begin, int64_t end);
  void (*up_backward)(const MoeUpBackwardParams&, void* workspace, int64_t begin, int64_t end);
  void (*project)(const MoeProjectParams&, void* workspace, int64_t begin, int64_t end);
  void (*combine)(const MoeCombineParams&, int64_t begin, int64_t end);     // item: token
  void (*bias_grad)(const MoeBiasGradParams&, int64_t begin, int64_t end);  // item: expert
  void (*slot_sum)(const MoeSlotSumParams&, int64_t begin, int64_t end);    // item: slot
};

OMNIATTN_PRODUCT_KERNEL_TABLE(MoeKernels, moe_kernels)

}  // namespace omniattn
