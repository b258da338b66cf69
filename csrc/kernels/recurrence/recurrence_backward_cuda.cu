// Backward of matrix-state recurrences on CUDA:
//
//   errors   what each update adds, recomputed by columns of each chunk from the saved states; for
//            linear attention also the undivided outputs
//   divide   the gradients of undivided outputs and of their divisors
//   du       the gradients of updates, of v and of states, by columns back in time over all tokens
//   rows     the gradients of q, k, a, b and g, by rows of each chunk (recurrence_rows_cuda.cu)
//   value decay   the gradient of gv, by columns of each chunk
//   finish   sums over value heads, channels and columns, in order
//   bonus    sums over chunks, in order
#include "kernels/recurrence/recurrence_backward_cuda.h"

namespace omniattn {
namespace {

// Blocks: value heads of slots, columns.
template <class T, int R, Update kUpdate>
__global__ void __launch_bounds__(kThreads)
    recurrence_errors_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                             const __grid_constant__ Found<compute_t<T>> found) {
  using C = compute_t<T>;
  const Recurrence& p = params.recurrence;
  const int64_t column = warp_index(blockIdx.y);
  const RecurrenceSequence s = chunk_of_slot(p, blockIdx.x / p.value_heads);
  if (column >= p.state_width() || s.count == 0) return;
  const Head<T, kUpdate> in(p, s, blockIdx.x % p.value_heads);
  C* const to = kUpdate == Update::linear ? found.undivided : found.error;
  Column<C, R> state(p, in.head, column);
  state.load(params.states, s.slot);
  for (int64_t t = s.begin; t < s.begin + s.count; ++t) {
    C value = advance(in, state, t, column);
    if constexpr (kUpdate == Update::linear) value = output(in, state, t);
    if (lane_index() == 0) to[in.at(t, p.state_width()) + column] = value;
  }
}

// Blocks: groups of tokens and value heads, one for each warp.
template <class T>
__global__ void __launch_bounds__(kThreads)
    recurrence_divide_backward_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                                      const __grid_constant__ Found<compute_t<T>> found,
                                      int64_t items) {
  using C = compute_t<T>;
  const Recurrence& p = params.recurrence;
  const int64_t item = warp_index(blockIdx.x), t = item / p.value_heads % p.steps;
  if (item >= items) return;
  C* const dmin_denominator = static_cast<C*>(params.dmin_denominator);
  const auto in = head_of_row<T>(p, item);
  C* const x = found.undivided + item * p.state_width();
  Divisor<C> divisor{1, 0, 0};
  if (p.normalize) divisor = in.divisor_of(t, x[p.value_width]);
  const C scale = static_cast<C>(p.scale);
  C all = 0;
  for (int64_t column = lane_index(); column < p.value_width; column += kLanes) {
    const C dx = scale * grad_of_row(in, params, t, column) / divisor.value;
    all += dx * x[column];
    x[column] = dx;
  }
  const C of_divisor = -warp_sum(all) / divisor.value;
  __syncwarp();  // all lanes have read the sum
  if (lane_index() != 0 || !p.normalize) return;
  x[p.value_width] = of_divisor * divisor.by_sum;
  if (dmin_denominator != nullptr) dmin_denominator[item] = of_divisor * divisor.by_min_denominator;
}

