// Sums of poles on CUDA, see cauchy.h: forward one thread per z, backward one block per term.
#include "kernels/structured/cauchy.h"

#include "kernels/structured/structured_cuda.h"
#include "runtime/dispatch.h"
#include "semantics/arith.h"

namespace omniattn {
namespace {

using cauchy_rules::Complex;

constexpr unsigned kThreads = 128;
constexpr unsigned kMaxChunks = 65535;  // limit of the y dimension of a grid

template <class C>
__device__ __forceinline__ Complex<C> pair(const void* from, int64_t i) {
  return {static_cast<const C*>(from)[2 * i], static_cast<const C*>(from)[2 * i + 1]};
}

template <class C>
__global__ void __launch_bounds__(kThreads)
    cauchy_forward_kernel(const __grid_constant__ CauchyParams params) {
  const Cauchy& p = params.sums;
  const int64_t h = blockIdx.x, step = static_cast<int64_t>(gridDim.y) * kThreads;
  for (int64_t l = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x; l < p.length;
       l += step) {
    const Complex<C> z = pair<C>(p.z, l);
    C re = 0, im = 0;
    for (int64_t n = h * p.terms; n < (h + 1) * p.terms; ++n) {
      const Complex<C> v = pair<C>(p.v, n), w = pair<C>(p.w, n);
      const auto half = cauchy_rules::half_of_pair(z, v.re, v.im, w.re, w.im);
      re += half.re;
      im += half.im;
    }
    C* const y = static_cast<C*>(params.y) + 2 * (h * p.length + l);
    y[0] = 2 * re;
    y[1] = 2 * im;
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads)
    cauchy_backward_kernel(const __grid_constant__ CauchyBackwardParams params) {
  GPU_SHARED(C, shared, 4 * kThreads);
  const Cauchy& p = params.sums;
  const int64_t term = blockIdx.x, h = term / p.terms;
  const Complex<C> v = pair<C>(p.v, term), w = pair<C>(p.w, term);
  C sum[4] = {};
  for (int64_t l = threadIdx.x; l < p.length; l += kThreads) {
    const auto d = cauchy_rules::cauchy_back(pair<C>(p.z, l),
                                             pair<C>(params.grad_y, h * p.length + l), w.re, w.im);
    sum[0] += d.v.re;
    sum[1] += d.v.im;
    sum[2] += d.w.re;
    sum[3] += d.w.im;
  }
  block_sums<kThreads, 4, C>(shared, sum);
  if (threadIdx.x != 0) return;
  C *const dv = static_cast<C*>(params.dv) + 2 * term, *const dw =
                                                           static_cast<C*>(params.dw) + 2 * term;
  const C re = shared[2 * kThreads], im = shared[3 * kThreads];
  dv[0] = shared[0];
  dv[1] = shared[kThreads];
  dw[0] = v.re * re + v.im * im;
  dw[1] = v.re * im - v.im * re;
}

}  // namespace

Status launch_cauchy(const CauchyParams& params, Stream stream) {
  const Cauchy& p = params.sums;
  if (p.rows == 0 || p.length == 0) return nullptr;
  const int64_t chunks = smaller(ceil_div(p.length, kThreads), kMaxChunks);
  const dim3 grid(static_cast<unsigned>(p.rows), static_cast<unsigned>(chunks));
  dispatch_compute(p.dtype, [&]<class C>(C) {
    GPU_LAUNCH(cauchy_forward_kernel<C>, grid, kThreads, 0, stream, params);
  });
  return gpu::launch_status();
}

Status launch_cauchy_backward(const CauchyBackwardParams& params, Stream stream) {
  const Cauchy& p = params.sums;
  if (p.rows == 0 || p.terms == 0) return nullptr;
  const auto grid = static_cast<unsigned>(p.rows * p.terms);
  dispatch_compute(p.dtype, [&]<class C>(C) {
    GPU_LAUNCH(cauchy_backward_kernel<C>, grid, kThreads, 0, stream, params);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
