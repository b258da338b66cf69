// Sums of powers on CUDA, see vandermonde.h: one thread per place j in blocks of kBlock, which
// computes e^(j x) once for many blocks; threads share the starts of blocks. Exponentials are in
// double, one for about twelve products.
#include "kernels/structured/vandermonde.h"

#include "kernels/structured/structured_cuda.h"
#include "runtime/dispatch.h"
#include "semantics/arith.h"

namespace omniattn {
namespace {

constexpr unsigned kBlock = 64;           // B, and threads
constexpr int kBlocks = 16, kTerms = 16;  // in one step of the forward
constexpr unsigned kMaxChunks = 65535;    // limit of the y dimension of a grid

struct Power {
  double re, im;
};

// e^(l x)
__device__ __forceinline__ Power power(double re, double im, int64_t l) {
  const auto steps = static_cast<double>(l);
  const double size = exp(steps * re);
  return {size * cos(steps * im), size * sin(steps * im)};
}

template <class C>
__global__ void __launch_bounds__(kBlock)
    vandermonde_forward_kernel(const __grid_constant__ VandermondeParams params) {
  GPU_SHARED(C, starts, 2 * kTerms * kBlocks);
  const Vandermonde& p = params.sums;
  const int64_t h = blockIdx.x;
  const auto j = static_cast<int64_t>(threadIdx.x);
  const C *const c = static_cast<const C*>(p.c) + h * 2 * p.terms, *const x =
                                                                       static_cast<const C*>(p.x) +
                                                                       h * 2 * p.terms;
  constexpr int64_t kChunk = kBlocks * kBlock;
  for (int64_t l = blockIdx.y * kChunk; l < p.length; l += gridDim.y * kChunk) {
    C sum[kBlocks] = {};
    for (int64_t first = 0; first < p.terms; first += kTerms) {
      const int64_t terms = smaller(kTerms, p.terms - first);
      for (int64_t i = j; i < terms * kBlocks; i += kBlock) {
        const int64_t n = first + i / kBlocks;
        const Power start = power(x[2 * n], x[2 * n + 1], l + i % kBlocks * kBlock);
        const double re = c[2 * n], im = c[2 * n + 1];
        starts[2 * i] = static_cast<C>(2 * (re * start.re - im * start.im));
        starts[2 * i + 1] = static_cast<C>(2 * (re * start.im + im * start.re));
      }
      __syncthreads();
      for (int64_t i = 0; i < terms; ++i) {
        const int64_t n = first + i;
        const Power of_place = power(x[2 * n], x[2 * n + 1], j);
        const C re = static_cast<C>(of_place.re), im = static_cast<C>(of_place.im);
        for (int b = 0; b < kBlocks; ++b) {
          const C* const start = starts + 2 * (i * kBlocks + b);
          sum[b] += start[0] * re - start[1] * im;
        }
      }
      __syncthreads();
    }
    for (int b = 0; b < kBlocks; ++b) {
      const int64_t at = l + b * kBlock + j;
      if (at < p.length) static_cast<C*>(params.y)[h * p.length + at] = sum[b];
    }
  }
}

// One block per term.
template <class C>
__global__ void __launch_bounds__(kBlock)
    vandermonde_backward_kernel(const __grid_constant__ VandermondeBackwardParams params) {
  GPU_SHARED(C, shared, 4 * kBlock);
  const Vandermonde& p = params.sums;
  const int64_t term = blockIdx.x, h = term / p.terms;
  const auto j = static_cast<int64_t>(threadIdx.x);
  const C *const c = static_cast<const C*>(p.c) + 2 * term, *const x = static_cast<const C*>(p.x) +
                                                                       2 * term;
  const C* const g = static_cast<const C*>(params.grad_y) + h * p.length;
  C sum[4] = {};  // over blocks, of g e^(b B x) and of b B g e^(b B x)
  for (int64_t l = 0; l < p.length; l += kBlock * kBlock) {
    const int64_t first = l + j * kBlock;
    const Power start = power(x[0], x[1], first);
    C* const mine = shared + 4 * j;
    mine[0] = static_cast<C>(start.re);
    mine[1] = static_cast<C>(start.im);
    mine[2] = static_cast<C>(static_cast<double>(first) * start.re);
    mine[3] = static_cast<C>(static_cast<double>(first) * start.im);
    __syncthreads();
    for (int64_t b = 0; b < kBlock; ++b) {
      const int64_t at = l + b * kBlock + j;
      if (at >= p.length) break;
      for (int i = 0; i < 4; ++i) sum[i] += g[at] * shared[4 * b + i];
    }
    __syncthreads();
  }
  // Powers past the end may be infinite.
  const Power place = j < p.length ? power(x[0], x[1], j) : Power{0, 0};
  const C re = static_cast<C>(place.re), im = static_cast<C>(place.im);
  const C vr = sum[2] + static_cast<C>(j) * sum[0], vi = sum[3] + static_cast<C>(j) * sum[1];
  block_sums<kBlock, 4, C>(shared, {sum[0] * re - sum[1] * im, sum[0] * im + sum[1] * re,
                                    vr * re - vi * im, vr * im + vi * re});
  if (j != 0) return;
  C *const dc = static_cast<C*>(params.dc) + 2 * term, *const dx =
                                                           static_cast<C*>(params.dx) + 2 * term;
  const C lr = shared[2 * kBlock], li = shared[3 * kBlock];
  dc[0] = 2 * shared[0];
  dc[1] = -2 * shared[kBlock];
  dx[0] = 2 * (c[0] * lr - c[1] * li);
  dx[1] = -2 * (c[0] * li + c[1] * lr);
}

}  // namespace

Status launch_vandermonde(const VandermondeParams& params, Stream stream) {
  const Vandermonde& p = params.sums;
  if (p.rows == 0 || p.length == 0) return nullptr;
  const int64_t chunks = smaller(ceil_div(p.length, kBlocks * kBlock), kMaxChunks);
  const dim3 grid(static_cast<unsigned>(p.rows), static_cast<unsigned>(chunks));
  dispatch_compute(p.dtype, [&]<class C>(C) {
    GPU_LAUNCH(vandermonde_forward_kernel<C>, grid, kBlock, 0, stream, params);
  });
  return gpu::launch_status();
}

Status launch_vandermonde_backward(const VandermondeBackwardParams& params, Stream stream) {
  const Vandermonde& p = params.sums;
  if (p.rows == 0 || p.terms == 0) return nullptr;
  const auto grid = static_cast<unsigned>(p.rows * p.terms);
  dispatch_compute(p.dtype, [&]<class C>(C) {
    GPU_LAUNCH(vandermonde_backward_kernel<C>, grid, kBlock, 0, stream, params);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
