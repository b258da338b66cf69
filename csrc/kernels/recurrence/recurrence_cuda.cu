// Forward of matrix-state recurrences on CUDA, see recurrence_cuda.h.
#include "kernels/recurrence/recurrence_cuda.h"

namespace omniattn {
namespace {

// Writes an element of o.
template <class T>
__device__ __forceinline__ void store_output(const RecurrenceParams& params, int64_t at,
                                             compute_t<T> x) {
  if (params.recurrence.o_dtype != params.recurrence.dtype) {
    static_cast<compute_t<T>*>(params.o)[at] = x;
  } else {
    static_cast<T*>(params.o)[at] = gpu::narrow<T>(x);
  }
}

// Blocks: value heads of sequences, columns. Outputs to be divided go to `undivided` (B, T, Hv, W),
// with the sums of their weights.
template <class T, int R, Update kUpdate>
__global__ void __launch_bounds__(kThreads)
    recurrence_forward_kernel(const __grid_constant__ RecurrenceParams params,
                              compute_t<T>* undivided) {
  using C = compute_t<T>;
  const Recurrence& p = params.recurrence;
  const int64_t n = blockIdx.x / p.value_heads, column = warp_index(blockIdx.y);
  const RecurrenceSequence s = checked_sequence(p, n);
  if (column >= p.state_width()) return;
  const Head<T, kUpdate> in(p, s, blockIdx.x % p.value_heads);
  const int64_t chunk = recurrence_chunk(p);
  Column<C, R> state(p, in.head, column);
  state.load(p.initial_state, n);
  for (int64_t i = 0; i < s.count; ++i) {
    const int64_t t = s.begin + i;
    if (i % chunk == 0) state.store(params.states, s.slot + i / chunk);
    C sum = 0;
    if constexpr (kUpdate == Update::bonus) {
      const T *const k = in.k(t), *const q = in.q(t);
      const C v = gpu::widen(in.v(t)[column]);
      state.each([&](int64_t r, C& x) {
        sum += (x + in.bonus(r) * gpu::widen(k[r]) * v) * gpu::widen(q[r]);
      });
      sum = warp_sum(sum);
    }
    advance(in, state, t, column);
    if constexpr (kUpdate != Update::bonus) sum = output(in, state, t);
    if (lane_index() != 0) continue;
    if (kUpdate == Update::linear && p.normalize) {
      undivided[in.at(t, p.state_width()) + column] = sum;
      continue;
    }
    sum = static_cast<C>(p.scale) * (sum + in.skipped(column, gpu::widen(in.v(t)[column])));
    store_output<T>(params, in.at(t, p.value_width) + column, sum);
  }
  state.store(params.final_state, n);
}

// Blocks: groups of tokens and value heads, one for each warp.
template <class T>
__global__ void __launch_bounds__(kThreads)
    recurrence_divide_kernel(const __grid_constant__ RecurrenceParams params,
                             const compute_t<T>* undivided, int64_t items) {
  using C = compute_t<T>;
  const Recurrence& p = params.recurrence;
  const int64_t item = warp_index(blockIdx.x), t = item / p.value_heads % p.steps;
  if (item >= items) return;
  const auto in = head_of_row<T>(p, item);
  const C* const x = undivided + item * p.state_width();
  const C scale = static_cast<C>(p.scale), divisor = in.divisor_of(t, x[p.value_width]).value;
  for (int64_t column = lane_index(); column < p.value_width; column += kLanes) {
    store_output<T>(params, item * p.value_width + column, scale * (x[column] / divisor));
  }
}

}  // namespace

int64_t recurrence_bytes(const Recurrence& p) {
  int64_t bytes = 0;
  dispatch_compute(p.dtype, [&]<class C>(C) {
    const int64_t undivided = p.normalize ? rows_of(p) * p.state_width() : 0;
    bytes = (2 * feature_count(p) + undivided) * sizeof(C);
  });
  return bytes;
}

Status launch_recurrence(const RecurrenceParams& given, void* memory, Stream stream) {
  RecurrenceParams params = given;
  Recurrence& p = params.recurrence;
  if (p.value_heads == 0 || p.state_width() == 0) return nullptr;
  const int64_t items = p.sequences * p.value_heads;
  dispatch(p.dtype, [&]<class T>(T) {
    if (items == 0) return;
    auto* const features = static_cast<compute_t<T>*>(memory);
    auto* const undivided = features + 2 * feature_count(p);
    p = with_features<T>(p, features, stream);
    with_column<compute_t<T>>(p, [&]<int R>(int warps, size_t bytes) {
      const dim3 grid(blocks(items), blocks(ceil_div(p.state_width(), int64_t{warps})));
      with_update(p, [&]<Update kUpdate>() {
        GPU_LAUNCH((recurrence_forward_kernel<T, R, kUpdate>), grid, blocks(warps * kLanes), bytes,
                   stream, params, undivided);
      });
    });
    if (!p.normalize || rows_of(p) == 0) return;
    GPU_LAUNCH(recurrence_divide_kernel<T>, blocks(ceil_div(rows_of(p), int64_t{kWarps})), kThreads,
               0, stream, params, undivided, rows_of(p));
  });
  return gpu::launch_status();
}

}  // namespace omniattn
