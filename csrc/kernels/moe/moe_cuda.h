// CUDA launchers of the mixture of experts, see moe.h. No launcher allocates or waits, and nothing
// on the host depends on the routing: grids are sized for the largest possible number of blocks.
//
// forward    route (stable sort by expert), up, project, combine
// backward   route, up_backward, project and combine (x), weight_grad and bias_grad (up, down),
//            slot_grad (routing weights)
#pragma once

#include "kernels/moe/moe.h"
#include "runtime/stream.h"

namespace omniattn {

// Columns of a tile of a product; grad_weight has one part per tile.
inline constexpr int kMoeTileColumns = 128;
inline constexpr int64_t kMoeRouteChunk = 256;

// Sort of the (token, slot) pairs. Rows from offsets[experts] on belong to no expert.
struct MoeRouting {
  int64_t tokens, slots, experts;
  const int64_t* index;   // (tokens, slots)
  int64_t* counts;        // (chunks, experts): pairs of the chunk; later of all earlier chunks
  int64_t* offsets;       // (experts + 1), first row of each expert
  int64_t* block_starts;  // (experts + 1), first block of each expert
  int64_t* token_of_row;  // (tokens slots)
  int64_t* slot_of_row;   // (tokens slots), flat
  int64_t* row_of_slot;   // (tokens, slots), -1: none
  MoeBlock* blocks;       // the blocks of all experts, then empty ones
  int64_t block_rows, block_count;

  OMNIATTN_FN int64_t pairs() const { return tokens * slots; }
  OMNIATTN_FN int64_t chunks() const { return ceil_div(pairs(), kMoeRouteChunk); }
  // Each expert with rows has at most one block that is not full.
  static constexpr int64_t most_blocks(int64_t pairs, int64_t experts, int64_t block_rows) {
    return pairs / block_rows + (pairs < experts ? pairs : experts);
  }
};

// Row r of an operand: row tokens[r] of data, or row r if tokens is null.
struct MoeRows {
  const void* data;
  const int64_t* tokens;
  int64_t stride;
};

// Product of blocks of rows of `a` with the matrix of each block's expert.
struct MoeProduct {
  DType dtype;
  const MoeBlock* blocks;
  int64_t block_count;
  MoeRows a;    // (rows, k)
  MoeMatrix b;  // (k, n)
  int64_t k, n;
};

struct MoeUpProduct {
  MoeProduct product;
  MoeHidden hidden_of;
  const void* bias;  // (experts, columns) or null
  void* pre;         // (rows, columns) or null
  void* hidden;      // (rows, features) or null
};

struct MoeUpBackwardProduct {
  MoeProduct product;  // grad_y (rows, k), down (k, features)
  MoeHidden hidden_of;
  const int64_t* slot_of_row;
  const void* weights;    // (tokens, slots) compute
  const void* pre;        // (rows, columns)
  void* grad_pre;         // (rows, columns)
  void* weighted_hidden;  // (rows, features)
  void* grad_weight;      // (rows, tiles of columns) compute: parts of (grad_y W_down) . h
};

struct MoeProjectProduct {
  MoeProduct product;
  const void* bias;  // (experts, n) or null
  void* out;         // (rows, n) compute
};

// out (experts, m, n): sums over the rows of each expert of a (rows, m)^T b (rows, n).
struct MoeWeightGrad {
  DType dtype;
  int64_t experts;
  const int64_t* offsets;
  MoeRows a, b;
  int64_t m, n;
  void* out;
};

struct MoeSlotGradParams {
  DType dtype;
  int64_t pairs, slots, cols, parts;
  const int64_t *index, *row_of_slot;  // (pairs)
  const void* grad_weight;             // (rows, parts) compute
  MoeRows grad_y;                      // (tokens, cols)
  const void* down_bias;               // (experts, cols) or null
  void* out;                           // (pairs) compute
};

struct MoeColumnSums {
  DType dtype;
  int64_t experts, cols;
  const int64_t* offsets;
  MoeRows x;                   // (rows, cols)
  const int64_t* slot_of_row;  // used with weights
  const void* weights;         // (pairs) compute, or null for 1
  void* out;                   // (experts, cols)
};

Status launch_moe_route(const MoeRouting& r, Stream stream);
// Clears the rows of `pre` that belong to no expert.
Status launch_moe_clear(DType dtype, const MoeRouting& r, int64_t columns, void* pre,
                        Stream stream);
Status launch_moe_combine(const MoeCombineParams& p, int64_t tokens, Stream stream);
Status launch_moe_slot_grad(const MoeSlotGradParams& p, Stream stream);
Status launch_moe_column_sums(const MoeColumnSums& p, Stream stream);

// Copies the rows of experts, of a 16-bit dtype in whole 16-byte pieces, to `to` (rows, cols).
Status launch_moe_gather(DType dtype, const MoeRouting& r, const MoeRows& from, int64_t cols,
                         void* to, Stream stream);

// Products by FMA, for any dtype and strides, or by tensor cores, for 16-bit dtypes whose rows and
// matrices consist of whole 16-byte pieces. kMoeFinished takes finished products (rows, n) of such
// a dtype in place of `a`, and multiplies only for the gradients of weights.
struct MoeProductKernels {
  int64_t block_rows;
  Status (*up)(const MoeUpProduct&, Stream);
  Status (*up_backward)(const MoeUpBackwardProduct&, Stream);
  Status (*project)(const MoeProjectProduct&, Stream);
  Status (*weight_grad)(const MoeWeightGrad&, Stream);
};
extern const MoeProductKernels kMoeFma, kMoeMma, kMoeFinished;

}  // namespace omniattn
