// Cross entropy on CUDA, see loss.h. A block, or a warp for short rows, processes one row after
// another and reads it once, with 16 bytes per access for any row length: elements before a row's
// first 16-byte boundary and after its last one are read one by one.
#include "kernels/loss/loss.h"

#include "kernels/loss/softmax_row_cuda.h"

namespace omniattn {
namespace {

using gpu::Pack;
using gpu::Width;

template <class C>
__device__ __forceinline__ C weight_of(const LossRows& rows, int64_t target) {
  return rows.class_weight != nullptr ? static_cast<const C*>(rows.class_weight)[target] : C(1);
}

// Sum of all class weights, if a row's loss uses all of them.
template <class C>
__device__ __forceinline__ C class_weights(const CrossEntropyParams& p) {
  const C* const w = static_cast<const C*>(p.rows.class_weight);
  if (w == nullptr || p.label_smoothing == 0) return static_cast<C>(p.cols);
  C sum = 0;
  for (int64_t i = threadIdx.x; i < p.cols; i += blockDim.x) sum += w[i];
  return gpu::row_sum(sum);
}

template <class T, bool kPlain>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM<T, kPlain>)
    cross_entropy_kernel(const __grid_constant__ CrossEntropyParams p) {
  using C = compute_t<T>;
  constexpr int W = gpu::kVectorWidth<T>;
  const C smoothing = static_cast<C>(p.label_smoothing), z = static_cast<C>(p.z_loss);
  const Logits<C, kPlain> logits(p.temperature, p.softcap);
  const C weights = class_weights<C>(p), share = smoothing / static_cast<C>(p.cols);
  const C* const w = kPlain ? nullptr : static_cast<const C*>(p.rows.class_weight);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; row < p.rows.count; row += step) {
    const int64_t target = p.rows.target[row];
    C loss = 0, most = 0, log_sum = 0;
    if (target != p.rows.ignore_index) {
      GPU_REQUIRE(target >= 0 && target < p.cols,
                  "cross_entropy: target must be in [0, V) or ignore_index");
      const T* const x = static_cast<const T*>(p.logits) + row * p.stride;
      const C chosen = logits(gpu::widen(x[target])), own = weight_of<C>(p.rows, target);
      // Other logits are summed as differences from the target's: sums of large logits lose digits.
      const C near = isfinite(chosen) ? chosen : C(0);
      C below = 0;  // sum_v w_v (near - x_v)
      OnlineSoftmax<C> seen;
      const int64_t head = min(gpu::elements_to_boundary<W>(x), p.cols);
      gpu::sweep_unaligned_row<W>(p.cols, head, [&]<int N>(int64_t i, Width<N>) {
        const Pack<T, N> in = gpu::load_constant<N>(x + i);
        C made[N];
#pragma unroll
        for (int j = 0; j < N; ++j) made[j] = logits(in[j]);
        seen.add(made);
        if (smoothing == 0) return;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          below += (w != nullptr ? w[i + j] : C(1)) * (near - made[j]);
        }
      });
      const RowStatistics<C> found = seen.of_row();
      most = found.most;
      log_sum = found.log_sum;
      const C lse = most + log_sum;
      loss = (1 - smoothing) * own * ((most - chosen) + log_sum) + z * own * lse * lse;
      if (smoothing > 0) {
        loss += share * (weights * ((most - near) + log_sum) + gpu::row_sum(below));
      }
    }
    if (threadIdx.x == 0) {
      static_cast<C*>(p.rows.loss)[row] = loss;
      static_cast<C*>(p.row_max)[row] = most;
      static_cast<C*>(p.log_sum)[row] = log_sum;
    }
  }
}

// Gradients have type U; they may overwrite the logits.
template <class T, class U, bool kPlain>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM<T, kPlain>)
    cross_entropy_backward_kernel(const __grid_constant__ CrossEntropyBackwardParams p) {
  using C = compute_t<T>;
  constexpr int W = gpu::kVectorWidth<U>;
  const CrossEntropyParams& f = p.forward;
  const C smoothing = static_cast<C>(f.label_smoothing), z = static_cast<C>(f.z_loss);
  const Logits<C, kPlain> logits(f.temperature, f.softcap);
  const C weights = class_weights<C>(f), share = smoothing / static_cast<C>(f.cols);
  const C* const w = kPlain ? nullptr : static_cast<const C*>(f.rows.class_weight);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; row < f.rows.count; row += step) {
    const T* const x = static_cast<const T*>(f.logits) + row * f.stride;
    U* const y = static_cast<U*>(p.dlogits) + row * f.cols;
    // If no element is aligned in both rows, all are read one by one.
    int64_t head = min(gpu::elements_to_boundary<W>(y), f.cols);
    if (!gpu::aligned_16(x + head)) head = f.cols;

    const int64_t target = f.rows.target[row];
    if (target == f.rows.ignore_index) {
      gpu::sweep_unaligned_row<W>(
          f.cols, head, [&]<int N>(int64_t i, Width<N>) { gpu::store(y + i, Pack<U, N>{}); });
      continue;
    }
    GPU_REQUIRE(target >= 0 && target < f.cols,
                "cross_entropy_backward: target must be in [0, V) or ignore_index");
    const C weight = static_cast<const C*>(p.row_weight)[row] * logits.scale;
    const C most = static_cast<const C*>(f.row_max)[row];
    const C log_sum = static_cast<const C*>(f.log_sum)[row];
    const C own = weight_of<C>(f.rows, target), hit = (1 - smoothing) * own;
    const C mass = f.rows.class_weight != nullptr ? hit + share * weights : C(1);
    const C slope = weight * (mass + 2 * z * own * (most + log_sum));
    const C offset = weight * share;
    gpu::sweep_unaligned_row<W>(f.cols, head, [&]<int N>(int64_t i, Width<N>) {
      const Pack<T, N> in = gpu::load<N>(x + i);
      Pack<U, N> out;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const C made = logits(in[j]);
        const C less = w != nullptr ? offset * w[i + j] : offset;
        C d = slope * softmax_exp((made - most) - log_sum) - less;
        if (i + j == target) d -= weight * hit;
        out.v[j] = gpu::narrow<U>(logits.back(d, made));
      }
      gpu::store(y + i, out);
    });
  }
}

