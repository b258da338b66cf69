// sLSTM on CUDA, see slstm.h: one block per head and sequence walks over its steps, with
// one column of R per thread. The backward writes h and dx of all steps to memory, from
// which a second kernel sums dr.
#include "kernels/scan/slstm.h"

#include "kernels/scan/scan_rules.h"
#include "runtime/dispatch.h"
#include "runtime/gpu.h"
#include "runtime/gpu_row.h"
#include "semantics/packed_rows.h"

namespace omniattn {
namespace {

using scan_rules::SlstmGates;
using scan_rules::SlstmGradient;
using scan_rules::SlstmState;

constexpr int kLanes = 32;
constexpr unsigned kMostThreads = 256;

__device__ ScanSequence checked_sequence(const ScanRows& rows, int64_t n) {
  const ScanSequence s = scan_sequence(rows, n);
  GPU_REQUIRE(fits_rows(n, rows.sequences, s.begin, s.count, rows.steps),
              "slstm: cu_seqlens must grow from 0 to the number of tokens");
  return s;
}

// Head and sequence of a block.
template <class T>
struct Head {
  using C = compute_t<T>;
  const Slstm& p;
  int64_t n, head;
  ScanSequence s;

  __device__ Head(const Slstm& slstm)
      : p(slstm),
        n(blockIdx.x / p.heads),
        head(blockIdx.x % p.heads),
        s(checked_sequence(p.rows, n)) {}
  // Offset of row `part` of step t in a tensor (B, T, parts, H, D).
  __device__ __forceinline__ int64_t at(int64_t t, int64_t parts, int64_t part) const {
    return (((s.batch * p.rows.steps + s.begin + t) * parts + part) * p.heads + head) * p.width;
  }
  __device__ __forceinline__ const T* row(const ScanView& x, int64_t t, int64_t part) const {
    return x.row<T>(s.batch, s.begin + t) + (part * p.heads + head) * p.width;
  }
  __device__ __forceinline__ int64_t state_at(int64_t part) const {
    return ((n * 4 + part) * p.heads + head) * p.width;
  }
  __device__ __forceinline__ const T* r(int64_t gate, int64_t row) const {
    return static_cast<const T*>(p.r) + ((gate * p.heads + head) * p.width + row) * p.width;
  }
  __device__ __forceinline__ C initial(int64_t part, int64_t j) const {
    const auto* const from = static_cast<const C*>(p.initial_state);
    return from == nullptr ? C(0) : from[state_at(part) + j];
  }
};

// The final state holds the running state, except h, of which all threads read all elements: h
// has two copies in shared memory.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    slstm_forward_kernel(const __grid_constant__ SlstmParams params) {
  using C = compute_t<T>;
  const Slstm& p = params.slstm;
  const Head<T> x(p);
  C* h = gpu::dynamic_shared<C>();
  C* next = h + p.width;
  C* const state = static_cast<C*>(params.final_state);
  for (int64_t j = threadIdx.x; j < p.width; j += blockDim.x) {
    h[j] = x.initial(0, j);
    for (int part = 0; part < 4; ++part) state[x.state_at(part) + j] = x.initial(part, j);
  }
  __syncthreads();
  for (int64_t t = 0; t < x.s.count; ++t) {
    for (int64_t j = threadIdx.x; j < p.width; j += blockDim.x) {
      C raw[4];
#pragma unroll
      for (int g = 0; g < 4; ++g) raw[g] = gpu::widen(x.row(p.x, t, g)[j]);
      for (int64_t k = 0; k < p.width; ++k) {
#pragma unroll
        for (int g = 0; g < 4; ++g) raw[g] += h[k] * gpu::widen(x.r(g, k)[j]);
      }
      SlstmState<C> s{h[j], state[x.state_at(1) + j], state[x.state_at(2) + j],
                      state[x.state_at(3) + j]};
      const SlstmGates<C> y =
          scan_rules::slstm_step(s, raw[0], raw[1], raw[2], raw[3], p.exp_forget);
      next[j] = s.h;
      state[x.state_at(0) + j] = s.h;
      state[x.state_at(1) + j] = s.c;
      state[x.state_at(2) + j] = s.n;
      state[x.state_at(3) + j] = s.m;
      static_cast<T*>(params.y)[x.at(t, 1, 0) + j] = gpu::narrow<T>(s.h);
      if (params.trace == nullptr) continue;
      const C kept[kSlstmTrace] = {y.input, y.forget, y.z, y.o, s.c, s.n, y.slope};
#pragma unroll
      for (int k = 0; k < kSlstmTrace; ++k) {
        static_cast<C*>(params.trace)[x.at(t, kSlstmTrace, k) + j] = kept[k];
      }
    }
    __syncthreads();
    C* const old = h;
    h = next;
    next = old;
  }
}

// Memory of the backward: dx (B, T, 4, H, D), and the h before each step (B, T, H, D).
template <class C>
struct Steps {
  C *dx, *h;
};

// c, n and h after step t; step -1 is the initial state.
template <class C>
struct Kept {
  C h, c, n;
};
template <class T, class C = compute_t<T>>
__device__ Kept<C> kept_state(const SlstmBackwardParams& params, const Head<T>& x, int64_t t,
                              int64_t j) {
  if (t < 0) return {x.initial(0, j), x.initial(1, j), x.initial(2, j)};
  const auto of = [&](int64_t k) {
    return static_cast<const C*>(params.trace)[x.at(t, kSlstmTrace, k) + j];
  };
  const C c = of(4), n = of(5);
  return {of(3) * (c / n), c, n};
}

// Computes dx of column j of step t; dinitial_state holds the gradients of h, c, n and m's excess.
template <class T, class C = compute_t<T>>
__device__ void backward_column(const SlstmBackwardParams& params, const Head<T>& x,
                                const Steps<C>& steps, int64_t t, int64_t j) {
  C* const gradient = static_cast<C*>(params.dinitial_state);
  const auto of = [&](int64_t k) {
    return static_cast<const C*>(params.trace)[x.at(t, kSlstmTrace, k) + j];
  };
  const SlstmGates<C> y{of(0), of(1), of(2), of(3), of(6)};
  SlstmGradient<C> g{gradient[x.state_at(1) + j], gradient[x.state_at(2) + j],
                     gradient[x.state_at(3) + j]};
  const Kept<C> before = kept_state(params, x, t - 1, j);
  const C dh = gradient[x.state_at(0) + j] + gpu::widen(x.row(params.grad_y, t, 0)[j]);
  const auto d = scan_rules::slstm_back(y, of(4), of(5), before.c, before.n, dh, g);
  gradient[x.state_at(1) + j] = g.c;
  gradient[x.state_at(2) + j] = g.n;
  gradient[x.state_at(3) + j] = g.excess;
  steps.h[x.at(t, 1, 0) + j] = before.h;
  const C gates[4] = {d.i, d.f, d.z, d.o};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    steps.dx[x.at(t, 4, k) + j] = gates[k];
    static_cast<T*>(params.dx)[x.at(t, 4, k) + j] = gpu::narrow<T>(gates[k]);
  }
}

