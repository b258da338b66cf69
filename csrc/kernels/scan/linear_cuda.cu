// The linear scan on CUDA, see linear.h: one thread per channel and sequence walks over its steps.
// The backward recomputes a chunk into memory that neighboring threads read together.
#include "kernels/scan/linear.h"

#include "runtime/dispatch.h"
#include "runtime/gpu.h"
#include "semantics/packed_rows.h"

namespace omniattn {
namespace {

constexpr unsigned kThreads = 64;  // few channels must still use many processors

// The channel and sequence of this thread.
template <class T>
struct Channel {
  using C = compute_t<T>;
  const LinearScan& p;
  int64_t n, c;
  ScanSequence s;

  __device__ Channel(const LinearScan& scan)
      : p(scan), n(blockIdx.x), c(static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) {
    s = scan_sequence(p.rows, n);
    GPU_REQUIRE(fits_rows(n, p.rows.sequences, s.begin, s.count, p.rows.steps),
                "linear_scan: cu_seqlens must grow from 0 to the number of tokens");
  }
  __device__ bool exists() const { return c < p.channels; }
  __device__ __forceinline__ C input(const ScanView& x, int64_t t) const {
    return gpu::widen(x.row<T>(s.batch, s.begin + t)[c]);
  }
  __device__ __forceinline__ C decay(int64_t t) const {
    return exp(p.g.row<C>(s.batch, s.begin + t)[c]);
  }
  template <class R>
  __device__ __forceinline__ R& result(void* x, int64_t t) const {
    return static_cast<R*>(x)[(s.batch * p.rows.steps + s.begin + t) * p.channels + c];
  }
  // Entry i of (.., C).
  __device__ __forceinline__ int64_t at(int64_t i) const { return i * p.channels + c; }
  __device__ __forceinline__ C state(const void* x) const {
    return x == nullptr ? C(0) : static_cast<const C*>(x)[at(n)];
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    linear_scan_forward_kernel(const __grid_constant__ LinearScanParams params) {
  using C = compute_t<T>;
  const Channel<T> x(params.scan);
  if (!x.exists()) return;
  C h = x.state(x.p.initial_state);
  for (int64_t t = 0; t < x.s.count; ++t) {
    if (params.states != nullptr && t % kScanChunk == 0) {
      static_cast<C*>(params.states)[x.at(x.s.slot + t / kScanChunk)] = h;
    }
    h = fma(x.decay(t), h, x.input(x.p.x, t));
    x.template result<T>(params.y, t) = gpu::narrow<T>(h);
  }
  static_cast<C*>(params.final_state)[x.at(x.n)] = h;
}

// kept: (N, kScanChunk, C), the decayed state before each step of the chunk.
template <class T>
__global__ void __launch_bounds__(kThreads)
    linear_scan_backward_kernel(const __grid_constant__ LinearScanBackwardParams params,
                                compute_t<T>* kept) {
  using C = compute_t<T>;
  const Channel<T> x(params.scan);
  if (!x.exists()) return;
  C gradient = x.state(params.grad_final_state);
  const int64_t last = x.s.count - 1, memory = x.n * kScanChunk;
  for (int64_t t = last / kScanChunk * kScanChunk; t >= 0 && last >= 0; t -= kScanChunk) {
    const int64_t end = smaller(t + kScanChunk, x.s.count);
    if (params.dg != nullptr) {
      C h = static_cast<const C*>(params.states)[x.at(x.s.slot + t / kScanChunk)];
      for (int64_t j = 0; t + j < end; ++j) {
        const C past = x.decay(t + j) * h;
        kept[x.at(memory + j)] = past;
        h = past + x.input(x.p.x, t + j);
      }
    }
    for (int64_t j = end - t - 1; j >= 0; --j) {
      const C dh = gradient + x.input(params.grad_y, t + j);
      x.template result<T>(params.dx, t + j) = gpu::narrow<T>(dh);
      if (params.dg != nullptr) {
        x.template result<C>(params.dg, t + j) = dh * kept[x.at(memory + j)];
      }
      gradient = dh * x.decay(t + j);
    }
  }
  if (params.dinitial_state == nullptr) return;
  static_cast<C*>(params.dinitial_state)[x.at(x.n)] = gradient;
}

dim3 grid_of(const LinearScan& p) {
  return dim3(static_cast<unsigned>(p.rows.sequences),
              static_cast<unsigned>(ceil_div(p.channels, kThreads)));
}

}  // namespace

int64_t linear_scan_backward_elements(const LinearScan& p) {
  return kScanChunk * p.rows.sequences * p.channels;
}

Status launch_linear_scan(const LinearScanParams& params, Stream stream) {
  const LinearScan& p = params.scan;
  if (p.channels == 0 || p.rows.sequences == 0) return nullptr;
  dispatch(p.dtype, [&]<class T>(T) {
    GPU_LAUNCH(linear_scan_forward_kernel<T>, grid_of(p), kThreads, 0, stream, params);
  });
  return gpu::launch_status();
}

Status launch_linear_scan_backward(const LinearScanBackwardParams& params, void* memory,
                                   Stream stream) {
  const LinearScan& p = params.scan;
  if (p.channels == 0 || p.rows.sequences == 0) return nullptr;
  dispatch(p.dtype, [&]<class T>(T) {
    GPU_LAUNCH(linear_scan_backward_kernel<T>, grid_of(p), kThreads, 0, stream, params,
               static_cast<compute_t<T>*>(memory));
  });
  return gpu::launch_status();
}

}  // namespace omniattn
