// Backward of matrix-state recurrences on CUDA:
//
//   errors   what each update adds, again, by columns of each chunk from the saved states
//   du       the gradients of updates and of states, by columns back in time over all tokens
//   rows     the gradients of q, k, a, b and g, by rows of each chunk, forth with S and back with
//   dS finish   sums over value heads, channels and columns, in order bonus    sums over chunks, in
//   order
//
// In `rows`, dk has the parts -S' de (of k as a query) and dS u (of k as a key), and dg_t is
// dg_{t+1} + q dq + k (dk as a query - dk as a key), from <S, dS> at the end of the chunk. Of b, as
// of a key, b db is taken away; what reads the state before token t counts for dg_{t-1}.
#include "kernels/recurrence/recurrence_cuda.h"

namespace omniattn {
namespace {

// The tokens of a slot of states; none where the slot is unused.
__device__ __forceinline__ RecurrenceSequence chunk_of_slot(const Recurrence& p, int64_t slot) {
  const int64_t chunk = recurrence_chunk(p.channel_decay);
  int64_t n = 0;
  if (p.boundaries == nullptr) {
    n = slot / ceil_div(p.steps, chunk);
  } else {
    for (int64_t end = p.sequences; end - n > 1;) {
      const int64_t middle = n + (end - n) / 2;
      (p.boundaries[middle] / chunk + middle <= slot ? n : end) = middle;
    }
  }
  RecurrenceSequence s = checked_sequence(p, n);
  const int64_t skipped = (slot - s.slot) * chunk;
  s.count = skipped < 0 ? 0 : max(min(s.count - skipped, chunk), int64_t{0});
  s.begin += skipped;
  s.slot = slot;
  return s;
}

// What the kernels of the backward tell each other, of the accumulator type.
template <class C>
struct Found {
  C *error, *du;    // (B, T, Hv, V); error of delta updates, or c of low rank
  C* dc;            // of low rank
  C *dq, *dk, *dg;  // (B, T, Hv, K) of each value head
  C *da, *db;       // of low rank
  C* dbonus;        // (slots, Hv, K)
  C* dstates;       // (slots, Hv, K, V), at the ends of chunks
  int64_t bytes;

  __host__ Found(const Recurrence& p, void* memory) : bytes(0) {
    const int64_t heads = (p.boundaries != nullptr ? 1 : p.sequences) * p.steps * p.value_heads;
    const auto take = [&](int64_t count) {
      C* const result = reinterpret_cast<C*>(static_cast<char*>(memory) + bytes);
      bytes += count * static_cast<int64_t>(sizeof(C));
      return memory == nullptr ? nullptr : result;
    };
    const int64_t low_rank = p.a.data != nullptr, slots = recurrence_slots(p) * p.value_heads;
    error = take(p.beta.data == nullptr && !low_rank ? 0 : heads * p.value_width);
    du = take(heads * p.value_width);
    dc = take(low_rank * heads * p.value_width);
    da = take(low_rank * heads * p.key_width);
    db = take(low_rank * heads * p.key_width);
    dbonus = take(p.bonus == nullptr ? 0 : slots * p.key_width);
    dq = take(heads * p.key_width);
    dk = take(heads * p.key_width);
    dg = take(p.g.data == nullptr ? 0 : heads * p.key_width);
    dstates = take(slots * p.key_width * p.value_width);
  }
};

// Blocks: value heads of slots, columns.
template <class T, int R, Update kUpdate>
__global__ void __launch_bounds__(kThreads)
    recurrence_errors_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                             const __grid_constant__ Found<compute_t<T>> found) {
  using C = compute_t<T>;
  const Recurrence& p = params.recurrence;
  const int64_t column = warp_index(blockIdx.y);
  const RecurrenceSequence s = chunk_of_slot(p, blockIdx.x / p.value_heads);
  if (column >= p.value_width || s.count == 0) return;
  const Head<T, kUpdate> in(p, s, blockIdx.x % p.value_heads);
  Column<C, R> state(p, in.head, column);
  state.load(params.states, s.slot);
  for (int64_t t = s.begin; t < s.begin + s.count; ++t) {
    const C error = advance(in, state, t, column);
    if (lane_index() == 0) found.error[in.at(t, p.value_width) + column] = error;
  }
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
  if (column >= p.value_width) return;
  const Head<T, kUpdate> in(p, s, blockIdx.x % p.value_heads);
  const int64_t chunk = recurrence_chunk(p.channel_decay);
  const C scale = static_cast<C>(p.scale);
  Column<C, R> dstate(p, in.head, column);
  dstate.load(params.grad_final_state, n);
  for (int64_t i = s.count - 1; i >= 0; --i) {
    const int64_t t = s.begin + i;
    if (i == s.count - 1 || (i + 1) % chunk == 0) {
      dstate.store(found.dstates, s.slot + i / chunk);
    }
    const C grad_o = params.grad_o.data == nullptr
                         ? C(0)
                         : gpu::widen(in.template row<T>(params.grad_o, t, in.head)[column]);
    const T *const q = in.q(t), *const k = in.k(t);
    const C of_head = in.head_decay(t);
    const int64_t at = in.at(t, p.value_width) + column;
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
      const C de = in.delta() ? in.beta(t) * du : C(0);
      dstate.each(
          [&](int64_t r, C& x) { x = (x - gpu::widen(k[r]) * de) * in.decay(t, r, of_head); });
    }
    if (lane_index() == 0) found.du[at] = du;
  }
  dstate.store(params.dinitial_state, n);
}

