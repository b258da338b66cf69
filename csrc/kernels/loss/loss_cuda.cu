// Cross entropy on CUDA, see loss.h. A block, or for short rows a warp, takes one row after another
// and reads it once, 16 bytes per access whatever the length of the rows: the elements before the
// first 16-byte boundary of a row and after the last are taken one by one.
#include "kernels/loss/loss_cuda.h"

#include "runtime/gpu_row.h"

namespace omniattn {
namespace {

using gpu::Pack;
using gpu::Width;

// 4 packs per thread are in flight before a row gets more threads, up to 512.
constexpr unsigned kThreads = 512;
constexpr int kPacksInFlight = 4;
// f64 has more values in flight than a third of the registers holds, and so have capped logits, for
// which a half suffices.
template <class T, bool kCapped>
constexpr int kBlocksPerSM = sizeof(T) == 8 ? 1
                             : kCapped      ? 2
                                            : 3;

// ex2.approx errs by 2^-22, less than the rounding of lse does.
__device__ __forceinline__ float softmax_exp(float x) { return gpu::exp2_approx(x * 1.442695041f); }
__device__ __forceinline__ double softmax_exp(double x) { return exp(x); }

// What the loss takes for a logit.
template <bool kCapped, class C>
__device__ __forceinline__ C capped(C x, C cap) {
  if constexpr (!kCapped) return x;
  return cap * tanh(x / cap);
}

// sum = sum exp(x - most), total = sum x over the elements seen so far.
template <class C, bool kCapped>
struct OnlineSoftmax {
  C cap;
  C most = -INFINITY, sum = 0, total = 0;

  // Without an element above -inf there is nothing to shift by.
  static __device__ __forceinline__ C shift(C most) { return most == C(-INFINITY) ? C(0) : most; }

  template <class T, int W>
  __device__ __forceinline__ void add(const Pack<T, W>& logits) {
    C x[W], above = most;
#pragma unroll
    for (int j = 0; j < W; ++j) x[j] = capped<kCapped>(C(logits[j]), cap);
#pragma unroll
    for (int j = 0; j < W; ++j) above = fmax(above, x[j]);
    const C by = shift(above);
    sum *= softmax_exp(most - by);
    most = above;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      sum += softmax_exp(x[j] - by);
      total += x[j];
    }
  }
};

template <class T, bool kCapped>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM<T, kCapped>)
    cross_entropy_kernel(const __grid_constant__ CrossEntropyParams p) {
  using C = compute_t<T>;
  constexpr int W = gpu::kVectorWidth<T>;
  const C smoothing = static_cast<C>(p.label_smoothing), z = static_cast<C>(p.z_loss);
  const C cap = static_cast<C>(p.softcap);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; row < p.rows; row += step) {
    const int64_t target = p.target[row];
    C loss = 0, lse = 0;
    if (target != p.ignore_index) {
      GPU_REQUIRE(target >= 0 && target < p.cols,
                  "cross_entropy: target must be in [0, V) or ignore_index");
      const T* const x = static_cast<const T*>(p.logits) + row * p.stride;
      OnlineSoftmax<C, kCapped> seen{cap};
      const int64_t head = min(gpu::elements_to_boundary<W>(x), p.cols);
      gpu::sweep_unaligned_row<W>(p.cols, head, [&]<int N>(int64_t i, Width<N>) {
        seen.add(gpu::load_constant<N>(x + i));
      });
      const C most = gpu::row_max(seen.most);
      const C by = seen.shift(most);
      lse = most + log(gpu::row_sum(seen.sum * softmax_exp(seen.most - by)));
      loss = lse - (1 - smoothing) * capped<kCapped>(gpu::widen(x[target]), cap) + z * lse * lse;
      if (smoothing > 0) loss -= smoothing * (gpu::row_sum(seen.total) / static_cast<C>(p.cols));
    }
    if (threadIdx.x == 0) {
      static_cast<C*>(p.loss)[row] = loss;
      static_cast<C*>(p.lse)[row] = lse;
    }
  }
}

