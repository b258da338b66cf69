// Softmax over one long row on CUDA, for the losses.
#pragma once

#include "runtime/gpu_row.h"

namespace omniattn {
namespace {

// Each thread has 4 packs in flight before a row gets more threads, up to 512.
constexpr unsigned kThreads = 512;
constexpr int kPacksInFlight = 4;
// Values in flight need more than a third of the registers in fp64, and also with all options,
// where half of the registers suffice.
template <class T, bool kPlain>
constexpr int kBlocksPerSM = sizeof(T) == 8 ? 1
                             : kPlain       ? 3
                                            : 2;

inline dim3 loss_block(int64_t cols, int width) {
  return gpu::row_block((cols + width - 1) / width, kPacksInFlight, kThreads);
}

// ex2.approx has a relative error of 2^-22, less than the rounding of the sums.
__device__ __forceinline__ float softmax_exp(float x) { return gpu::exp2_approx(x * 1.442695041f); }
__device__ __forceinline__ double softmax_exp(double x) { return exp(x); }

// The logit x after cap and temperature: x / T, or c tanh(x / c) / T unless plain.
template <class C, bool kPlain>
struct Logits {
  C scale, cap, top;

  __device__ __forceinline__ Logits(double temperature, double softcap)
      : scale(static_cast<C>(1 / temperature)),
        cap(static_cast<C>(softcap)),
        top(static_cast<C>(softcap / temperature)) {}

  __device__ __forceinline__ C operator()(C x) const {
    return kPlain || cap == 0 ? x * scale : top * tanh(x / cap);
  }
  // dx, which includes the factor 1 / T, times the derivative of the cap where it gave `made`.
  __device__ __forceinline__ C back(C dx, C made) const {
    return kPlain || cap == 0 ? dx : dx * (1 - (made / top) * (made / top));
  }
};

// Statistics of a row: ln sum exp(x_v) = most + log_sum.
template <class C>
struct RowStatistics {
  C most, log_sum;
};

// sum = sum exp(x - most) over the elements seen so far.
template <class C>
struct OnlineSoftmax {
  C most = -INFINITY, sum = 0;

  // If no element is above -inf, the shift is 0.
  static __device__ __forceinline__ C shift(C most) { return most == C(-INFINITY) ? C(0) : most; }

  template <int W>
  __device__ __forceinline__ void add(const C (&x)[W]) {
    C above = most;
#pragma unroll
    for (int j = 0; j < W; ++j) above = fmax(above, x[j]);
    const C by = shift(above);
    sum *= softmax_exp(most - by);
    most = above;
#pragma unroll
    for (int j = 0; j < W; ++j) sum += softmax_exp(x[j] - by);
  }
  // Combines the statistics of all threads of the row.
  __device__ __forceinline__ RowStatistics<C> of_row() const {
    const C all = gpu::row_max(most);
    return {all, static_cast<C>(log(gpu::row_sum(sum * softmax_exp(most - shift(all)))))};
  }
};

// Calls f(T{}, U{}) with the types of logits and of their gradient: equal, or U has 16 bits and T
// is float.
template <class F>
void dispatch_gradient(DType dtype, DType grad_dtype, const F& f) {
  dispatch(grad_dtype, [&]<class U>(U gradient) {
    if (dtype == grad_dtype) return f(gradient, gradient);
    if constexpr (sizeof(U) == 2) {
      if (dtype == DType::f32) return f(float{}, gradient);
    }
    OMNIATTN_FAIL("gradients of logits have their dtype, or 16 bits where they are float32");
  });
}

}  // namespace
}  // namespace omniattn
