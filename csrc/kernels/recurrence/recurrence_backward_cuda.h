// Shared by the kernels of the backward of recurrences on CUDA.
#pragma once

#include "kernels/recurrence/recurrence_cuda.h"

namespace omniattn {

// Steps of recurrence_backward_cuda.cu: `rows`, in a file of its own, and `finish`.
void launch_recurrence_rows(const RecurrenceBackwardParams& params, void* memory, Stream stream);
void launch_recurrence_finish(const RecurrenceBackwardParams& params, void* memory, Stream stream);

namespace {

// Tokens of a slot of states; no tokens if the slot is unused.
__device__ __forceinline__ RecurrenceSequence chunk_of_slot(const Recurrence& p, int64_t slot) {
  const int64_t chunk = recurrence_chunk(p);
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

// Intermediate results of the backward's kernels, in the accumulator type.
template <class C>
struct Found {
  C *error, *du;    // (B, T, Hv, W); error of delta updates, or c of low-rank updates
  C* features;      // of linear attention: features of q, then of k
  C* undivided;     // (B, T, Hv, W): undivided outputs, then their gradients
  C* dc;            // for low-rank updates
  C *dq, *dk, *dg;  // (B, T, Hv, K), per value head; dg is unused on tensor cores
  C *da, *db;       // for low-rank updates
  C* dbonus;        // (slots, Hv, K)
  C* dstates;       // (slots, Hv, K, V), at the ends of chunks
  int64_t bytes, bytes_without_dg;

  __host__ Found(const Recurrence& p, void* memory) : bytes(0) {
    const int64_t heads = rows_of(p);
    const auto take = [&](int64_t count) {
      C* const result = reinterpret_cast<C*>(static_cast<char*>(memory) + bytes);
      bytes += count * static_cast<int64_t>(sizeof(C));
      return memory == nullptr ? nullptr : result;
    };
    const int64_t low_rank = p.a.data != nullptr, slots = recurrence_slots(p) * p.value_heads;
    error = take(!p.delta && !low_rank ? 0 : heads * p.value_width);
    du = take(heads * p.state_width());
    features = take(2 * feature_count(p));
    undivided = take(is_linear(p) ? heads * p.state_width() : 0);
    dc = take(low_rank * heads * p.value_width);
    da = take(low_rank * heads * p.key_width);
    db = take(low_rank * heads * p.key_width);
    dbonus = take(p.bonus == nullptr ? 0 : slots * p.key_width);
    dq = take(heads * p.key_width);
    dk = take(heads * p.key_width);
    dstates = take(slots * p.key_width * p.state_width());
    bytes_without_dg = bytes;
    dg = take(p.g.data == nullptr ? 0 : heads * p.key_width);
  }
};

// Gradient of o; 0 if absent.
template <class T, Update kUpdate>
__device__ __forceinline__ compute_t<T> grad_of_row(const Head<T, kUpdate>& in,
                                                    const RecurrenceBackwardParams& params,
                                                    int64_t t, int64_t column) {
  if (params.grad_o.data == nullptr) return 0;
  if (in.p.o_dtype != in.p.dtype) {
    return in.template row<compute_t<T>>(params.grad_o, t, in.head)[column];
  }
  return gpu::widen(in.template row<T>(params.grad_o, t, in.head)[column]);
}

// Gradient of an output of the state: of the undivided output, or of o without the scale.
template <class T, Update kUpdate>
__device__ __forceinline__ compute_t<T> grad_output(const Head<T, kUpdate>& in,
                                                    const RecurrenceBackwardParams& params,
                                                    const Found<compute_t<T>>& found, int64_t t,
                                                    int64_t column) {
  if (kUpdate == Update::linear) return found.undivided[in.at(t, in.p.state_width()) + column];
  return grad_of_row(in, params, t, column);
}
template <class C, Update kUpdate>
__device__ __forceinline__ C scale_of(const Recurrence& p) {
  return kUpdate == Update::linear ? C(1) : static_cast<C>(p.scale);
}

}  // namespace
}  // namespace omniattn
