// Shared by the CUDA kernels of recurrences. Columns of a state are independent, so a warp walks
// over the tokens with one column in registers.
#pragma once

#include "kernels/recurrence/recurrence.h"
#include "runtime/dispatch.h"
#include "runtime/gpu_row.h"
#include "semantics/arith.h"
#include "semantics/packed_rows.h"

namespace omniattn {
namespace {

// Updates of recurrence.h with kernels of their own; plain and delta share theirs. The
// update of linear attention is plain, with features, divisors, or both; its q and k are
// features, in the accumulator type.
enum class Update { value, linear, bonus, low_rank };

constexpr int kLanes = 32, kWarps = 4;
constexpr unsigned kThreads = kLanes * kWarps;

template <class C>
__device__ __forceinline__ C warp_sum(C x) {
  return gpu::warp_reduce(x, [](C a, C b) { return a + b; });
}

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kLanes; }
__device__ __forceinline__ int64_t warp_index(unsigned block) {
  return static_cast<int64_t>(block) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
}

__device__ __forceinline__ RecurrenceSequence checked_sequence(const Recurrence& p, int64_t n) {
  const RecurrenceSequence s = recurrence_sequence(p, n);
  GPU_REQUIRE(fits_rows(n, p.sequences, s.begin, s.count, p.steps),
              "recurrence: cu_seqlens must grow from 0 to the number of tokens");
  return s;
}

// Inputs of one value head in one batch entry.
template <class T, Update kUpdate = Update::value>
struct Head {
  using C = compute_t<T>;
  using Key = std::conditional_t<kUpdate == Update::linear, C, T>;
  static constexpr bool kBonus = kUpdate == Update::bonus, kLowRank = kUpdate == Update::low_rank;
  static constexpr bool kLinear = kUpdate == Update::linear;

  const Recurrence& p;
  int64_t sequence, batch, head, key_head;

  __device__ Head(const Recurrence& params, const RecurrenceSequence& s, int64_t h)
      : p(params),
        sequence(s.index),
        batch(s.batch),
        head(h),
        key_head(h / (p.value_heads / p.key_heads)) {}

  template <class S>
  __device__ __forceinline__ const S* row(const StepView& x, int64_t t, int64_t h) const {
    return static_cast<const S*>(x.data) + batch * x.batch + t * x.step + h * x.head;
  }
  __device__ __forceinline__ const Key* q(int64_t t) const { return row<Key>(p.q, t, key_head); }
  __device__ __forceinline__ const Key* k(int64_t t) const { return row<Key>(p.k, t, key_head); }
  __device__ __forceinline__ const T* a(int64_t t) const { return row<T>(p.a, t, key_head); }
  __device__ __forceinline__ const T* b(int64_t t) const { return row<T>(p.b, t, key_head); }
  // Row that reads the state before the update.
  __device__ __forceinline__ const Key* probe(int64_t t) const {
    if constexpr (kLowRank) return a(t);
    return k(t);
  }
  __device__ __forceinline__ const T* v(int64_t t) const { return row<T>(p.v, t, head); }
  // Value at a column; 1 in the denominator column.
  __device__ __forceinline__ C value(int64_t t, int64_t column) const {
    if (kLinear && column == p.value_width) return 1;
    return gpu::widen(v(t)[column]);
  }
  // Features, and the slope of a feature of value x.
  __device__ __forceinline__ C feature(C x) const {
    switch (p.features) {
      case FeatureMap::identity:
        break;
      case FeatureMap::elu1:
        return x > 0 ? x + 1 : exp(x);
      case FeatureMap::relu:
        return x < 0 ? C(0) : x;
      case FeatureMap::squared_relu:
        return x < 0 ? C(0) : x * x;
      case FeatureMap::exp:
        return exp(x);
    }
    return x;
  }
  __device__ __forceinline__ C slope(C x) const {
    switch (p.features) {
      case FeatureMap::identity:
        break;
      case FeatureMap::elu1:
        return x < 1 ? x : C(1);
      case FeatureMap::relu:
        return x > 0 ? C(1) : C(0);
      case FeatureMap::squared_relu:
        return 2 * sqrt(x);
      case FeatureMap::exp:
        return x;
    }
    return 1;
  }
  __device__ __forceinline__ Divisor<C> divisor_of(int64_t t, C sum) const {
    const C* const min_denominator =
        p.min_denominator.data == nullptr ? nullptr : row<C>(p.min_denominator, t, head);
    return divisor(sum, min_denominator, static_cast<C>(p.eps));
  }
  // Factor of the update.
  __device__ __forceinline__ C beta(int64_t t) const {
    return p.beta.data == nullptr ? C(1) : *row<C>(p.beta, t, head);
  }
  __device__ __forceinline__ bool delta() const { return kUpdate == Update::value && p.delta; }
  __device__ __forceinline__ C bonus(int64_t r) const { return head_row(p.bonus, p.key_width)[r]; }
  // skip x; 0 rather than 0 * x without a skip, since x may be infinite.
  __device__ __forceinline__ C skipped(int64_t column, C x) const {
    return p.skip == nullptr ? C(0) : head_row(p.skip, p.value_width)[column] * x;
  }
  // Row of a bonus or skip (N, Hv, width).
  __device__ __forceinline__ const C* head_row(const void* x, int64_t width) const {
    return static_cast<const C*>(x) + (sequence * p.value_heads + head) * width;
  }