// Blocks: value heads of sequences, columns.
template <class T, int R, Update kUpdate>
__global__ void __launch_bounds__(kThreads)
    recurrence_du_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                         const __grid_constant__ Found<compute_t<T>> found) {
  using C = compute_t<T>;
  const Recurrence& p = params.recurrence;
  const int64_t n = blockIdx.x / p.value_heads, column = warp_index(blockIdx.y);
  const RecurrenceSequence s = checked_sequence(p, n);
  if (column >= p.state_width()) return;
  const Head<T, kUpdate> in(p, s, blockIdx.x % p.value_heads);
  const int64_t chunk = recurrence_chunk(p);
  const C scale = scale_of<C, kUpdate>(p);
  C dskip = 0;
  Column<C, R> dstate(p, in.head, column);
  dstate.load(params.grad_final_state, n);
  for (int64_t i = s.count - 1; i >= 0; --i) {
    const int64_t t = s.begin + i;
    if (i == s.count - 1 || (i + 1) % chunk == 0) {
      dstate.store(found.dstates, s.slot + i / chunk);
    }
    const C grad_o = grad_output(in, params, found, t, column);
    const auto *const q = in.q(t), *const k = in.k(t);
    const C of_head = in.head_decay(t);
    const int64_t at = in.at(t, p.state_width()) + column;
    C du = 0;
    if constexpr (kUpdate == Update::low_rank) {
      const T *const a = in.a(t), *const b = in.b(t);
      C dc = 0;
      dstate.each([&](int64_t r, C& x) {
        x += scale * gpu::widen(q[r]) * grad_o;
        du += x * gpu::widen(k[r]);
        dc += x * gpu::widen(b[r]);
      });
      du = warp_sum(du);
      dc = warp_sum(dc);
      dstate.each(
          [&](int64_t r, C& x) { x = x * in.decay(t, r, of_head) + gpu::widen(a[r]) * dc; });
      if (lane_index() == 0) found.dc[at] = dc;
    } else if constexpr (kUpdate == Update::bonus) {
      dstate.each([&](int64_t r, C& x) {
        const C dread = scale * gpu::widen(q[r]) * grad_o;
        du += (x + in.bonus(r) * dread) * gpu::widen(k[r]);
        x = x * in.decay(t, r, of_head) + dread;
      });
      du = warp_sum(du);
    } else {
      dstate.each([&](int64_t r, C& x) {
        x += scale * gpu::widen(q[r]) * grad_o;
        du += x * gpu::widen(k[r]);
      });
      du = warp_sum(du);
      const C de = in.delta() ? in.beta(t) * du : C(0), of_value = in.value_decay(t, column);
      dstate.each([&](int64_t r, C& x) {
        x = (x - gpu::widen(k[r]) * de) * (in.decay(t, r, of_head) * of_value);
      });
    }
    if (params.dskip != nullptr) dskip += scale * grad_o * gpu::widen(in.v(t)[column]);
    if (lane_index() != 0) continue;
    found.du[at] = du;
    if (column == p.value_width) continue;
    const C dv = in.beta(t) * du + in.skipped(column, scale * grad_o);
    static_cast<T*>(params.dv)[in.at(t, p.value_width) + column] = gpu::narrow<T>(dv);
  }
  dstate.store(params.dinitial_state, n);
  if (params.dskip != nullptr && lane_index() == 0) {
    static_cast<C*>(params.dskip)[blockIdx.x * p.value_width + column] = dskip;
  }
}

// Blocks: groups of tokens and key heads, one for each warp.
template <class T>
__global__ void __launch_bounds__(kThreads)
    recurrence_finish_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                             const __grid_constant__ Found<compute_t<T>> found, int64_t items) {
  using C = compute_t<T>;
  const Recurrence& p = params.recurrence;
  const int64_t item = warp_index(blockIdx.x);
  if (item >= items) return;
  const int64_t token = item / p.key_heads, key_head = item % p.key_heads;
  const int64_t group = p.value_heads / p.key_heads, first = key_head * group;
  const int64_t t = token % p.steps;
  const int lane = lane_index();
  const auto keys = head_of_row<T>(p, token * p.value_heads + first);
  for (int64_t r = lane; r < p.key_width; r += kLanes) {
    const auto slope = [&](const auto* features) {
      return p.features == FeatureMap::identity ? C(1) : keys.slope(features[r]);
    };
    const auto add = [&](const C* of_heads, void* to, C factor) {
      C sum = 0;
      for (int64_t h = first; h < first + group; ++h) {
        sum += of_heads[(token * p.value_heads + h) * p.key_width + r];
      }
      static_cast<T*>(to)[item * p.key_width + r] = gpu::narrow<T>(sum * factor);
    };
    add(found.dq, params.dq, slope(keys.q(t)));
    add(found.dk, params.dk, slope(keys.k(t)));
    if (p.a.data == nullptr) continue;
    add(found.da, params.da, C(1));
    add(found.db, params.db, C(1));
  }
  for (int64_t h = first; h < first + group; ++h) {
    const auto in = head_of_row<T>(p, token * p.value_heads + h);
    C dg = 0, dbeta = 0;
    for (int64_t r = lane; params.dg != nullptr && r < p.key_width; r += kLanes) {
      const int64_t at = in.at(t, p.key_width) + r;
      const C x = found.dg[at];
      if (p.channel_decay) static_cast<C*>(params.dg)[at] = x;
      dg += x;
    }
    for (int64_t column = lane; params.dbeta != nullptr && column < p.state_width();
         column += kLanes) {
      const int64_t at = in.at(t, p.state_width()) + column;
      dbeta += found.du[at] * (p.delta ? found.error[at] : in.value(t, column));
    }
    dg = warp_sum(dg);
    dbeta = warp_sum(dbeta);
    if (lane != 0) continue;
    if (params.dg != nullptr && !p.channel_decay) static_cast<C*>(params.dg)[in.at(t, 1)] = dg;
    if (params.dbeta != nullptr) static_cast<C*>(params.dbeta)[in.at(t, 1)] = dbeta;
  }
}

