// Divergences on CUDA, see divergence.h. A block, or a warp for short rows, processes one row after
// another, with 16 bytes per access if the rows of all matrices have the same alignment.
#include "kernels/loss/divergence.h"

#include "kernels/loss/softmax_row_cuda.h"

namespace omniattn {
namespace {

using gpu::Pack;
using gpu::Width;

// A logarithm and its operands need more than half of the registers.
template <class T, Divergence kKind>
constexpr int kBlocks = kKind == Divergence::mixed ? 1 : kBlocksPerSM<T, false>;

// Terms of a class: its share of the loss, a_v, and Q_v.
template <class C>
struct Terms {
  C loss, a, q;
};

template <Divergence kKind, class C>
__device__ __forceinline__ Terms<C> terms(C x, C y, C beta) {
  if constexpr (kKind == Divergence::teacher_to_student) {
    const C p = softmax_exp(y);
    return {p == 0 ? C(0) : p * (y - x), -p, softmax_exp(x)};
  } else if constexpr (kKind == Divergence::student_to_teacher) {
    const C q = softmax_exp(x), loss = q == 0 ? C(0) : q * (x - y);
    return {loss, loss, q};
  } else {
    // Divides by the larger of the two, so that no logarithm takes 0, and small divergences keep
    // their digits.
    const bool student_leads = x >= y;
    const C most = student_leads ? x : y, least = student_leads ? y : x;
    const C larger = softmax_exp(most), rest = 1 - beta;
    const C gap = x == y ? C(0) : least - most, ratio = softmax_exp(gap);
    const C q = student_leads ? larger : larger * ratio,
            p = student_leads ? larger * ratio : larger;
    const C ln_mixed = log1p((student_leads ? beta : rest) * expm1(gap));
    const C a = q == 0 ? C(0) : rest * q * ((student_leads ? C(0) : gap) - ln_mixed);
    return {a + (p == 0 ? C(0) : beta * p * ((student_leads ? gap : C(0)) - ln_mixed)), a, q};
  }
}

// Log-probabilities of a row, computed from logits or given.
template <class C>
struct LogProbs {
  const Logits<C, true>& logits;
  C most, log_sum;

  __device__ __forceinline__ C operator()(C logit) const {
    return (logits(logit) - most) - log_sum;
  }
};

__device__ __forceinline__ bool is_ignored(const LossRows& rows, int64_t row) {
  return rows.target != nullptr && rows.target[row] == rows.ignore_index;
}

template <class T>
__device__ __forceinline__ const T* row_of(const void* rows, int64_t stride, int64_t row) {
  return static_cast<const T*>(rows) + row * stride;
}

template <class T>
__device__ __forceinline__ RowStatistics<compute_t<T>> statistics(
    const T* x, int64_t cols, const Logits<compute_t<T>, true>& logits) {
  using C = compute_t<T>;
  constexpr int W = gpu::kVectorWidth<T>;
  OnlineSoftmax<C> seen;
  const int64_t head = min(gpu::elements_to_boundary<W>(x), cols);
  gpu::sweep_unaligned_row<W>(cols, head, [&]<int N>(int64_t i, Width<N>) {
    const Pack<T, N> in = gpu::load_constant<N>(x + i);
    C made[N];
#pragma unroll
    for (int j = 0; j < N; ++j) made[j] = logits(in[j]);
    seen.add(made);
  });
  return seen.of_row();
}

template <class T, Divergence kKind>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kKind>)
    divergence_kernel(const __grid_constant__ DivergenceParams p) {
  using C = compute_t<T>;
  constexpr int W = gpu::kVectorWidth<T>;
  const Logits<C, true> logits(p.temperature, 0);
  const C beta = static_cast<C>(p.beta);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; row < p.rows.count; row += step) {
    C loss = 0;
    DivergenceRow<C> kept = {};
    if (!is_ignored(p.rows, row)) {
      const T* const student = row_of<T>(p.student, p.student_stride, row);
      const T* const teacher = row_of<T>(p.teacher, p.teacher_stride, row);
      RowStatistics<C> s = {}, t = {};
      if (!p.log_probs) {
        s = statistics(student, p.cols, logits);
        t = statistics(teacher, p.cols, logits);
      }
      const LogProbs<C> x{logits, s.most, s.log_sum}, y{logits, t.most, t.log_sum};
      int64_t head = min(gpu::elements_to_boundary<W>(student), p.cols);
      if (!gpu::aligned_16(teacher + head)) head = p.cols;
      C share = 0;
      gpu::sweep_unaligned_row<W>(p.cols, head, [&]<int N>(int64_t i, Width<N>) {
        const Pack<T, N> a = gpu::load_constant<N>(student + i);
        const Pack<T, N> b = gpu::load_constant<N>(teacher + i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const Terms<C> found = terms<kKind, C>(x(a[j]), y(b[j]), beta);
          loss += found.loss;
          share += found.a;
        }
      });
      loss = gpu::row_sum(loss);
      share = gpu::row_sum(share);
      if (p.log_probs) share = kKind == Divergence::student_to_teacher ? C(-1) : C(0);
      kept = {s.most, s.log_sum, t.most, t.log_sum, share};
    }
    if (threadIdx.x == 0) {
      static_cast<C*>(p.rows.loss)[row] = loss;
      static_cast<DivergenceRow<C>*>(p.statistics)[row] = kept;
    }
  }
}