  // Decays of a token: one for all channels (1 if each channel has its own), and one per channel.
  __device__ __forceinline__ C head_decay(int64_t t) const {
    return p.g.data == nullptr || p.channel_decay ? C(1) : exp(*row<C>(p.g, t, head));
  }
  __device__ __forceinline__ C decay(int64_t t, int64_t r, C of_head) const {
    return p.channel_decay ? exp(row<C>(p.g, t, head)[r]) : of_head;
  }
  // Decay of a value, only with a plain update.
  __device__ __forceinline__ C value_decay(int64_t t, int64_t column) const {
    if constexpr (kUpdate == Update::value) {
      if (p.gv.data != nullptr) return exp(row<C>(p.gv, t, head)[column]);
    }
    return 1;
  }
  // Row t of a tensor (B, T, Hv, width).
  __device__ __forceinline__ int64_t at(int64_t t, int64_t width) const {
    return ((batch * p.steps + t) * p.value_heads + head) * width;
  }
};

// Number of tokens B T; number of rows of value heads of all tokens; head of such a row.
__host__ __device__ __forceinline__ int64_t token_count(const Recurrence& p) {
  return (p.boundaries != nullptr ? 1 : p.sequences) * p.steps;
}
__host__ __device__ __forceinline__ int64_t rows_of(const Recurrence& p) {
  return token_count(p) * p.value_heads;
}
template <class T>
__device__ __forceinline__ Head<T, Update::linear> head_of_row(const Recurrence& p, int64_t row) {
  const int64_t batch = row / p.value_heads / p.steps;
  return {p, {.index = 0, .batch = batch, .begin = 0, .count = 0, .slot = 0}, row % p.value_heads};
}

// A column of a state, spread over a warp: R rows per lane in registers, or any
// number in shared memory if R is 0.
template <class C, int R>
class Column {
 public:
  __device__ Column(const Recurrence& p, int64_t head, int64_t column)
      : p_(p), head_(head), column_(column) {
    if constexpr (R == 0) {
      shared_ = gpu::dynamic_shared<C>() + threadIdx.x / kLanes * p.key_width;
    }
  }

  // Calls f(row, element) for this lane's elements.
  template <class F>
  __device__ __forceinline__ void each(const F& f) {
    if constexpr (R == 0) {
      for (int64_t r = lane_index(); r < p_.key_width; r += kLanes) f(r, shared_[r]);
    } else {
#pragma unroll
      for (int i = 0; i < R; ++i) {
        const int64_t r = lane_index() + i * kLanes;
        if (r < p_.key_width) f(r, x_[i]);
      }
    }
  }
  // Loads the column from state n of (.., Hv, K, V); null: zeros.
  __device__ __forceinline__ void load(const void* states, int64_t n) {
    each([&](int64_t r, C& x) {
      x = states == nullptr ? C(0) : static_cast<const C*>(states)[place(n, r)];
    });
  }
  __device__ __forceinline__ void store(void* states, int64_t n) {
    if (states == nullptr) return;
    each([&](int64_t r, C& x) { static_cast<C*>(states)[place(n, r)] = x; });
  }

 private:
  __device__ __forceinline__ int64_t place(int64_t n, int64_t r) const {
    return ((n * p_.value_heads + head_) * p_.key_width + r) * p_.state_width() + column_;
  }

