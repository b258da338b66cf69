// Gradients of the rows of a recurrence, the step `rows` of recurrence_backward_cuda.cu: each row
// of a state walks forward over the tokens of a chunk, and its gradient back.
//
// dk has the parts -S' de (k as a probe) and dS u (k as a key). dg_t = dg_{t+1} + q dq + k (dk as a
// probe - dk as a key), starting from <S, dS> at the end of the chunk. b db is subtracted as for a
// key; a row that reads the state before token t counts for dg_{t-1}. Products of a query with its
// own k, which no decay reduces, would cancel there, so they are added to dq and dk last.
#include "kernels/recurrence/recurrence_backward_cuda.h"

namespace omniattn {
namespace {

// Number of columns of a row that a lane keeps in registers.
template <class C>
constexpr int kColumns = 16 / static_cast<int>(sizeof(C));

// A token's values at a column. -de is the gradient of the probe's reading of the state; with low
// rank, c is this reading, which b writes back.
template <class T, Update kUpdate>
struct Element {
  using C = compute_t<T>;
  C u, de, grad_o, c = 0;

  __device__ Element(const Head<T, kUpdate>& in, const RecurrenceBackwardParams& params,
                     const Found<C>& found, int64_t t, int64_t column) {
    const int64_t at = in.at(t, in.p.value_width) + column;
    u = in.beta(t) * (in.delta() ? found.error[at] : in.value(t, column));
    de = in.delta() ? in.beta(t) * found.du[at] : C(0);
    if constexpr (kUpdate == Update::low_rank) de = -found.dc[at], c = found.error[at];
    grad_o = grad_output(in, params, found, t, column);
  }
};

// One row of a state in one chunk. Lane i holds the gradients of token i.
template <class T, Update kUpdate>
struct Row {
  using C = compute_t<T>;
  static constexpr bool kBonus = kUpdate == Update::bonus, kLowRank = kUpdate == Update::low_rank;

  const Head<T, kUpdate>& in;
  const RecurrenceBackwardParams& params;
  const Found<C>& found;
  const RecurrenceSequence& s;
  const int64_t r;
  const C scale = scale_of<C, kUpdate>(in.p);
  const int lane = lane_index(), count = static_cast<int>(s.count);
  // Gradients of the query, probe and keys k and b; share: scale u . do, for a query's own k.
  C dq = 0, dprobe = 0, dkey = 0, db = 0, share = 0;

  __device__ __forceinline__ C decay(int64_t t) const { return in.decay(t, r, in.head_decay(t)); }
  __device__ __forceinline__ Element<T, kUpdate> element(int64_t t, int64_t column) const {
    return {in, params, found, t, column};
  }

  // each(f) calls f(column, element) for this lane's columns.
  __device__ __forceinline__ void forth(const auto& each) {
    for (int i = 0; i < count; ++i) {
      const int64_t t = s.begin + i;
      const C w = decay(t), k = gpu::widen(in.k(t)[r]);
      const C b = kLowRank ? gpu::widen(in.b(t)[r]) : C(0);
      C probe = 0, query = 0, own = 0;
      each([&](int64_t column, C& e) {
        const Element<T, kUpdate> of = element(t, column);
        own += of.u * of.grad_o;
        if constexpr (kBonus) query += e * of.grad_o;
        if constexpr (kLowRank) probe -= e * of.de;
        e *= w * in.value_decay(t, column);
        if constexpr (kUpdate == Update::value) probe -= e * of.de;
        if constexpr (kLowRank) e += b * of.c;
        if constexpr (!kBonus) query += e * of.grad_o;
        e += k * of.u;
      });
      query = warp_sum(query);
      own = warp_sum(own);
      if constexpr (!kBonus) probe = warp_sum(probe);
      if (lane == i) {
        dprobe += probe;
        dq += scale * query;
        share += scale * own;
      }
    }
  }

  __device__ __forceinline__ void back(const auto& each) {
    for (int i = count - 1; i >= 0; --i) {
      const int64_t t = s.begin + i;
      const C w = decay(t), probe = gpu::widen(in.probe(t)[r]);
      const C q = scale * gpu::widen(in.q(t)[r]);
      C of_k = 0, of_b = 0;
      each([&](int64_t column, C& e) {
        const Element<T, kUpdate> of = element(t, column);
        of_k += e * of.u;
        if constexpr (!kBonus) e += q * of.grad_o;
        if constexpr (kLowRank) of_b += e * of.c;
        if constexpr (kBonus) {
          e = e * w + q * of.grad_o;
        } else {
          e = kLowRank ? e * w - probe * of.de
                       : (e - probe * of.de) * (w * in.value_decay(t, column));
        }
      });
      of_k = warp_sum(of_k);
      if constexpr (kLowRank) of_b = warp_sum(of_b);
      if (lane == i) {
        dkey += of_k;
        db += of_b;
      }
    }
  }