// Gradients have type U; they may overwrite the student's logits.
template <class T, class U, Divergence kKind>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kKind>)
    divergence_backward_kernel(const __grid_constant__ DivergenceBackwardParams p) {
  using C = compute_t<T>;
  constexpr int W = gpu::kVectorWidth<U>;
  const DivergenceParams& f = p.forward;
  const Logits<C, true> logits(f.temperature, 0);
  const C beta = static_cast<C>(f.beta);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; row < f.rows.count; row += step) {
    const T* const student = row_of<T>(f.student, f.student_stride, row);
    const T* const teacher = row_of<T>(f.teacher, f.teacher_stride, row);
    U* const out = static_cast<U*>(p.dstudent) + row * f.cols;
    int64_t head = min(gpu::elements_to_boundary<W>(out), f.cols);
    if (!gpu::aligned_16(student + head) || !gpu::aligned_16(teacher + head)) head = f.cols;
    if (is_ignored(f.rows, row)) {
      gpu::sweep_unaligned_row<W>(
          f.cols, head, [&]<int N>(int64_t i, Width<N>) { gpu::store(out + i, Pack<U, N>{}); });
      continue;
    }
    const DivergenceRow<C> kept = static_cast<const DivergenceRow<C>*>(f.statistics)[row];
    const LogProbs<C> x{logits, kept.student_max, kept.student_log_sum};
    const LogProbs<C> y{logits, kept.teacher_max, kept.teacher_log_sum};
    const C weight = static_cast<const C*>(p.row_weight)[row] * logits.scale;
    gpu::sweep_unaligned_row<W>(f.cols, head, [&]<int N>(int64_t i, Width<N>) {
      const Pack<T, N> a = gpu::load<N>(student + i), b = gpu::load_constant<N>(teacher + i);
      Pack<U, N> d;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const Terms<C> found = terms<kKind, C>(x(a[j]), y(b[j]), beta);
        d.v[j] = gpu::narrow<U>(weight * (found.a - kept.share * found.q));
      }
      gpu::store(out + i, d);
    });
  }
}

}  // namespace

Status launch_divergence(const DivergenceParams& p, Stream stream) {
  if (p.rows.count == 0) return nullptr;
  dispatch(p.rows.dtype, [&]<class T>(T) {
    const dim3 block = loss_block(p.cols, gpu::kVectorWidth<T>);
    dispatch_divergence(p.beta, [&]<Divergence kKind>() {
      GPU_LAUNCH((divergence_kernel<T, kKind>), gpu::row_grid(p.rows.count, block), block, 0,
                 stream, p);
    });
  });
  return gpu::launch_status();
}

Status launch_divergence_backward(const DivergenceBackwardParams& p, Stream stream) {
  if (p.forward.rows.count == 0 || p.forward.cols == 0) return nullptr;
  dispatch_gradient(p.forward.rows.dtype, p.grad_dtype, [&]<class T, class U>(T, U) {
    const dim3 block = loss_block(p.forward.cols, gpu::kVectorWidth<U>);
    dispatch_divergence(p.forward.beta, [&]<Divergence kKind>() {
      GPU_LAUNCH((divergence_backward_kernel<T, U, kKind>),
                 gpu::row_grid(p.forward.rows.count, block), block, 0, stream, p);
    });
  });
  return gpu::launch_status();
}

}  // namespace omniattn