template <class T>
__global__ void __launch_bounds__(kMostThreads)
    slstm_backward_kernel(const __grid_constant__ SlstmBackwardParams params,
                          Steps<compute_t<T>> steps) {
  using C = compute_t<T>;
  const Slstm& p = params.slstm;
  const Head<T> x(p);
  C* const gradient = static_cast<C*>(params.dinitial_state);
  const auto* const of_final = static_cast<const C*>(params.grad_final_state);
  for (int64_t j = threadIdx.x; j < p.width; j += blockDim.x) {
    C d[4] = {};
    if (of_final != nullptr) {
      for (int k = 0; k < 4; ++k) d[k] = of_final[x.state_at(k) + j];
      const Kept<C> s = kept_state(params, x, x.s.count - 1, j);
      d[3] -= fma(d[1], s.c, d[2] * s.n);
    }
    for (int k = 0; k < 4; ++k) gradient[x.state_at(k) + j] = d[k];
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int64_t t = x.s.count - 1; t >= 0; --t) {
    for (int64_t j = threadIdx.x; j < p.width; j += blockDim.x) {
      backward_column(params, x, steps, t, j);
    }
    __syncthreads();
    for (int64_t k = threadIdx.x / kLanes; k < p.width; k += blockDim.x / kLanes) {
      C dh = 0;
      for (int g = 0; g < 4; ++g) {
        const T* const r = x.r(g, k);
        const C* const dx = steps.dx + x.at(t, 4, g);
        for (int64_t j = lane; j < p.width; j += kLanes) dh += dx[j] * gpu::widen(r[j]);
      }
      dh = gpu::warp_reduce(dh, [](C a, C b) { return a + b; });
      if (lane == 0) gradient[x.state_at(0) + k] = dh;
    }
    __syncthreads();
  }
  for (int64_t j = threadIdx.x; j < p.width; j += blockDim.x) {
    const Kept<C> s = kept_state(params, x, -1, j);
    gradient[x.state_at(3) + j] +=
        fma(gradient[x.state_at(1) + j], s.c, gradient[x.state_at(2) + j] * s.n);
  }
}

