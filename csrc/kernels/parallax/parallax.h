// Parallax: attention minus the covariance of values and keys times a second query, forward and
// backward. With p = softmax(scale q k^T) and s = r k^T over the visible keys, for a query,
//
//   A = sum p v      B = sum p s v      m = sum p s      O = (1 + m) A - B
//
// and with dW = dO v^T, e = dO A and f = dO B in the backward, W = p (1 + m - s),
//
//   dv = W^T dO      ds = p (e - dW)      dl = p ((dW - e) (1 + m - s) - (e m - f))
//
// where dl is the gradient of the logits. Products of three cannot come from a backward of
// attention, whose weights are p (dW - e); the forward alone could.
//
// Blocks of queries go through tiles of keys by an online softmax. The rows of q and r, and those
// of p and p s, are stacked, so that a tile takes two products. The backward finds A, B and m of a
// block again, then goes through its tiles a second time.
#pragma once

#include "kernels/recurrence/recurrence.h"

namespace omniattn {

struct Parallax {
  DType dtype;
  int64_t sequences;           // B, or the number of packed sequences
  int64_t queries, keys;       // Tq, Tk of each batch entry
  int64_t longest;             // no sequence has more queries
  int64_t longest_keys;        // or more keys
  int64_t heads, key_heads;    // Hq, Hkv
  int64_t width, value_width;  // D, Dv
  int64_t left, right;         // visible keys before and after a query's position, or -1
  double scale;
  StepView q, r, k, v;
  const int64_t* boundaries;  // null, or (N + 1): then B = 1, Tq = Tk and sequence n has the rows
                              // boundaries[n] .. boundaries[n + 1]

  static constexpr int64_t kRows = 64;  // queries of a block
  // Number of blocks of the longest sequence; at least 1, since a backward, which has an item for
  // each head of a sequence without queries, too, must not have more items than `items`.
  OMNIATTN_FN int64_t blocks() const { return larger(1, ceil_div(longest, kRows)); }
  OMNIATTN_FN int64_t items() const { return sequences * heads * blocks(); }
  OMNIATTN_FN int64_t backward_items() const { return sequences * heads; }
  OMNIATTN_FN int64_t group() const { return heads > 0 ? heads / key_heads : 1; }
};

struct ParallaxParams {
  Parallax problem;
  void* o;  // (B, Tq, Hq, Dv) contiguous
};
struct ParallaxBackwardParams {
  Parallax problem;
  StepView grad_o;  // or absent for zeros
  void *dq, *dr;    // contiguous, in the shapes of q and r
  // In the shapes of k and v, contiguous; if heads share a head of keys, a part of the accumulator
  // type for each of them, (Hq / Hkv, B, Tk, Hkv, D or Dv).
  void *dk, *dv;
};
static_assert(std::is_trivially_copyable_v<ParallaxParams>);
static_assert(std::is_trivially_copyable_v<ParallaxBackwardParams>);

struct ParallaxKernels {
  int64_t (*bytes)(const Parallax&);
  // An item is a block of queries of a head, the last ones first.
  void (*forward)(const ParallaxParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(ParallaxKernels, parallax_kernels)

struct ParallaxBackwardKernels {
  int64_t (*bytes)(const Parallax&);
  // Item n Hq + h is head h of the queries of sequence n.
  void (*backward)(const ParallaxBackwardParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(ParallaxBackwardKernels, parallax_backward_kernels)

}  // namespace omniattn