// One block suffices: there are few rows compared to logits.
constexpr unsigned kSumThreads = 512;

// 1 / (sum of w_y of the kept rows), or 1 if that sum is 0.
template <class C>
__device__ __forceinline__ double one_over_kept(const LossRows& rows) {
  double kept = 0;
  for (int64_t i = threadIdx.x; i < rows.count; i += kSumThreads) {
    if (rows.target == nullptr) {
      kept += 1;
    } else if (rows.target[i] != rows.ignore_index) {
      kept += weight_of<C>(rows, rows.target[i]);
    }
  }
  kept = gpu::row_sum(kept);
  return kept != 0 ? 1 / kept : 1;
}

template <class C>
__global__ void __launch_bounds__(kSumThreads)
    loss_total_kernel(const __grid_constant__ LossRows rows, bool mean, C* total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < rows.count; i += kSumThreads) {
    sum += static_cast<const C*>(rows.loss)[i];
  }
  sum = gpu::row_sum(sum);
  if (mean) sum *= one_over_kept<C>(rows);
  if (threadIdx.x == 0) *total = static_cast<C>(sum);
}

template <class C>
__global__ void __launch_bounds__(kSumThreads)
    row_weights_kernel(const __grid_constant__ LossRows rows, bool mean, bool per_row,
                       const C* grad, C* weights) {
  const C scale = mean ? static_cast<C>(one_over_kept<C>(rows)) : C(1);
  for (int64_t i = threadIdx.x; i < rows.count; i += kSumThreads) {
    weights[i] = scale * grad[per_row ? i : 0];
  }
}

// Calls f(true_type) without softcap and class weights, otherwise f(false_type).
template <class F>
void with_options(const CrossEntropyParams& p, const F& f) {
  const bool plain = p.softcap == 0 && p.rows.class_weight == nullptr;
  plain ? f(std::true_type{}) : f(std::false_type{});
}

}  // namespace

Status launch_cross_entropy(const CrossEntropyParams& p, Stream stream) {
  if (p.rows.count == 0) return nullptr;
  dispatch(p.rows.dtype, [&]<class T>(T) {
    const dim3 block = loss_block(p.cols, gpu::kVectorWidth<T>);
    with_options(p, [&]<class Plain>(Plain) {
      GPU_LAUNCH((cross_entropy_kernel<T, Plain::value>), gpu::row_grid(p.rows.count, block), block,
                 0, stream, p);
    });
  });
  return gpu::launch_status();
}

Status launch_cross_entropy_backward(const CrossEntropyBackwardParams& p, Stream stream) {
  if (p.forward.rows.count == 0 || p.forward.cols == 0) return nullptr;
  dispatch_gradient(p.forward.rows.dtype, p.grad_dtype, [&]<class T, class U>(T, U) {
    const dim3 block = loss_block(p.forward.cols, gpu::kVectorWidth<U>);
    with_options(p.forward, [&]<class Plain>(Plain) {
      GPU_LAUNCH((cross_entropy_backward_kernel<T, U, Plain::value>),
                 gpu::row_grid(p.forward.rows.count, block), block, 0, stream, p);
    });
  });
  return gpu::launch_status();
}

Status launch_loss_total(const LossRows& rows, bool mean, void* total, Stream stream) {
  dispatch_compute(rows.dtype, [&]<class C>(C) {
    GPU_LAUNCH(loss_total_kernel<C>, 1, kSumThreads, 0, stream, rows, mean, static_cast<C*>(total));
  });
  return gpu::launch_status();
}

Status launch_row_weights(const LossRows& rows, bool mean, bool per_row, const void* grad,
                          void* weights, Stream stream) {
  dispatch_compute(rows.dtype, [&]<class C>(C) {
    GPU_LAUNCH(row_weights_kernel<C>, 1, kSumThreads, 0, stream, rows, mean, per_row,
               static_cast<const C*>(grad), static_cast<C*>(weights));
  });
  return gpu::launch_status();
}

}  // namespace omniattn
