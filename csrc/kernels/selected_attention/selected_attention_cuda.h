// CUDA launchers of selected attention, see selected_attention.h. No launcher allocates or waits.
#pragma once

#include "kernels/selected_attention/selected_attention.h"

namespace omniattn {

// Lists of all batch entries and heads, by block: for each block, the lists that contain it, in
// order. A counting sort in which each thread block counts some lists.
struct InvertedLists {
  int32_t* offsets;  // (B, heads, parts, blocks), zero on entry
  int32_t* starts;   // (B, heads, blocks + 1)
  int32_t* lists;    // (B, heads, list_count * count)
};
constexpr int64_t kListsOfPart = 64;
OMNIATTN_FN int64_t inverted_parts(const SelectedLists& s, const AttentionProblem& p) {
  return ceil_div(list_count(s, p), kListsOfPart);
}
OMNIATTN_FN int64_t selected_blocks(const SelectedLists& s, const AttentionProblem& p) {
  return ceil_div(p.tk, s.block_size);
}

Status launch_selected_forward(const SelectedForwardParams& params, Stream stream);

Status launch_invert_lists(const SelectedLists& s, const AttentionProblem& p,
                           const InvertedLists& to, Stream stream);
// Must follow launch_attention_delta.
Status launch_selected_gradients(const SelectedBackwardParams& params, const InvertedLists& lists,
                                 Stream stream);

}  // namespace omniattn
