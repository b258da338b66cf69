// CUDA launchers of attention, see attention_params.h. No launcher allocates or waits.
#pragma once

#include "kernels/attention/attention_params.h"
#include "runtime/stream.h"

namespace omniattn {

// Number of statistics (lse, lse_tail, Delta): one for each head and row of q.
OMNIATTN_FN int64_t stat_rows(const AttentionProblem& p) {
  return (p.sequences.q != nullptr ? 1 : p.batch) * p.hq * p.lse_stride;
}

// For any dtype and head size: products by FMA in the compute type.
Status launch_attention(const AttentionForwardParams& p, Stream stream);

// True if tensor cores can be used: 16-bit elements, head sizes of at most 256 in multiples of
// 16 bytes, no rows of distances.
bool takes_mma_path(const AttentionProblem& p);
Status launch_attention_mma(const AttentionForwardParams& p, Stream stream);

// For few query rows per kv head and head sizes of at most 512. `workspace` holds
// attention_decode_workspace elements of the compute type.
bool takes_split_path(const AttentionProblem& p);
int64_t attention_decode_workspace(const AttentionProblem& p);
Status launch_attention_decode(const AttentionForwardParams& p, Stream stream);

// For weights that break a stick, with any dtype and head size.
Status launch_attention_stick(const AttentionForwardParams& p, Stream stream);

// Copies keys or values in pages or in int8 to rows (B, Tk, Hkv, width) of dtype, since only the
// decode kernel reads them in place. `factors` are those of int8.
Status launch_attention_gather_rows(const AttentionProblem& p, const HeadView& from,
                                    const HeadView& factors, int64_t width, void* to,
                                    Stream stream);

// Computes the table term of all pairs: attention_table_elements of the compute type,
// viewed by the problem's `relative`.
int64_t attention_table_elements(const AttentionProblem& p);
RelativeView attention_relative_view(const AttentionProblem& p, const void* memory);
Status launch_attention_expand_table(const AttentionProblem& p, void* memory, Stream stream);

// The backward in steps: first Delta = rowsum(dO * O) - dlse, to `workspace`, and part_sinks, both
// (B, Hq, Tq) in the compute type with the layout of lse ...
Status launch_attention_delta(const AttentionBackwardParams& p, Stream stream);
// ... then the gradients of q, k and v, and part_head_scale (attention_head_scale_parts, B, Hq,
// Tq), ...
int64_t attention_head_scale_parts(const AttentionProblem& p);
Status launch_attention_gradients(const AttentionBackwardParams& p, Stream stream);
// ... or by tensor cores, if they can be used, ...
bool takes_mma_path(const AttentionBackwardParams& p);
Status launch_attention_gradients_mma(const AttentionBackwardParams& p, Stream stream);
// ... or, if weights break a stick, for one segment of keys after another, which replaces Delta.
// The numbers of elements of the compute type belong to the memory of StickSegment.
struct StickSegment {
  Range keys;
  const void* entered;  // states of the rows before the segment; not read for the first one
  void* left;           // states after it
  void* checkpoints;    // states of the rows at each tile of the segment
  void* sums;           // dQ of the keys up to here
};
constexpr int64_t kStickKeys = 4096;  // keys of a segment
int64_t attention_stick_states(const AttentionProblem& p);
int64_t attention_stick_checkpoints(const AttentionProblem& p);
int64_t attention_stick_sums(const AttentionProblem& p);
Status launch_attention_stick_gradients(const AttentionBackwardParams& p, const StickSegment& s,
                                        Stream stream);
// ... the gradient of the bias, ...
Status launch_attention_bias_gradient(const AttentionBackwardParams& p, Stream stream);
// ... the gradient of the table, with attention_table_parts elements in part_relative, ...
int64_t attention_table_parts(const AttentionProblem& p);
Status launch_attention_table_gradient(const AttentionBackwardParams& p, Stream stream);
// ... the gradients of rows of distances, with attention_distance_parts elements in each wanted
// part_relative_keys and part_relative_queries, ...
int64_t attention_distance_parts(const AttentionProblem& p);
Status launch_attention_distance_gradients(const AttentionBackwardParams& p, Stream stream);
// ... and the sums (Hq,) of parts (count, B, Hq, Tq).
Status launch_attention_sum_rows(const AttentionProblem& p, const void* parts, int64_t count,
                                 void* out, Stream stream);

// Computes the share of one step of a program's gradient in the gradient of `table`, added to zeros
// in place or in attention_program_parts parts ...
int64_t attention_program_parts(const AttentionProblem& p);
Status launch_attention_program_gradient(const AttentionBackwardParams& p,
                                         const ProgramGradients::Table& table, int64_t step,
                                         Stream stream);
// ... and sums these parts.
Status launch_attention_sum_parts(const AttentionProblem& p, const void* parts, int64_t elements,
                                  void* out, Stream stream);
// Copies bytes from the CPU; a captured graph keeps a copy of them.
Status launch_attention_upload(const void* from, int64_t bytes, void* to, Stream stream);

Status launch_attention_weights(const AttentionWeightsParams& p, Stream stream);
Status launch_attention_select(const AttentionSelectParams& p, Stream stream);

}  // namespace omniattn