// Gradient of the decays of values. Blocks: value heads of slots, columns. As in
// recurrence_rows_cuda.cu, dgv_t = dgv_{t+1} + o do - u du, starting from <S, dS> of the column at
// the end of the chunk; the products of a query with its own k, which would cancel, are left out.
template <class T, int R>
__global__ void __launch_bounds__(kThreads)
    recurrence_value_decay_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                                  const __grid_constant__ Found<compute_t<T>> found) {
  using C = compute_t<T>;
  const Recurrence& p = params.recurrence;
  const int64_t column = warp_index(blockIdx.y);
  const RecurrenceSequence s = chunk_of_slot(p, blockIdx.x / p.value_heads);
  if (column >= p.value_width || s.count == 0) return;
  const Head<T> in(p, s, blockIdx.x % p.value_heads);
  const int lane = lane_index(), count = static_cast<int>(s.count);
  const C scale = static_cast<C>(p.scale);
  Column<C, R> state(p, in.head, column);
  state.load(params.states, s.slot);
  C dgv = 0;  // lane i holds the share of token i
  for (int i = 0; i < count; ++i) {
    const int64_t t = s.begin + i;
    const T *const q = in.q(t), *const k = in.k(t);
    const C decay = in.head_decay(t), of_value = in.value_decay(t, column);
    const C u = in.beta(t) * in.value(t, column);
    C read = 0;
    state.each([&](int64_t r, C& x) {
      x *= in.decay(t, r, decay) * of_value;
      read += x * gpu::widen(q[r]);
      x += gpu::widen(k[r]) * u;
    });
    read = warp_sum(read);
    if (lane == i) dgv = scale * grad_of_row(in, params, t, column) * read;
  }
  // The gradient replaces the state.
  C carried = 0;
  const int64_t place = (s.slot * p.value_heads + in.head) * p.key_width * p.value_width + column;
  state.each([&](int64_t r, C& x) {
    const C d = found.dstates[place + r * p.value_width];
    carried += x * d;
    x = d;
  });
  carried = warp_sum(carried);
  for (int i = count - 1; i >= 0; --i) {
    const int64_t t = s.begin + i;
    const T *const q = in.q(t), *const k = in.k(t);
    const C decay = in.head_decay(t), of_value = in.value_decay(t, column);
    const C u = in.beta(t) * in.value(t, column);
    const C grad_o = scale * grad_of_row(in, params, t, column);
    C du = 0;
    state.each([&](int64_t r, C& x) {
      du += x * gpu::widen(k[r]);
      x = (x + gpu::widen(q[r]) * grad_o) * (in.decay(t, r, decay) * of_value);
    });
    du = warp_sum(du);
    if (lane == i) dgv -= u * du;
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const C later = __shfl_down_sync(0xffffffff, dgv, step);
    if (lane + step < kLanes) dgv += later;
  }
  if (lane >= count) return;
  static_cast<C*>(params.dgv)[in.at(s.begin + lane, p.value_width) + column] = dgv + carried;
}