// Columns of a row that a lane has in registers.
template <class C>
constexpr int kColumns = 16 / static_cast<int>(sizeof(C));

// What `rows` reads of a token and a column: `de` with its sign turned is the gradient of what the
// probe has read, c of low rank also what b writes.
template <class T, Update kUpdate>
struct Element {
  using C = compute_t<T>;
  C u, de, grad_o, c = 0;

  __device__ Element(const Head<T, kUpdate>& in, const RecurrenceBackwardParams& params,
                     const Found<C>& found, int64_t t, int64_t column) {
    const int64_t at = in.at(t, in.p.value_width) + column;
    u = in.delta() ? in.beta(t) * found.error[at] : gpu::widen(in.v(t)[column]);
    de = in.delta() ? in.beta(t) * found.du[at] : C(0);
    if constexpr (kUpdate == Update::low_rank) de = -found.dc[at], c = found.error[at];
    grad_o = params.grad_o.data == nullptr
                 ? C(0)
                 : gpu::widen(in.template row<T>(params.grad_o, t, in.head)[column]);
  }
};

// Blocks: value heads of slots, rows. Lane i has the gradients of token i.
template <class T, Update kUpdate>
__global__ void __launch_bounds__(kThreads)
    recurrence_rows_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                           const __grid_constant__ Found<compute_t<T>> found) {
  using C = compute_t<T>;
  const Recurrence& p = params.recurrence;
  const int64_t r = warp_index(blockIdx.y), width = p.value_width;
  const RecurrenceSequence s = chunk_of_slot(p, blockIdx.x / p.value_heads);
  if (r >= p.key_width || s.count == 0) return;
  const Head<T, kUpdate> in(p, s, blockIdx.x % p.value_heads);
  const int lane = lane_index();
  const int count = static_cast<int>(s.count);
  const C scale = static_cast<C>(p.scale);
  const int64_t row = ((s.slot * p.value_heads + in.head) * p.key_width + r) * width;
  constexpr bool kBonus = kUpdate == Update::bonus, kLowRank = kUpdate == Update::low_rank;
  // Gradients of the query, the probe and the keys k and b; v . do, which a bonus multiplies.
  C dq = 0, dprobe = 0, dkey = 0, db = 0, share = 0, carried = 0;
  for (int64_t first = lane; first - lane < width; first += kLanes * kColumns<C>) {
    C x[kColumns<C>] = {};
    const auto each = [&](const auto& f) {
#pragma unroll
      for (int j = 0; j < kColumns<C>; ++j) {
        const int64_t column = first + j * kLanes;
        if (column < width) f(column, x[j]);
      }
    };
    each([&](int64_t column, C& e) { e = static_cast<const C*>(params.states)[row + column]; });
    for (int i = 0; i < count; ++i) {
      const int64_t t = s.begin + i;
      const C w = in.decay(t, r, in.head_decay(t)), k = gpu::widen(in.k(t)[r]);
      const C b = kLowRank ? gpu::widen(in.b(t)[r]) : C(0);
      C query = 0, sum = 0, own = 0;
      each([&](int64_t column, C& e) {
        const Element<T, kUpdate> of(in, params, found, t, column);
        if constexpr (kBonus) sum += e * of.grad_o, own += of.u * of.grad_o;
        if constexpr (kLowRank) query -= e * of.de;
        e *= w;
        if constexpr (!kLowRank && !kBonus) query -= e * of.de;
        e += k * of.u + b * of.c;
        if constexpr (!kBonus) sum += e * of.grad_o;
      });
      if constexpr (!kBonus) query = warp_sum(query);
      if constexpr (kBonus) own = warp_sum(own);
      sum = warp_sum(sum);
      if (lane == i) {
        dprobe += query;
        dq += scale * sum;
        share += scale * own;
      }
    }
    each([&](int64_t column, C& e) {
      const C dstate = found.dstates[row + column];
      carried += e * dstate;
      e = dstate;
    });
    for (int i = count - 1; i >= 0; --i) {
      const int64_t t = s.begin + i;
      const C w = in.decay(t, r, in.head_decay(t)), probe = gpu::widen(in.probe(t)[r]);
      const C q = scale * gpu::widen(in.q(t)[r]);
      C sum = 0, of_b = 0;
      each([&](int64_t column, C& e) {
        const Element<T, kUpdate> of(in, params, found, t, column);
        if constexpr (!kBonus) e += q * of.grad_o;
        sum += e * of.u;
        if constexpr (kLowRank) of_b += e * of.c;
        if constexpr (kLowRank) {
          e = e * w - probe * of.de;
        } else if constexpr (kBonus) {
          e = e * w + q * of.grad_o;
        } else {
          e = (e - probe * of.de) * w;
        }
      });
      sum = warp_sum(sum);
      if constexpr (kLowRank) of_b = warp_sum(of_b);
      if (lane == i) dkey += sum, db += of_b;
    }
  }
  carried = warp_sum(carried);
  const int64_t t = s.begin + min(lane, count - 1), at = in.at(t, p.key_width) + r;
  const C q = gpu::widen(in.q(t)[r]), k = gpu::widen(in.k(t)[r]);
  // What counts from this token on, and from the one before it.
  C dg = q * dq + k * (dprobe - dkey), before = 0;
  if constexpr (kBonus) dg = -k * dkey, before = q * dq;
  if constexpr (kLowRank) {
    dg = q * dq - k * dkey - gpu::widen(in.b(t)[r]) * db;
    before = gpu::widen(in.a(t)[r]) * dprobe;
  }
  if (lane >= count) dg = before = share = 0;
  if constexpr (kLowRank || kBonus) {
    const C next = __shfl_down_sync(0xffffffff, before, 1);
    if (lane + 1 < kLanes) dg += next;
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const C later = __shfl_down_sync(0xffffffff, dg, step);
    if (lane + step < kLanes) dg += later;
  }
  if constexpr (kBonus) {
    const C bonus = in.bonus(r), sum = warp_sum(q * k * share);
    if (lane == 0) found.dbonus[(s.slot * p.value_heads + in.head) * p.key_width + r] = sum;
    dq += bonus * k * share;
    dkey += bonus * q * share;
  }
  if (lane >= count) return;
  found.dq[at] = dq;
  found.dk[at] = kLowRank ? dkey : dprobe + dkey;
  if constexpr (kLowRank) found.da[at] = dprobe, found.db[at] = db;
  if (p.g.data != nullptr) found.dg[at] = dg + carried;
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
  const int64_t batch = token / p.steps, t = token % p.steps;
  const bool inside = in_a_sequence(p, t);
  const int lane = lane_index();
  for (int64_t r = lane; r < p.key_width; r += kLanes) {
    const auto add = [&](const C* of_heads, void* to) {
      C sum = 0;
      for (int64_t h = first; inside && h < first + group; ++h) {
        sum += of_heads[(token * p.value_heads + h) * p.key_width + r];
      }
      static_cast<T*>(to)[item * p.key_width + r] = gpu::narrow<T>(sum);
    };
    add(found.dq, params.dq);
    add(found.dk, params.dk);
    if (p.a.data == nullptr) continue;
    add(found.da, params.da);
    add(found.db, params.db);
  }
  for (int64_t h = first; h < first + group; ++h) {
    const Head<T> in(p, {.index = 0, .batch = batch, .begin = 0, .count = 0, .slot = 0}, h);
    C dg = 0, dbeta = 0;
    for (int64_t r = lane; params.dg != nullptr && r < p.key_width; r += kLanes) {
      const int64_t at = in.at(t, p.key_width) + r;
      const C x = inside ? found.dg[at] : C(0);
      if (p.channel_decay) static_cast<C*>(params.dg)[at] = x;
      dg += x;
    }
    for (int64_t column = lane; column < p.value_width; column += kLanes) {
      const int64_t at = in.at(t, p.value_width) + column;
      const C du = inside ? found.du[at] : C(0);
      if (in.delta() && inside) dbeta += found.error[at] * du;
      const C dv = in.delta() && inside ? in.beta(t) * du : du;
      static_cast<T*>(params.dv)[at] = gpu::narrow<T>(dv);
    }
    dg = warp_sum(dg);
    dbeta = warp_sum(dbeta);
    if (lane != 0) continue;
    if (params.dg != nullptr && !p.channel_decay) static_cast<C*>(params.dg)[in.at(t, 1)] = dg;
    if (params.dbeta != nullptr) static_cast<C*>(params.dbeta)[in.at(t, 1)] = dbeta;
  }
}

