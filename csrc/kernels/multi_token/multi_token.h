// Multi-token attention, forward and backward. With S = scale q k^T, which is 0 where key j is
// hidden from query i and outside of the sequence, for heads c and o of a group n of heads
//
//   X_c,ij = sum_ab w_cab S_c,i+a-cq+1,j+b-ck/2     P_c = softmax(X_c), 0 for hidden keys
//   A_o = sum_c P_c u_nco                           O_o = A_o v
//
//   dA_o = dO_o v^T      du_nco = sum P_c dA_o      dX_c = P_c (sum_o u_nco dA_o - Delta_c)
//   dw_cab = sum_ij dX_c,ij S_c,i+a-cq+1,j+b-ck/2   dS_c = dX_c convolved with w_c, 0 where hidden
//   dv = A^T dO          dq = scale dS k            dk = scale dS^T q
//
// A block is kRows queries of the heads of a group, and the cq - 1 queries before it, whose logits
// it computes again. It holds X, then P, for all keys that it sees: memory grows with Tk, and a
// second pass over the keys would cost two products and a convolution. S and dS exist for tiles of
// kKeys keys and the ck / 2 keys on either side. The backward has whole rows of dA, too, and adds
// gradients to the sums of its item, which takes every items_per_group-th block.
#pragma once

#include <type_traits>

#include "kernels/recurrence/recurrence.h"
#include "semantics/arith.h"

namespace omniattn {

struct MultiToken {
  static constexpr int64_t kRows = 32;
  static constexpr int64_t kKeys = 128;
  static constexpr int64_t kPanel = 64;  // packed columns of an item of the packing

  DType dtype;  // of all inputs and results; A is its accumulator type
  int64_t batch, queries, keys, heads, kv_heads, width, value_width;
  int64_t query_taps, key_taps, mixed_heads;  // cq, ck, and heads of a group
  int64_t lead;                               // queries at the start without results
  bool causal;
  double scale;
  int64_t items_per_group;           // items of a group of heads of a batch entry
  StepView q, k, v;                  // (B, Tq, Hq, D), (B, Tk, Hkv, D) and (B, Tk, Hkv, Dv)
  const void *weight, *head_weight;  // (Hq, cq, ck) and (Hq / C, C, C), contiguous
  void* packed;                      // packed_elements of A
  bool packs_gradients;              // packed for the backward, too

  OMNIATTN_FN int64_t rows() const { return queries - lead; }
  OMNIATTN_FN int64_t groups() const { return heads / mixed_heads; }
  OMNIATTN_FN int64_t blocks() const { return ceil_div(rows(), kRows); }
  OMNIATTN_FN int64_t items() const { return batch * groups() * items_per_group; }
  OMNIATTN_FN int64_t halo() const { return query_taps - 1; }
  OMNIATTN_FN int64_t side() const { return key_taps / 2; }
  OMNIATTN_FN int64_t kv_head_of(int64_t head) const { return head / (heads / kv_heads); }
  // First group of heads that reads a kv head.
  OMNIATTN_FN int64_t first_group(int64_t kv_head) const {
    return kv_head * (heads / kv_heads) / mixed_heads;
  }
  // Number of groups of heads that read one kv head, at most.
  OMNIATTN_FN int64_t readers() const {
    int64_t most = 1;
    for (int64_t h = 0; h < kv_heads; ++h) {
      const int64_t last = ((h + 1) * (heads / kv_heads) - 1) / mixed_heads;
      most = larger(most, last - first_group(h) + 1);
    }
    return most;
  }
  // Number of keys that a query sees, which are the first ones; 0 for a query before the first one.
  OMNIATTN_FN int64_t seen_by(int64_t query) const {
    if (query < 0) return 0;
    return causal ? larger(0, smaller(keys, query + 1 + keys - queries)) : keys;
  }

  // Packed keys of a kv head: K^T in panels, whose column c is the key c - side, with zeros around
  // the keys, and V as rows; for gradients also K as rows and V^T in panels.
  OMNIATTN_FN int64_t panels() const { return ceil_div(keys + 2 * side(), kPanel); }
  OMNIATTN_FN int64_t row_of_width(int64_t n) const { return round_up(n, 16) + 16; }
  OMNIATTN_FN int64_t packed_head() const {
    const int64_t forward = panels() * kPanel * width + keys * row_of_width(value_width);
    const int64_t backward = keys * row_of_width(width) + panels() * kPanel * value_width;
    return forward + (packs_gradients ? backward : 0);
  }
  OMNIATTN_FN int64_t packed_elements() const { return batch * kv_heads * packed_head(); }
};

struct MultiTokenParams {
  MultiToken problem;
  void* out;  // (B, Tq - lead, Hq, Dv), contiguous
};

// Gradients in parts of A, (parts, sizes of the gradient) each, to which items add; null if they
// are not wanted. Item n of a group has part n of dq, part (b, n) of dweight and dhead_weight, and
// part (group - first_group, n) of dk and dv.
struct MultiTokenBackwardParams {
  MultiToken problem;
  StepView grad_out;  // (B, Tq - lead, Hq, Dv)
  void *dq, *dk, *dv, *dweight, *dhead_weight;
};
static_assert(std::is_trivially_copyable_v<MultiTokenParams>);
static_assert(std::is_trivially_copyable_v<MultiTokenBackwardParams>);

struct MultiTokenKernels {
  int64_t (*pack_bytes)(const MultiToken&);
  // Item: kPanel packed columns of a kv head of a batch entry.
  void (*pack)(const MultiToken&, void* memory, int64_t begin, int64_t end);
  int64_t (*bytes)(const MultiToken&);
  void (*forward)(const MultiTokenParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(MultiTokenKernels, multi_token_kernels)

struct MultiTokenBackwardKernels {
  int64_t (*bytes)(const MultiToken&);
  void (*backward)(const MultiTokenBackwardParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(MultiTokenBackwardKernels, multi_token_backward_kernels)

}  // namespace omniattn
