// Forward of matrix-state recurrences on CUDA, see recurrence_cuda.h.
#include "kernels/recurrence/recurrence_cuda.h"

namespace omniattn {
namespace {

// Blocks: value heads of sequences, columns.
template <class T, int R, Update kUpdate>
__global__ void __launch_bounds__(kThreads)
    recurrence_forward_kernel(const __grid_constant__ RecurrenceParams params) {
  using C = compute_t<T>;
  const Recurrence& p = params.recurrence;
  const int64_t n = blockIdx.x / p.value_heads, column = warp_index(blockIdx.y);
  const RecurrenceSequence s = checked_sequence(p, n);
  if (column >= p.value_width) return;
  const Head<T, kUpdate> in(p, s, blockIdx.x % p.value_heads);
  const int64_t chunk = recurrence_chunk(p.channel_decay);
  Column<C, R> state(p, in.head, column);
  state.load(p.initial_state, n);
  for (int64_t i = 0; i < s.count; ++i) {
    const int64_t t = s.begin + i;
    if (i % chunk == 0) state.store(params.states, s.slot + i / chunk);
    const T* const q = in.q(t);
    C sum = 0;
    if constexpr (kUpdate == Update::bonus) {
      const T* const k = in.k(t);
      const C v = gpu::widen(in.v(t)[column]);
      state.each([&](int64_t r, C& x) {
        sum += (x + in.bonus(r) * gpu::widen(k[r]) * v) * gpu::widen(q[r]);
      });
    }
    advance(in, state, t, column);
    if constexpr (kUpdate != Update::bonus) {
      state.each([&](int64_t r, C& x) { sum += x * gpu::widen(q[r]); });
    }
    sum = warp_sum(sum) + in.skipped(column, gpu::widen(in.v(t)[column]));
    sum *= static_cast<C>(p.scale);
    if (lane_index() == 0) {
      static_cast<T*>(params.o)[in.at(t, p.value_width) + column] = gpu::narrow<T>(sum);
    }
  }
  state.store(params.final_state, n);
}

// Zeros the rows of o that are in no sequence. Blocks: tokens.
template <class T>
__global__ void __launch_bounds__(kThreads)
    recurrence_clear_kernel(const __grid_constant__ RecurrenceParams params) {
  const Recurrence& p = params.recurrence;
  const int64_t row = p.value_heads * p.value_width;
  if (in_a_sequence(p, blockIdx.x)) return;
  for (int64_t i = threadIdx.x; i < row; i += kThreads) {
    static_cast<T*>(params.o)[blockIdx.x * row + i] = gpu::narrow<T>(0);
  }
}

}  // namespace

Status launch_recurrence(const RecurrenceParams& params, Stream stream) {
  const Recurrence& p = params.recurrence;
  if (p.value_heads == 0 || p.value_width == 0) return nullptr;
  const int64_t items = p.sequences * p.value_heads;
  dispatch(p.dtype, [&]<class T>(T) {
    if (p.boundaries != nullptr && p.steps > 0) {
      GPU_LAUNCH(recurrence_clear_kernel<T>, blocks(p.steps), kThreads, 0, stream, params);
    }
    if (items == 0) return;
    with_column<compute_t<T>>(p, [&]<int R>(int warps, size_t bytes) {
      const dim3 grid(blocks(items), blocks(ceil_div(p.value_width, int64_t{warps})));
      with_update(p, [&]<Update kUpdate>() {
        GPU_LAUNCH((recurrence_forward_kernel<T, R, kUpdate>), grid, blocks(warps * kLanes), bytes,
                   stream, params);
      });
    });
  });
  return gpu::launch_status();
}

}  // namespace omniattn