// Blocks: value heads of sequences.
template <class C>
__global__ void __launch_bounds__(kThreads)
    recurrence_bonus_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                            const __grid_constant__ Found<C> found) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = checked_sequence(p, blockIdx.x / p.value_heads);
  const int64_t head = blockIdx.x % p.value_heads;
  const int64_t chunks = ceil_div(s.count, recurrence_chunk(p.channel_decay));
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

Status launch_recurrence_backward(const RecurrenceBackwardParams& params, void* memory,
                                  Stream stream) {
  const Recurrence& p = params.recurrence;
  const int64_t states = p.sequences * p.value_heads;
  const int64_t chunks = p.sequences == 0 ? 0 : recurrence_slots(p) * p.value_heads;
  const int64_t batch = p.boundaries != nullptr ? 1 : p.sequences;
  const int64_t items = batch * p.steps * p.key_heads;
  dispatch(p.dtype, [&]<class T>(T) {
    using C = compute_t<T>;
    const Found<C> found(p, memory);
    with_update(p, [&]<Update kUpdate>() {
      with_column<C>(p, [&]<int R>(int warps, size_t bytes) {
        const unsigned columns = blocks(ceil_div(p.value_width, int64_t{warps}));
        const unsigned threads = blocks(warps * kLanes);
        if constexpr (kUpdate != Update::bonus) {
          const bool needed = kUpdate == Update::low_rank || p.beta.data != nullptr;
          if (needed && chunks > 0 && columns > 0) {
            GPU_LAUNCH((recurrence_errors_kernel<T, R, kUpdate>), dim3(blocks(chunks), columns),
                       threads, bytes, stream, params, found);
          }
        }
        if (states > 0 && columns > 0) {
          GPU_LAUNCH((recurrence_du_kernel<T, R, kUpdate>), dim3(blocks(states), columns), threads,
                     bytes, stream, params, found);
        }
      });
      if (chunks > 0 && p.key_width > 0) {
        const dim3 grid(blocks(chunks), blocks(ceil_div(p.key_width, int64_t{kWarps})));
        GPU_LAUNCH((recurrence_rows_kernel<T, kUpdate>), grid, kThreads, 0, stream, params, found);
      }
    });
    if (params.dbonus != nullptr && states > 0) {
      GPU_LAUNCH(recurrence_bonus_kernel<C>, blocks(states), kThreads, 0, stream, params, found);
    }
    if (items > 0) {
      GPU_LAUNCH(recurrence_finish_kernel<T>, blocks(ceil_div(items, int64_t{kWarps})), kThreads, 0,
                 stream, params, found, items);
    }
  });
  return gpu::launch_status();
}

}  // namespace omniattn
