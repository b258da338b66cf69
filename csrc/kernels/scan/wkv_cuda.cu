// RWKV-4 on CUDA, see wkv.h: one thread per channel and sequence walks over its steps. The backward
// recomputes a chunk into memory that neighboring threads read together.
#include "kernels/scan/wkv.h"

#include "kernels/scan/scan_rules.h"
#include "runtime/dispatch.h"
#include "runtime/gpu.h"
#include "semantics/packed_rows.h"

namespace omniattn {
namespace {

using scan_rules::WkvGradient;
using scan_rules::WkvState;

constexpr unsigned kThreads = 64;  // few channels must still use many processors

// The channel and sequence of this thread.
template <class T>
struct Channel {
  using C = compute_t<T>;
  const Wkv& p;
  int64_t n, c;
  ScanSequence s;

  __device__ Channel(const Wkv& wkv)
      : p(wkv), n(blockIdx.x), c(static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) {
    s = scan_sequence(p.rows, n);
    GPU_REQUIRE(fits_rows(n, p.rows.sequences, s.begin, s.count, p.rows.steps),
                "rwkv4: cu_seqlens must grow from 0 to the number of tokens");
  }
  __device__ bool exists() const { return c < p.channels; }
  __device__ __forceinline__ C w() const { return static_cast<const C*>(p.w)[c]; }
  __device__ __forceinline__ C u() const { return static_cast<const C*>(p.u)[c]; }
  __device__ __forceinline__ C input(const ScanView& x, int64_t t) const {
    return gpu::widen(x.row<T>(s.batch, s.begin + t)[c]);
  }
  __device__ __forceinline__ T& result(void* x, int64_t t) const {
    return static_cast<T*>(x)[(s.batch * p.rows.steps + s.begin + t) * p.channels + c];
  }
  // Row r of entry i of (.., rows, C).
  __device__ __forceinline__ int64_t at(int64_t i, int64_t rows, int64_t r) const {
    return (i * rows + r) * p.channels + c;
  }
  __device__ WkvState<C> begin() const {
    const auto* const from = static_cast<const C*>(p.initial_state);
    if (from == nullptr) return {C(0), C(0), static_cast<C>(kWkvEmpty), C(0)};
    return {from[at(n, 3, 0)], from[at(n, 3, 1)], from[at(n, 3, 2)], C(0)};
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    wkv_forward_kernel(const __grid_constant__ WkvParams params) {
  using C = compute_t<T>;
  const Wkv& p = params.wkv;
  const Channel<T> x(p);
  if (!x.exists()) return;
  const C w = x.w(), u = x.u();
  WkvState<C> state = x.begin();
  for (int64_t t = 0; t < x.s.count; ++t) {
    if (params.states != nullptr && t % kScanChunk == 0) {
      C* const to = static_cast<C*>(params.states);
      const int64_t slot = x.s.slot + t / kScanChunk;
      to[x.at(slot, 4, 0)] = state.num;
      to[x.at(slot, 4, 1)] = state.den;
      to[x.at(slot, 4, 2)] = state.top;
      to[x.at(slot, 4, 3)] = state.age;
    }
    const C k = x.input(p.k, t), v = x.input(p.v, t), past = wkv_past(state, w, k);
    x.result(params.y, t) = gpu::narrow<T>(wkv_read(state, past, u, v));
    wkv_advance(state, past, w, k, v);
  }
  C* const to = static_cast<C*>(params.final_state);
  to[x.at(x.n, 3, 0)] = state.num;
  to[x.at(x.n, 3, 1)] = state.den;
  to[x.at(x.n, 3, 2)] = wkv_past(state, w, C(0));
}

// Recomputes a chunk. steps: (N, 3 kScanChunk, C), num, den and past of each step of the chunk.
template <class T>
__device__ WkvState<compute_t<T>> recompute_chunk(const WkvBackwardParams& params,
                                                  const Channel<T>& x, compute_t<T>* steps,
                                                  int64_t t, int64_t end) {
  using C = compute_t<T>;
  const auto* const from = static_cast<const C*>(params.states);
  const int64_t slot = x.s.slot + t / kScanChunk;
  WkvState<C> state{from[x.at(slot, 4, 0)], from[x.at(slot, 4, 1)], from[x.at(slot, 4, 2)],
                    from[x.at(slot, 4, 3)]};
  for (int64_t j = 0; t + j < end; ++j) {
    const C k = x.input(x.p.k, t + j), past = wkv_past(state, x.w(), k);
    steps[x.at(x.n, 3 * kScanChunk, 3 * j)] = state.num;
    steps[x.at(x.n, 3 * kScanChunk, 3 * j + 1)] = state.den;
    steps[x.at(x.n, 3 * kScanChunk, 3 * j + 2)] = past;
    wkv_advance(state, past, x.w(), k, x.input(x.p.v, t + j));
  }
  return state;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    wkv_backward_kernel(const __grid_constant__ WkvBackwardParams params, compute_t<T>* steps) {
  using C = compute_t<T>;
  const Wkv& p = params.wkv;
  const Channel<T> x(p);
  if (!x.exists()) return;
  const C w = x.w(), u = x.u();
  WkvGradient<C> g{C(0), C(0), C(0)};
  const auto begin = [&](const WkvState<C>& state) {
    const auto* const of = static_cast<const C*>(params.grad_final_state);
    if (of == nullptr) return;
    g.num = of[x.at(x.n, 3, 0)];
    g.den = of[x.at(x.n, 3, 1)];
    g.excess = of[x.at(x.n, 3, 2)] - fma(g.num, state.num, g.den * state.den);
  };
  if (x.s.count == 0) begin(x.begin());
  C dw = 0, du = 0;
  const int64_t last = x.s.count - 1;
  for (int64_t t = last / kScanChunk * kScanChunk; t >= 0 && last >= 0; t -= kScanChunk) {
    const int64_t end = smaller(t + kScanChunk, x.s.count);
    const WkvState<C> state = recompute_chunk(params, x, steps, t, end);
    if (end == x.s.count) begin(state);
    for (int64_t j = end - t - 1; j >= 0; --j) {
      const auto d = wkv_back(steps[x.at(x.n, 3 * kScanChunk, 3 * j)],
                              steps[x.at(x.n, 3 * kScanChunk, 3 * j + 1)],
                              steps[x.at(x.n, 3 * kScanChunk, 3 * j + 2)], w, u,
                              x.input(p.v, t + j), x.input(params.grad_y, t + j), g);
      x.result(params.dk, t + j) = gpu::narrow<T>(d.dk);
      x.result(params.dv, t + j) = gpu::narrow<T>(d.dv);
      dw += d.dw;
      du += d.du;
    }
  }
  static_cast<C*>(params.partial)[x.at(x.n, 2, 0)] = dw;
  static_cast<C*>(params.partial)[x.at(x.n, 2, 1)] = du;
  if (params.dinitial_state == nullptr) return;
  const WkvState<C> state = x.begin();
  C* const to = static_cast<C*>(params.dinitial_state);
  to[x.at(x.n, 3, 0)] = g.num;
  to[x.at(x.n, 3, 1)] = g.den;
  to[x.at(x.n, 3, 2)] = fma(g.num, state.num, g.den * state.den) + g.excess;
}

dim3 grid_of(const Wkv& p) {
  return dim3(static_cast<unsigned>(p.rows.sequences),
              static_cast<unsigned>(ceil_div(p.channels, kThreads)));
}

}  // namespace

int64_t wkv_backward_elements(const Wkv& p) {
  return 3 * kScanChunk * p.rows.sequences * p.channels;
}

Status launch_wkv(const WkvParams& params, Stream stream) {
  const Wkv& p = params.wkv;
  if (p.channels == 0 || p.rows.sequences == 0) return nullptr;
  dispatch(p.dtype, [&]<class T>(T) {
    GPU_LAUNCH(wkv_forward_kernel<T>, grid_of(p), kThreads, 0, stream, params);
  });
  return gpu::launch_status();
}

Status launch_wkv_backward(const WkvBackwardParams& params, void* memory, Stream stream) {
  const Wkv& p = params.wkv;
  if (p.channels == 0 || p.rows.sequences == 0) return nullptr;
  dispatch(p.dtype, [&]<class T>(T) {
    GPU_LAUNCH(wkv_backward_kernel<T>, grid_of(p), kThreads, 0, stream, params,
               static_cast<compute_t<T>*>(memory));
  });
  return gpu::launch_status();
}

}  // namespace omniattn