  // `carried` is the state times its gradient at the end of the chunk.
  __device__ __forceinline__ void write(C carried) {
    const Recurrence& p = in.p;
    const int64_t t = s.begin + min(lane, count - 1), at = in.at(t, p.key_width) + r;
    const C q = gpu::widen(in.q(t)[r]), k = gpu::widen(in.k(t)[r]);
    // Shares in dg from this token on (dg), and from the token before it on (before).
    C dg = q * dq + k * (dprobe - dkey), before = 0;
    if constexpr (kBonus) {
      dg = -k * dkey;
      before = q * dq;
    }
    if constexpr (kLowRank) {
      dg = q * dq - k * dkey - gpu::widen(in.b(t)[r]) * db;
      before = gpu::widen(in.a(t)[r]) * dprobe;
    }
    if (lane >= count) dg = before = share = 0;
    if constexpr (kUpdate != Update::value) {
      const C next = __shfl_down_sync(0xffffffff, before, 1);
      if (lane + 1 < kLanes) dg += next;
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const C later = __shfl_down_sync(0xffffffff, dg, step);
      if (lane + step < kLanes) dg += later;
    }
    C bonus = 1;
    if constexpr (kBonus) {
      const C sum = warp_sum(q * k * share);
      if (lane == 0) found.dbonus[(s.slot * p.value_heads + in.head) * p.key_width + r] = sum;
      bonus = in.bonus(r);
    }
    if (lane >= count) return;
    dq += bonus * k * share;
    dkey += bonus * q * share;
    found.dq[at] = dq;
    found.dk[at] = kLowRank ? dkey : dprobe + dkey;
    if constexpr (kLowRank) {
      found.da[at] = dprobe;
      found.db[at] = db;
    }
    if (p.g.data != nullptr) found.dg[at] = dg + carried;
  }
};

// Blocks: value heads of slots, rows.
template <class T, Update kUpdate>
__global__ void __launch_bounds__(kThreads)
    recurrence_rows_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                           const __grid_constant__ Found<compute_t<T>> found) {
  using C = compute_t<T>;
  const Recurrence& p = params.recurrence;
  const int64_t r = warp_index(blockIdx.y), width = p.state_width();
  const RecurrenceSequence s = chunk_of_slot(p, blockIdx.x / p.value_heads);
  if (r >= p.key_width || s.count == 0) return;
  const Head<T, kUpdate> in(p, s, blockIdx.x % p.value_heads);
  Row<T, kUpdate> row{in, params, found, s, r};
  const int64_t place = ((s.slot * p.value_heads + in.head) * p.key_width + r) * width;
  C carried = 0;
  for (int64_t first = row.lane; first - row.lane < width; first += kLanes * kColumns<C>) {
    C x[kColumns<C>] = {};
    const auto each = [&](const auto& f) {
#pragma unroll
      for (int j = 0; j < kColumns<C>; ++j) {
        const int64_t column = first + j * kLanes;
        if (column < width) f(column, x[j]);
      }
    };
    each([&](int64_t column, C& e) { e = static_cast<const C*>(params.states)[place + column]; });
    row.forth(each);
    each([&](int64_t column, C& e) {
      const C dstate = found.dstates[place + column];
      carried += e * dstate;
      e = dstate;
    });
    row.back(each);
  }
  row.write(warp_sum(carried));
}

}  // namespace

void launch_recurrence_rows(const RecurrenceBackwardParams& params, void* memory, Stream stream) {
  const Recurrence& p = params.recurrence;
  const int64_t chunks = p.sequences == 0 ? 0 : recurrence_slots(p) * p.value_heads;
  if (chunks == 0 || p.key_width == 0) return;
  const dim3 grid(blocks(chunks), blocks(ceil_div(p.key_width, int64_t{kWarps})));
  dispatch(p.dtype, [&]<class T>(T) {
    const Found<compute_t<T>> found(p, memory);
    with_update(p, [&]<Update kUpdate>() {
      GPU_LAUNCH((recurrence_rows_kernel<T, kUpdate>), grid, kThreads, 0, stream, params, found);
    });
  });
}

}  // namespace omniattn