// Gradients in U; the logits may be overwritten with them.
template <class T, class U, bool kCapped>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM<T, kCapped>)
    cross_entropy_backward_kernel(const __grid_constant__ CrossEntropyBackwardParams p) {
  using C = compute_t<T>;
  constexpr int W = gpu::kVectorWidth<U>;
  const CrossEntropyParams& f = p.forward;
  const C smoothing = static_cast<C>(f.label_smoothing), z = static_cast<C>(f.z_loss);
  const C cap = static_cast<C>(f.softcap);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; row < f.rows; row += step) {
    const T* const x = static_cast<const T*>(f.logits) + row * f.stride;
    U* const y = static_cast<U*>(p.dlogits) + row * f.cols;
    // Where no element of both rows is aligned, all are taken one by one.
    int64_t head = min(gpu::elements_to_boundary<W>(y), f.cols);
    if (!gpu::aligned_16(x + head)) head = f.cols;

    const int64_t target = f.target[row];
    if (target == f.ignore_index) {
      gpu::sweep_unaligned_row<W>(
          f.cols, head, [&]<int N>(int64_t i, Width<N>) { gpu::store(y + i, Pack<U, N>{}); });
      continue;
    }
    GPU_REQUIRE(target >= 0 && target < f.cols,
                "cross_entropy_backward: target must be in [0, V) or ignore_index");
    const C weight = static_cast<const C*>(p.row_weight)[row];
    const C lse = static_cast<const C*>(f.lse)[row];
    const C slope = weight * (1 + 2 * z * lse);
    const C offset = weight * smoothing / static_cast<C>(f.cols);
    const C hit = weight * (1 - smoothing);
    gpu::sweep_unaligned_row<W>(f.cols, head, [&]<int N>(int64_t i, Width<N>) {
      const Pack<T, N> in = gpu::load<N>(x + i);
      Pack<U, N> out;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const C logit = capped<kCapped>(C(in[j]), cap);
        C d = slope * softmax_exp(logit - lse) - offset;
        if (i + j == target) d -= hit;
        if constexpr (kCapped) d *= 1 - (logit / cap) * (logit / cap);
        out.v[j] = gpu::narrow<U>(d);
      }
      gpu::store(y + i, out);
    });
  }
}

// One block: rows are few beside the logits.
constexpr unsigned kSumThreads = 512;

__device__ __forceinline__ double one_over_kept(const CrossEntropyParams& p) {
  int64_t kept = 0;
  for (int64_t i = threadIdx.x; i < p.rows; i += kSumThreads) {
    kept += p.target[i] != p.ignore_index;
  }
  return 1.0 / static_cast<double>(max(gpu::row_sum(kept), int64_t{1}));
}

template <class C>
__global__ void __launch_bounds__(kSumThreads)
    loss_total_kernel(const __grid_constant__ CrossEntropyParams p, bool mean, C* total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < p.rows; i += kSumThreads) {
    sum += static_cast<const C*>(p.loss)[i];
  }
  sum = gpu::row_sum(sum);
  if (mean) sum *= one_over_kept(p);
  if (threadIdx.x == 0) *total = static_cast<C>(sum);
}

template <class C>
__global__ void __launch_bounds__(kSumThreads)
    row_weights_kernel(const __grid_constant__ CrossEntropyParams p, bool mean, bool per_row,
                       const C* grad, C* weights) {
  const C scale = mean ? static_cast<C>(one_over_kept(p)) : C(1);
  for (int64_t i = threadIdx.x; i < p.rows; i += kSumThreads) {
    weights[i] = scale * grad[per_row ? i : 0];
  }
}

dim3 block_of(int64_t cols, int width) {
  return gpu::row_block((cols + width - 1) / width, kPacksInFlight, kThreads);
}

// f(true_type or false_type): kernels for capped logits, or without the tanh.
template <class F>
void with_cap(double softcap, const F& f) {
  softcap > 0 ? f(std::true_type{}) : f(std::false_type{});
}

}  // namespace

Status launch_cross_entropy(const CrossEntropyParams& p, Stream stream) {
  if (p.rows == 0) return nullptr;
  dispatch(p.dtype, [&]<class T>(T) {
    const dim3 block = block_of(p.cols, gpu::kVectorWidth<T>);
    with_cap(p.softcap, [&]<class Capped>(Capped) {
      GPU_LAUNCH((cross_entropy_kernel<T, Capped::value>), gpu::row_grid(p.rows, block), block, 0,
                 stream, p);
    });
  });
  return gpu::launch_status();
}

Status launch_cross_entropy_backward(const CrossEntropyBackwardParams& p, Stream stream) {
  if (p.forward.rows == 0 || p.forward.cols == 0) return nullptr;
  const auto launch = [&]<class T, class U>(T, U) {
    const dim3 block = block_of(p.forward.cols, gpu::kVectorWidth<U>);
    with_cap(p.forward.softcap, [&]<class Capped>(Capped) {
      GPU_LAUNCH((cross_entropy_backward_kernel<T, U, Capped::value>),
                 gpu::row_grid(p.forward.rows, block), block, 0, stream, p);
    });
  };
  dispatch(p.grad_dtype, [&]<class U>(U) {
    if (p.grad_dtype == p.forward.dtype) {
      launch(U{}, U{});
    } else if constexpr (sizeof(U) == 2) {
      launch(float{}, U{});
    }
  });
  return gpu::launch_status();
}

Status launch_loss_total(const CrossEntropyParams& p, bool mean, void* total, Stream stream) {
  dispatch_compute(p.dtype, [&]<class C>(C) {
    GPU_LAUNCH(loss_total_kernel<C>, 1, kSumThreads, 0, stream, p, mean, static_cast<C*>(total));
  });
  return gpu::launch_status();
}

Status launch_row_weights(const CrossEntropyParams& p, bool mean, bool per_row, const void* grad,
                          void* weights, Stream stream) {
  dispatch_compute(p.dtype, [&]<class C>(C) {
    GPU_LAUNCH(row_weights_kernel<C>, 1, kSumThreads, 0, stream, p, mean, per_row,
               static_cast<const C*>(grad), static_cast<C*>(weights));
  });
  return gpu::launch_status();
}

}  // namespace omniattn
