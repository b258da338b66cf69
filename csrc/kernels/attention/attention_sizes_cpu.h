// Tiles, work items and scratch memory of attention on the CPU.
//
// 16-bit floats are widened when they are packed, and all arithmetic is in compute_t<T>. Only if
// the ISA multiplies 16-bit operands, blocks of queries are multiplied in their own type, and P
// and dS after rounding. Every number depends on shapes and values only, not on the number of
// threads or the order of items.
#pragma once

#include <cstdint>

#include "kernels/attention/attention_params.h"
#include "semantics/block_schedule.h"

namespace omniattn {

// Rows are padded to a multiple of 16 elements, but not of 256 bytes, which would put the rows
// of a tile into few cache sets.
OMNIATTN_FN int64_t padded_row(int64_t width) {
  const int64_t padded = round_up(width, 16);
  return padded % 64 == 0 ? padded + 16 : padded;
}

constexpr int64_t kKeyPanel = 64;        // keys side by side in packed K^T
constexpr int64_t kKeyBlock = 128;       // keys of one tile
constexpr int64_t kKeyRow = 144;         // a row of kKeyBlock keys, padded
constexpr int64_t kQueryBlock = 96;      // queries of one tile
constexpr int64_t kTileSplitKeys = 512;  // as kSplitKeys, for decoding by register tiles
constexpr int64_t kDecodeQueries = 4;    // most queries that are decoded with any number of rows
constexpr int64_t kDecodeTileRows = 32;  // from this many rows on, register tiles are well filled
constexpr int64_t kBackwardItems = 8;    // the backward splits keys to get this many work items,
constexpr int64_t kBackwardSplits = 8;   // with at most this many dQ buffers
constexpr int64_t kTablePlanes = 16;     // per head, for the gradient of a shared table

// Work items. Sizes of memory are in elements of the compute type.

OMNIATTN_FN int64_t query_block_count(const AttentionProblem& p) {
  return ceil_div(p.tq, kQueryBlock);
}
OMNIATTN_FN int64_t key_block_count(const AttentionProblem& p) { return ceil_div(p.tk, kKeyBlock); }

// Packed K^T [key panel][d][64] and V [key][padded_row(dv)] of one kv head.
OMNIATTN_FN int64_t packed_keys(const AttentionProblem& p) { return round_up(p.tk, kKeyPanel); }
OMNIATTN_FN int64_t packed_head_elements(const AttentionProblem& p) {
  return packed_keys(p) * (p.d + padded_row(p.dv));
}

OMNIATTN_FN int64_t pack_items(const AttentionProblem& p) {
  return p.batch * p.hkv * ceil_div(p.tk, kKeyPanel);
}
OMNIATTN_FN int64_t forward_items(const AttentionProblem& p) {
  return p.batch * p.hq * query_block_count(p);
}
OMNIATTN_FN int64_t kv_head_items(const AttentionProblem& p) { return p.batch * p.hkv; }
OMNIATTN_FN int64_t forward_workspace_elements(const AttentionProblem& p) {
  return p.batch * p.hkv * packed_head_elements(p);
}
// Memory for the registers of a program.
OMNIATTN_FN int64_t program_elements(const AttentionProblem& p) {
  return p.program == nullptr ? 0 : p.program->forward_registers * kProgramRow;
}
OMNIATTN_FN int64_t backward_program_elements(const AttentionProblem& p) {
  return p.program == nullptr ? 0 : p.program->backward_registers * kProgramRow;
}
// Memory for a tile's rows of distances, also transposed, their gradient, some rows of its scores,
// q or k as rows, and the transposed tile.
constexpr int64_t kBand = kQueryBlock + kKeyBlock;
constexpr int64_t kMostBandRows = 16;
OMNIATTN_FN int64_t distance_elements(const AttentionProblem& p) {
  if (!has_distance_rows(p)) return 0;
  return kBand * (2 * padded_row(p.d) + p.d + kMostBandRows) +
         kKeyBlock * (padded_row(p.d) + kQueryBlock);
}
// Memory for q, S and O tiles, m, and the lanes of l.
OMNIATTN_FN int64_t forward_scratch_elements(const AttentionProblem& p) {
  return kQueryBlock * (padded_row(p.d) + kKeyBlock + padded_row(p.dv) + 1 + 16) +
         program_elements(p) + distance_elements(p);
}

// With few queries a head's register tiles would be nearly empty, even if its group is large
// (MLA: 128 heads on one latent).
OMNIATTN_FN bool takes_decode_path_cpu(const AttentionProblem& p) {
  return takes_decode_path(p) || (p.tq <= kDecodeQueries && p.tk > 0 && !has_distance_rows(p));
}
OMNIATTN_FN bool decodes_by_tiles(const AttentionProblem& p) {
  return group_size(p) * p.tq >= kDecodeTileRows;
}
// Queries and results of many rows fill L2, and every split reads and writes them once.
OMNIATTN_FN int64_t split_keys(const AttentionProblem& p) {
  return decodes_by_tiles(p) ? kTileSplitKeys : kSplitKeys;
}
OMNIATTN_FN int64_t decode_splits(const AttentionProblem& p) {
  return ceil_div(p.tk, split_keys(p));
}
// Kv heads become separate work items only if batch and splits give too few items.
OMNIATTN_FN int64_t decode_head_items(const AttentionProblem& p) {
  return p.batch * decode_splits(p) >= kBackwardItems ? 1 : p.hkv;
}
OMNIATTN_FN int64_t decode_items(const AttentionProblem& p) {
  return p.batch * decode_splits(p) * decode_head_items(p);
}
// Size of a partial result, one per row and split: O (dv), m, l.
OMNIATTN_FN int64_t partial_elements(const AttentionProblem& p) { return padded_row(p.dv) + 16; }
OMNIATTN_FN int64_t decode_workspace_elements(const AttentionProblem& p) {
  return p.batch * decode_splits(p) * p.hq * p.tq * partial_elements(p);
}
// Size of the queries of one kv head: as rows, or as columns for register tiles.
OMNIATTN_FN int64_t decode_query_elements(const AttentionProblem& p) {
  const int64_t rows = group_size(p) * p.tq;
  return decodes_by_tiles(p) ? round_up(rows, kKeyPanel) * p.d : rows * padded_row(p.d);
}
// Memory for the queries of an item and the logits of one kv head for 64 keys; for register tiles
// also for the transposed logits, and the keys or their values as rows.
OMNIATTN_FN int64_t decode_scratch_elements(const AttentionProblem& p) {
  const int64_t rows = group_size(p) * p.tq, wide = padded_row(p.d > p.dv ? p.d : p.dv);
  return p.hkv * decode_query_elements(p) +
         kKeyPanel * (rows + (decodes_by_tiles(p) ? round_up(rows, kKeyPanel) + wide : 0)) +
         program_elements(p);
}

// Number of batch entries that add their table gradients to one plane, chosen so
// that a shared table has at most kTablePlanes per head. (A plane for each of
// 512 windows took twice as long.)
OMNIATTN_FN int64_t batches_per_plane(const AttentionBackwardParams& p) {
  return p.problem.table.stride_b == 0 ? ceil_div(p.problem.batch, kTablePlanes) : 1;
}
OMNIATTN_FN int64_t table_parts(const AttentionBackwardParams& p) {
  return ceil_div(p.problem.batch, batches_per_plane(p));
}
// An item of the backward owns everything it adds to. It processes in order the batch entries and
// kv heads that share a bias gradient, a plane of the table or rows of distances.
OMNIATTN_FN int64_t batches_per_item(const AttentionBackwardParams& p) {
  if (p.grad_bias != nullptr && p.grad_bias_stride_b == 0) return p.problem.batch;
  if (p.grad_program != nullptr) {
    return p.grad_program->shares_batches ? p.problem.batch
                                          : ceil_div(p.problem.batch, kTablePlanes);
  }
  const bool shares_rows = p.grad_relative_keys != nullptr || p.grad_relative_queries != nullptr;
  return p.grad_table != nullptr || shares_rows ? batches_per_plane(p) : 1;
}
// Number of partial sums of gradients of rows of distances; range of rows that a problem reads.
OMNIATTN_FN int64_t distance_parts(const AttentionBackwardParams& p) {
  return ceil_div(p.problem.batch, batches_per_item(p));
}
OMNIATTN_FN Range distance_range(const AttentionProblem& p, const DistanceRows& x) {
  return {row_of_distance(x, distance_of(p, p.tq - 1, 0)),
          row_of_distance(x, distance_of(p, 0, p.tk - 1)) + 1};
}
OMNIATTN_FN int64_t distance_part_elements(const AttentionProblem& p, const DistanceRows& x) {
  const Range rows = distance_range(p, x);
  return p.hq * (rows.end - rows.begin) * p.d;
}
// If there are many windows, an item takes all heads of each window; they are adjacent in memory.
OMNIATTN_FN int64_t heads_per_item(const AttentionBackwardParams& p) {
  const bool shares_bias = (p.grad_bias != nullptr && p.grad_bias_stride_h == 0) ||
                           (p.grad_program != nullptr && p.grad_program->shares_heads);
  const int64_t batches = batches_per_item(p);
  return shares_bias || (batches > 1 && batches < p.problem.batch) ? p.problem.hkv : 1;
}
OMNIATTN_FN int64_t backward_owners(const AttentionBackwardParams& p) {
  return ceil_div(p.problem.batch, batches_per_item(p)) * (p.problem.hkv / heads_per_item(p));
}
// `owners` is the sum of backward_owners over all problems of the call. A stick is broken along all
// keys of a row, in order.
OMNIATTN_FN int64_t backward_splits(const AttentionBackwardParams& p, int64_t owners) {
  if (is_stick(p.problem.score)) return 1;
  const int64_t wanted = ceil_div(kBackwardItems, owners);
  const int64_t limit = wanted < kBackwardSplits ? wanted : kBackwardSplits;
  const int64_t blocks = key_block_count(p.problem);
  return limit < blocks ? limit : blocks > 0 ? blocks : 1;
}
// Index of the part of a gradient that belongs to an item; `parts` of them exist for all items.
OMNIATTN_FN int64_t program_part(const AttentionBackwardParams& p, bool has_heads, int64_t b,
                                 int64_t kv_head, int64_t split) {
  const int64_t batch = b / batches_per_item(p), heads = p.problem.hkv / heads_per_item(p);
  return (has_heads ? batch : batch * heads + kv_head / heads_per_item(p)) * p.splits + split;
}
OMNIATTN_FN int64_t backward_items(const AttentionBackwardParams& p) {
  return backward_owners(p) * p.splits;
}
// Size of 16-bit columns: the transpose of `rows` rows.
OMNIATTN_FN int64_t column_elements(const AttentionProblem& p, int64_t rows, int64_t width) {
  return size_of(p.dtype) == 2 ? round_up(rows * width, 32) / 2 : 0;
}
// Memory for `rows` query rows: pre * q and dO, both also as columns, one dQ per split, Delta, the
// shift of the exponent, the factor of the row and the cost of its keys.
OMNIATTN_FN int64_t backward_workspace_elements(const AttentionBackwardParams& p, int64_t rows) {
  const AttentionProblem& x = p.problem;
  return rows * (padded_row(x.d) * (1 + p.splits) + padded_row(x.dv) + 5) +
         column_elements(x, rows, x.d) + column_elements(x, rows, x.dv);
}
// Memory for packed K^T, V^T and K, the dK and dV of one key block, and the P and dS
// tiles, also as 16-bit numbers.
OMNIATTN_FN int64_t backward_scratch_elements(const AttentionBackwardParams& p) {
  const AttentionProblem& x = p.problem;
  return kKeyBlock * (x.d + x.dv + padded_row(x.d)) +
         kKeyRow * (padded_row(x.d) + padded_row(x.dv)) + 2 * kQueryBlock * kKeyBlock +
         3 * column_elements(x, kQueryBlock, kKeyRow) + backward_program_elements(x) +
         distance_elements(x);
}

OMNIATTN_FN int64_t weights_items(const AttentionWeightsParams& w) {
  return w.problem.batch * weights_heads(w) * key_block_count(w.problem);
}
// Memory for packed K^T, q and S tiles, and the sums.
OMNIATTN_FN int64_t weights_scratch_elements(const AttentionProblem& p) {
  return kKeyBlock * p.d + kQueryBlock * (padded_row(p.d) + kKeyBlock) + kKeyBlock +
         program_elements(p) + distance_elements(p);
}
// Items and memory for few query rows, which share the keys of a kv head: queries, logits of
// 64 keys, and the sums of a head.
OMNIATTN_FN int64_t few_rows_items(const AttentionProblem& p) {
  return p.batch * p.hkv * decode_splits(p);
}
OMNIATTN_FN int64_t few_rows_scratch_elements(const AttentionProblem& p) {
  return group_size(p) * p.tq * (padded_row(p.d) + kKeyPanel) + kKeyPanel + program_elements(p);
}

// Memory for packed K^T, q and S tiles; the items are forward_items.
OMNIATTN_FN int64_t select_scratch_elements(const AttentionProblem& p) {
  return kKeyBlock * p.d + kQueryBlock * (padded_row(p.d) + kKeyBlock) + program_elements(p) +
         distance_elements(p);
}

}  // namespace omniattn