// Blocks: value heads of sequences.
template <class C>
__global__ void __launch_bounds__(kThreads)
    recurrence_bonus_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                            const __grid_constant__ Found<C> found) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = checked_sequence(p, blockIdx.x / p.value_heads);
  const int64_t head = blockIdx.x % p.value_heads;
  const int64_t chunks = ceil_div(s.count, recurrence_chunk(p));
  for (int64_t r = threadIdx.x; r < p.key_width; r += kThreads) {
    C sum = 0;
    for (int64_t slot = s.slot; slot < s.slot + chunks; ++slot) {
      sum += found.dbonus[(slot * p.value_heads + head) * p.key_width + r];
    }
    static_cast<C*>(params.dbonus)[blockIdx.x * p.key_width + r] = sum;
  }
}

}  // namespace

int64_t recurrence_backward_bytes(const Recurrence& p) {
  int64_t bytes = 0;
  dispatch_compute(p.dtype, [&]<class C>(C) { bytes = Found<C>(p, nullptr).bytes; });
  return bytes;
}

void launch_recurrence_finish(const RecurrenceBackwardParams& params, void* memory, Stream stream) {
  const Recurrence& p = params.recurrence;
  const int64_t items = token_count(p) * p.key_heads;
  if (items == 0) return;
  dispatch(p.dtype, [&]<class T>(T) {
    const Found<compute_t<T>> found(p, memory);
    GPU_LAUNCH(recurrence_finish_kernel<T>, blocks(ceil_div(items, int64_t{kWarps})), kThreads, 0,
               stream, params, found, items);
  });
}

Status launch_recurrence_backward(const RecurrenceBackwardParams& given, void* memory,
                                  Stream stream) {
  RecurrenceBackwardParams params = given;
  Recurrence& p = params.recurrence;
  const int64_t states = p.sequences * p.value_heads;
  const int64_t chunks = p.sequences == 0 ? 0 : recurrence_slots(p) * p.value_heads;
  dispatch(p.dtype, [&]<class T>(T) {
    using C = compute_t<T>;
    const Found<C> found(p, memory);
    p = with_features<T>(p, found.features, stream);
    with_update(p, [&]<Update kUpdate>() {
      with_column<C>(p, [&]<int R>(int warps, size_t bytes) {
        const unsigned columns = blocks(ceil_div(p.state_width(), int64_t{warps}));
        const unsigned threads = blocks(warps * kLanes);
        if constexpr (kUpdate != Update::bonus) {
          const bool needed = kUpdate != Update::value || p.delta;
          if (needed && chunks > 0 && columns > 0) {
            GPU_LAUNCH((recurrence_errors_kernel<T, R, kUpdate>), dim3(blocks(chunks), columns),
                       threads, bytes, stream, params, found);
          }
        }
        if (kUpdate == Update::linear && rows_of(p) > 0) {
          GPU_LAUNCH(recurrence_divide_backward_kernel<T>,
                     blocks(ceil_div(rows_of(p), int64_t{kWarps})), kThreads, 0, stream, params,
                     found, rows_of(p));
        }
        if (states > 0 && columns > 0) {
          GPU_LAUNCH((recurrence_du_kernel<T, R, kUpdate>), dim3(blocks(states), columns), threads,
                     bytes, stream, params, found);
        }
      });
    });
    launch_recurrence_rows(params, memory, stream);
    if (params.dgv != nullptr && chunks > 0 && p.value_width > 0) {
      with_column<C>(p, [&]<int R>(int warps, size_t bytes) {
        const dim3 grid(blocks(chunks), blocks(ceil_div(p.value_width, int64_t{warps})));
        GPU_LAUNCH((recurrence_value_decay_kernel<T, R>), grid, blocks(warps * kLanes), bytes,
                   stream, params, found);
      });
    }
    if (params.dbonus != nullptr && states > 0) {
      GPU_LAUNCH(recurrence_bonus_kernel<C>, blocks(states), kThreads, 0, stream, params, found);
    }
  });
  launch_recurrence_finish(params, memory, stream);
  return gpu::launch_status();
}

}  // namespace omniattn
