// Cross entropy over the rows of a matrix of logits, forward and backward.
//
//   x_iv = c tanh(logit_iv / c) / T, or without a softcap c = 0 logit_iv / T
//   lse_i = ln sum_v exp(x_iv)        e = label_smoothing        z = z_loss
//   loss_i = (1 - e) w_y (lse_i - x_iy) + e/V sum_v w_v (lse_i - x_iv) + z w_y lse_i^2
//   dx_iv = g_i ((a_i + 2 z w_y lse_i) exp(x_iv - lse_i) - e/V w_v - (1 - e) w_y [v = y_i])
//   a_i = (1 - e) w_y + e/V sum_v w_v
//
// with class weights w (1 without them). Rows whose target is ignore_index give 0. lse_i
// is kept as the maximum and the logarithm of the sum of exp(x_iv - maximum): their sum
// would lose the latter at large logits. Statistics are in fp32 (fp64 for fp64), by the
// online recurrence of Milakov and Gimelshein 2018 (arXiv 1805.02867): a row is read from
// memory once. Work items are rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"

namespace omniattn {

// Rows of a loss, and their weights.
struct LossRows {
  DType dtype;  // of the logits
  int64_t count;
  const int64_t* target;     // (count), or null: all rows count
  const void* class_weight;  // (cols) in the compute type, or null for 1
  void* loss;                // (count) in the compute type; null in a backward
  int64_t ignore_index;
};

struct CrossEntropyParams {
  LossRows rows;  // targets in [0, cols) or ignore_index
  int64_t cols;
  const void* logits;       // (rows, cols), `stride` between rows
  void *row_max, *log_sum;  // (rows) in the compute type: lse = row_max + log_sum
  int64_t stride;
  double label_smoothing, z_loss, softcap, temperature;
};

struct CrossEntropyBackwardParams {
  CrossEntropyParams forward;
  DType grad_dtype;        // dtype of the logits, or on CUDA a half dtype for fp32 logits
  const void* row_weight;  // (rows) in the compute type
  void* dlogits;           // (rows, cols) of grad_dtype, contiguous; may be the logits themselves
  bool stream;             // write past the caches, for results that do not fit in them
};
static_assert(std::is_trivially_copyable_v<CrossEntropyBackwardParams>);

struct LossKernels {
  void (*forward)(const CrossEntropyParams&, int64_t begin, int64_t end);
  void (*backward)(const CrossEntropyBackwardParams&, int64_t begin, int64_t end);
  // total (n) of dtype = the sum over chunks of sums (chunks, n), in its compute type and in
  // order, for elements [begin, end).
  void (*sum_chunks)(DType dtype, const void* sums, int64_t chunks, int64_t n, void* total,
                     int64_t begin, int64_t end);
  // total () = the sum of the losses in the compute type; for a mean, divided by
  // the sum of w_y of the kept rows.
  void (*total)(const LossRows&, bool mean, void* total);
  // weights (rows) in the compute type = grad, one per row or one for all, or 1 if null; for a
  // mean, divided by the sum of w_y of the kept rows.
  void (*row_weights)(const LossRows&, bool mean, bool per_row, const void* grad, void* weights);
};

OMNIATTN_KERNEL_TABLE(LossKernels, loss_kernels)

// CUDA launchers; a target out of range stops the kernels.
Status launch_cross_entropy(const CrossEntropyParams& p, Stream stream);
Status launch_cross_entropy_backward(const CrossEntropyBackwardParams& p, Stream stream);
Status launch_loss_total(const LossRows& rows, bool mean, void* total, Stream stream);
Status launch_row_weights(const LossRows& rows, bool mean, bool per_row, const void* grad,
                          void* weights, Stream stream);

}  // namespace omniattn
