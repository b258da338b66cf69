// Divergence of a student's distribution from a teacher's over the rows of two matrices of logits,
// forward and backward. With T = temperature,
//
//   X_v = log softmax_v(student / T)      Q = exp(X)
//   Y_v = log softmax_v(teacher / T)      P = exp(Y)      ln M = ln(beta P + (1 - beta) Q)
//   loss_i = sum_v beta P (Y - ln M) + (1 - beta) Q (X - ln M)
//   a_v = (1 - beta) Q (X - ln M)         dstudent_v = g_i (a_v - Q_v sum_u a_u) / T
//
// is the generalised Jensen-Shannon divergence of Agarwal et al. 2023 (arXiv 2306.13649). At beta =
// 0 it is sum P (Y - X), KL(P || Q), with a = -P, and at beta = 1 it is sum Q (X - Y), KL(Q || P),
// with a = Q (X - Y). If the inputs are X and Y themselves instead of logits, the gradient is that
// of X: a_v, at beta = 1 a_v + Q_v. Classes without probability contribute 0. Work items are rows.
#pragma once

#include "kernels/loss/loss.h"

namespace omniattn {

// A row's values for the backward: statistics of both softmaxes (see loss.h), zeros if the inputs
// are log-probabilities, and the factor of Q in the gradient.
template <class C>
struct DivergenceRow {
  C student_max, student_log_sum, teacher_max, teacher_log_sum, share;
};
constexpr int64_t kDivergenceStatistics = 5;

struct DivergenceParams {
  LossRows rows;
  int64_t cols;
  const void *student, *teacher;  // (rows, cols), strides between rows
  int64_t student_stride, teacher_stride;
  void* statistics;  // (rows) DivergenceRow of the compute type
  double beta, temperature;
  bool log_probs;  // the inputs are X and Y, and the temperature is 1
};

struct DivergenceBackwardParams {
  DivergenceParams forward;
  DType grad_dtype;        // dtype of the inputs, or on CUDA a half dtype for fp32 inputs
  const void* row_weight;  // (rows) in the compute type
  void* dstudent;          // (rows, cols) of grad_dtype, contiguous; may be the student's logits
  bool stream;             // write past the caches
};
static_assert(std::is_trivially_copyable_v<DivergenceBackwardParams>);

struct DivergenceKernels {
  void (*forward)(const DivergenceParams&, int64_t begin, int64_t end);
  void (*backward)(const DivergenceBackwardParams&, int64_t begin, int64_t end);
};

OMNIATTN_KERNEL_TABLE(DivergenceKernels, divergence_kernels)

Status launch_divergence(const DivergenceParams& p, Stream stream);
Status launch_divergence_backward(const DivergenceBackwardParams& p, Stream stream);

// Formula for a value of beta: at 0 and 1 the mixed formula would compute 0 * inf.
enum class Divergence { teacher_to_student, student_to_teacher, mixed };

// Calls f.operator()<kind>().
template <class F>
[[gnu::always_inline]] inline void dispatch_divergence(double beta, const F& f) {
  if (beta == 0) {
    f.template operator()<Divergence::teacher_to_student>();
  } else if (beta == 1) {
    f.template operator()<Divergence::student_to_teacher>();
  } else {
    f.template operator()<Divergence::mixed>();
  }
}

}  // namespace omniattn