  const Recurrence& p_;
  int64_t head_, column_;
  C* shared_ = nullptr;
  C x_[R == 0 ? 1 : R];
};

// Advances a column by one token; returns v minus the prediction (delta), or c (low rank).
template <class T, Update kUpdate, class C, int R>
__device__ __forceinline__ C advance(const Head<T, kUpdate>& in, Column<C, R>& state, int64_t t,
                                     int64_t column) {
  const auto *const k = in.k(t), *const probe = in.probe(t);
  const C of_head = in.head_decay(t), of_value = in.value_decay(t, column);
  C predicted = 0;
  state.each([&](int64_t r, C& x) {
    const C before = x;
    x *= in.decay(t, r, of_head) * of_value;
    if constexpr (!Head<T, kUpdate>::kBonus)
      predicted += (Head<T, kUpdate>::kLowRank ? before : x) * gpu::widen(probe[r]);
  });
  C u = in.value(t, column), found = 0;
  if (in.delta()) u = found = u - warp_sum(predicted);
  u *= in.beta(t);
  if constexpr (Head<T, kUpdate>::kLowRank) found = warp_sum(predicted);
  const T* const b = Head<T, kUpdate>::kLowRank ? in.b(t) : nullptr;
  state.each([&](int64_t r, C& x) {
    x += gpu::widen(k[r]) * u;
    if constexpr (Head<T, kUpdate>::kLowRank) x += gpu::widen(b[r]) * found;
  });
  return found;
}

// Output of a column that has been advanced to token t, without its scale.
template <class T, Update kUpdate, class C, int R>
__device__ __forceinline__ C output(const Head<T, kUpdate>& in, Column<C, R>& state, int64_t t) {
  const auto* const q = in.q(t);
  C sum = 0;
  state.each([&](int64_t r, C& x) { sum += x * gpu::widen(q[r]); });
  return warp_sum(sum);
}

__host__ __device__ __forceinline__ bool is_linear(const Recurrence& p) {
  return p.normalize || p.features != FeatureMap::identity;
}

unsigned blocks(int64_t count) { return static_cast<unsigned>(count); }

// Calls f with the number of rows per lane, the warps of a block and its bytes of shared memory.
template <class C, class F>
void with_column(const Recurrence& p, const F& f) {
  if (p.key_width <= 4 * kLanes) {
    f.template operator()<4>(kWarps, 0);
  } else {
    f.template operator()<0>(1, static_cast<size_t>(p.key_width) * sizeof(C));
  }
}

// Number of features of q, equal to that of k.
int64_t feature_count(const Recurrence& p) {
  return is_linear(p) ? token_count(p) * p.key_heads * p.key_width : 0;
}
// Blocks: groups of tokens and key heads, one for each warp.
template <class T>
__global__ void __launch_bounds__(kThreads)
    recurrence_features_kernel(const __grid_constant__ Recurrence p, compute_t<T>* features,
                               int64_t items) {
  const int64_t item = warp_index(blockIdx.x), token = item / p.key_heads, t = token % p.steps;
  if (item >= items) return;
  const int64_t group = p.value_heads / p.key_heads, head = item % p.key_heads * group;
  const Head<T> in(p, {.index = 0, .batch = token / p.steps, .begin = 0, .count = 0, .slot = 0},
                   head);
  for (int64_t r = lane_index(); r < p.key_width; r += kLanes) {
    const int64_t at = item * p.key_width + r;
    features[at] = in.feature(gpu::widen(in.q(t)[r]));
    features[items * p.key_width + at] = in.feature(gpu::widen(in.k(t)[r]));
  }
}
// Linear attention's call with features in place of q and k.
template <class T>
Recurrence with_features(const Recurrence& p, compute_t<T>* features, Stream stream) {
  const int64_t count = feature_count(p);
  if (count == 0) return p;
  const int64_t items = count / p.key_width, row = p.key_heads * p.key_width;
  GPU_LAUNCH(recurrence_features_kernel<T>, blocks(ceil_div(items, int64_t{kWarps})), kThreads, 0,
             stream, p, features, items);
  Recurrence result = p;
  result.q = {features, p.steps * row, row, p.key_width};
  result.k = {features + count, p.steps * row, row, p.key_width};
  return result;
}

// Calls f with the update of a call.
template <class F>
void with_update(const Recurrence& p, const F& f) {
  if (p.a.data != nullptr) return f.template operator()<Update::low_rank>();
  if (p.bonus != nullptr) return f.template operator()<Update::bonus>();
  if (is_linear(p)) return f.template operator()<Update::linear>();
  f.template operator()<Update::value>();
}

}  // namespace
}  // namespace omniattn
