// Cross entropy over the rows of a matrix of logits, forward and backward.
//
//   lse_i = ln sum_v exp(x_iv)        e = label_smoothing        z = z_loss
//   loss_i = (1 - e) (lse_i - x_iy) + e mean_v(lse_i - x_iv) + z lse_i^2
//   dx_iv = w_i ((1 + 2 z lse_i) exp(x_iv - lse_i) - (1 - e) [v = y_i] - e / V)
//
// With a softcap c > 0 the x are c tanh(logits / c), and dx is multiplied by 1 - (x / c)^2. Rows
// whose target is ignore_index give 0. Statistics in fp32 (fp64 for fp64), by the online recurrence
// of Milakov and Gimelshein 2018 (arXiv 1805.02867): a row comes from memory once. Work items are
// rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"

namespace omniattn {

struct CrossEntropyParams {
  DType dtype;
  int64_t rows, cols;
  const void* logits;     // (rows, cols), `stride` between rows
  const int64_t* target;  // (rows), in [0, cols) or ignore_index
  void* loss;             // (rows) in the compute type; forward only
  void* lse;              // (rows) in the compute type
  int64_t stride, ignore_index;
  double label_smoothing, z_loss, softcap;
};

struct CrossEntropyBackwardParams {
  CrossEntropyParams forward;
  DType grad_dtype;        // the logits', or on CUDA a half dtype for fp32 logits
  const void* row_weight;  // (rows) in the compute type
  void* dlogits;           // (rows, cols) of grad_dtype, contiguous; may be the logits themselves
  bool stream;             // past the caches, for results that do not fit there
};
static_assert(std::is_trivially_copyable_v<CrossEntropyBackwardParams>);

struct LossKernels {
  void (*forward)(const CrossEntropyParams&, int64_t begin, int64_t end);
  void (*backward)(const CrossEntropyBackwardParams&, int64_t begin, int64_t end);
  // total (n) of dtype = sum over the chunks of sums (chunks, n) in its compute type, in order, for
  // elements [begin, end).
  void (*sum_chunks)(DType dtype, const void* sums, int64_t chunks, int64_t n, void* total,
                     int64_t begin, int64_t end);
  // total () = the sum of p.loss in the compute type, or their mean over the kept targets.
  void (*total)(const CrossEntropyParams&, bool mean, void* total);
  // weights (rows) = grad, one per row or for all, null for 1, over the number of kept targets for
  // the mean; in the compute type.
  void (*row_weights)(const CrossEntropyParams&, bool mean, bool per_row, const void* grad,
                      void* weights);
};

OMNIATTN_KERNEL_TABLE(LossKernels, loss_kernels)

}  // namespace omniattn
