// The gates of gates.h on CUDA: one thread per channel and sequence.
#include "kernels/scan/gates.h"

#include "kernels/scan/scan_rules.h"
#include "runtime/dispatch.h"
#include "runtime/gpu.h"
#include "semantics/packed_rows.h"

namespace omniattn {
namespace {

constexpr unsigned kThreads = 32;  // heads are few

// The channel and sequence of this thread.
struct Channel {
  int64_t n, c;
  ScanSequence s;

  __device__ Channel(const Gates& p)
      : n(blockIdx.x), c(static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) {
    s = scan_sequence(p.rows, n);
    GPU_REQUIRE(fits_rows(n, p.rows.sequences, s.begin, s.count, p.rows.steps),
                "mlstm: cu_seqlens must grow from 0 to the number of tokens");
  }
};

template <class C>
__global__ void __launch_bounds__(kThreads)
    gates_forward_kernel(const __grid_constant__ GatesParams params) {
  const Gates& p = params.gates;
  const Channel x(p);
  if (x.c >= p.channels) return;
  const auto* const initial = static_cast<const C*>(p.initial_state);
  scan_rules::GatesState<C> m{initial == nullptr ? C(0) : initial[x.n * p.channels + x.c], C(0)};
  for (int64_t t = x.s.begin; t < x.s.begin + x.s.count; ++t) {
    const int64_t at = (x.s.batch * p.rows.steps + t) * p.channels + x.c;
    const auto y =
        scan_rules::gates_step(m, p.g.row<C>(x.s.batch, t)[x.c], p.i.row<C>(x.s.batch, t)[x.c]);
    static_cast<C*>(params.decay)[at] = y.decay;
    static_cast<C*>(params.factor)[at] = y.factor;
    static_cast<C*>(params.m)[at] = m.top + m.sum;
  }
  static_cast<C*>(params.final_state)[x.n * p.channels + x.c] = m.top + m.sum;
}

template <class C>
__global__ void __launch_bounds__(kThreads)
    gates_backward_kernel(const __grid_constant__ GatesBackwardParams params) {
  const Gates& p = params.gates;
  const Channel x(p);
  if (x.c >= p.channels) return;
  const auto* const final_state = static_cast<const C*>(params.grad_final_state);
  C dm = final_state == nullptr ? C(0) : final_state[x.n * p.channels + x.c];
  for (int64_t t = x.s.begin + x.s.count - 1; t >= x.s.begin; --t) {
    const int64_t at = (x.s.batch * p.rows.steps + t) * p.channels + x.c;
    const auto of = [&](const ScanView& view) { return view.row<C>(x.s.batch, t)[x.c]; };
    const auto d =
        scan_rules::gates_back(of(params.decay), of(params.factor), of(params.grad_decay),
                               of(params.grad_factor), dm + of(params.grad_m));
    static_cast<C*>(params.dg)[at] = d.dg;
    static_cast<C*>(params.di)[at] = d.di;
    dm = d.dg;
  }
  static_cast<C*>(params.dinitial_state)[x.n * p.channels + x.c] = dm;
}

dim3 grid_of(const Gates& p) {
  return dim3(static_cast<unsigned>(p.rows.sequences),
              static_cast<unsigned>(ceil_div(p.channels, kThreads)));
}

}  // namespace

Status launch_gates(const GatesParams& params, Stream stream) {
  const Gates& p = params.gates;
  if (p.channels == 0 || p.rows.sequences == 0) return nullptr;
  dispatch_compute(p.dtype, [&]<class C>(C) {
    GPU_LAUNCH(gates_forward_kernel<C>, grid_of(p), kThreads, 0, stream, params);
  });
  return gpu::launch_status();
}

Status launch_gates_backward(const GatesBackwardParams& params, Stream stream) {
  const Gates& p = params.gates;
  if (p.channels == 0 || p.rows.sequences == 0) return nullptr;
  dispatch_compute(p.dtype, [&]<class C>(C) {
    GPU_LAUNCH(gates_backward_kernel<C>, grid_of(p), kThreads, 0, stream, params);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