// dr[g, h, a, b] = sum over steps of h[a] dx[g, b]. A block computes one (g, h, a).
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    slstm_dr_kernel(const __grid_constant__ SlstmBackwardParams params, Steps<compute_t<T>> steps) {
  using C = compute_t<T>;
  const Slstm& p = params.slstm;
  const int64_t a = blockIdx.x % p.width, head = blockIdx.x / p.width % p.heads;
  const int64_t gate = blockIdx.x / p.width / p.heads, row = p.heads * p.width;
  for (int64_t b = threadIdx.x; b < p.width; b += blockDim.x) {
    C sum = 0;
    for (int64_t n = 0; n < p.rows.sequences; ++n) {
      const ScanSequence s = checked_sequence(p.rows, n);
      for (int64_t t = s.begin; t < s.begin + s.count; ++t) {
        const int64_t at = s.batch * p.rows.steps + t, column = head * p.width;
        sum += steps.h[at * row + column + a] * steps.dx[(at * 4 + gate) * row + column + b];
      }
    }
    static_cast<T*>(params.dr)[blockIdx.x * p.width + b] = gpu::narrow<T>(sum);
  }
}

// Number of elements of h, B T H D.
int64_t elements_of_h(const Slstm& p) {
  const int64_t batch = p.rows.boundaries != nullptr ? 1 : p.rows.sequences;
  return batch * p.rows.steps * p.heads * p.width;
}

unsigned threads_of(int64_t width) {
  return static_cast<unsigned>(smaller(round_up(width, kLanes), kMostThreads));
}

}  // namespace

int64_t slstm_backward_elements(const Slstm& p) { return 5 * elements_of_h(p); }

Status launch_slstm(const SlstmParams& params, Stream stream) {
  const Slstm& p = params.slstm;
  const auto blocks = static_cast<unsigned>(p.rows.sequences * p.heads);
  if (blocks == 0 || p.width == 0) return nullptr;
  dispatch(p.dtype, [&]<class T>(T) {
    const size_t bytes = static_cast<size_t>(2 * p.width) * sizeof(compute_t<T>);
    GPU_LAUNCH(slstm_forward_kernel<T>, blocks, threads_of(p.width), bytes, stream, params);
  });
  return gpu::launch_status();
}

Status launch_slstm_backward(const SlstmBackwardParams& params, void* memory, Stream stream) {
  const Slstm& p = params.slstm;
  const auto blocks = static_cast<unsigned>(p.rows.sequences * p.heads);
  if (p.heads == 0 || p.width == 0) return nullptr;
  dispatch(p.dtype, [&]<class T>(T) {
    using C = compute_t<T>;
    auto* const dx = static_cast<C*>(memory);
    const Steps<C> steps{dx, dx + 4 * elements_of_h(p)};
    if (blocks > 0) {
      GPU_LAUNCH(slstm_backward_kernel<T>, blocks, threads_of(p.width), 0, stream, params, steps);
    }
    if (params.dr != nullptr) {
      const auto rows_of_r = static_cast<unsigned>(4 * p.heads * p.width);
      GPU_LAUNCH(slstm_dr_kernel<T>, rows_of_r, threads_of(p.width), 0, stream, params, steps);
    }
  });
  return gpu::launch_status();
}

}  // namespace omniattn
