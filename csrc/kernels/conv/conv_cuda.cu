// Causal depthwise convolution on CUDA, see conv.h. For 16 bits, 2 to 4 taps and aligned rows, a
// thread has 16 bytes of adjacent channels and walks along the steps with the inputs of all taps in
// registers. For all else, it computes one channel of a row, and neighboring rows find their common
// inputs in L1. The backward writes g first and reads it for dx and for partial sums of dweight,
// which are then added in order, without atomics.
#include "kernels/conv/conv.h"

#include "kernels/sums/sums.h"
#include "runtime/dispatch.h"
#include "runtime/gpu_row.h"
#include "semantics/activation_rules.h"
#include "semantics/arith.h"
#include "semantics/packed_rows.h"

namespace omniattn {
namespace {

constexpr unsigned kThreads = 128;
// Enough shards to fill a GPU even if one warp covers all channels, with few
// rows each so that g stays in L2.
constexpr int64_t kMaxShards = 512, kShardRows = 32;

template <class T>
struct Conv {
  using C = compute_t<T>;

  const CausalConv& p;
  const ConvSequence& s;
  int64_t d;  // channel

  // Input at step t: a row of x, or of `before` if t < 0.
  __device__ __forceinline__ C input(int64_t t) const {
    const T* const at =
        t < 0 ? static_cast<const T*>(p.before) + s.n * p.before_batch +
                    (t + p.taps - 1) * p.before_row
              : static_cast<const T*>(p.x) + s.batch * p.x_batch + (s.row + t) * p.x_row;
    return gpu::widen(at[d]);
  }
  __device__ __forceinline__ C weight(int64_t k) const {
    return gpu::widen(static_cast<const T*>(p.weight)[k * p.channels + d]);
  }
  __device__ __forceinline__ ValueAndSlope<C> result(int64_t t) const {
    C sum = gpu::widen(static_cast<const T*>(p.bias)[d]);
    for (int64_t k = 0; k < p.taps; ++k) sum += weight(k) * input(t + k - p.taps + 1);
    return p.silu ? activation_rules::Silu::at(sum) : activation_rules::Identity::at(sum);
  }
};

// Calls f(item, channel) for the items of this thread; the grid covers the channels and loops over
// items.
template <class F>
__device__ __forceinline__ void for_items(int64_t items, int64_t channels, const F& f) {
  const int64_t d = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (d >= channels) return;
  for (int64_t item = blockIdx.y; item < items; item += gridDim.y) f(item, d);
}

__device__ __forceinline__ ConvSequence checked_sequence(const CausalConv& p, int64_t n) {
  const ConvSequence s = conv_sequence(p, n);
  GPU_REQUIRE(fits_rows(n, p.sequences, s.row, s.steps, p.steps),
              "causal_conv1d: cu_seqlens must grow from 0 to the number of rows");
  return s;
}
// Calls f(sequence, item's number in it) for an item that belongs to a sequence.
template <class F>
__device__ __forceinline__ void in_sequence(const CausalConv& p, int64_t item, int64_t extra,
                                            const F& f) {
  if (p.sequences == 0) return;
  const ConvSequence s = checked_sequence(p, conv_sequence_of(p, item, extra));
  const int64_t r = item - first_item(s, extra);
  if (r >= 0 && r < extra + s.steps) f(s, r);
}

// Row t of y, or of the final state if t >= T.
template <class T>
__device__ __forceinline__ void forward_row(const CausalConvParams& p, const ConvSequence& s,
                                            int64_t t, int64_t d) {
  const int64_t n = p.conv.channels, before = p.conv.taps - 1;
  const Conv<T> conv{p.conv, s, d};
  if (t < s.steps) {
    static_cast<T*>(p.y)[(s.first + t) * n + d] = gpu::narrow<T>(conv.result(t).value);
  } else {
    const int64_t at = (s.n * before + t - s.steps) * n + d;
    static_cast<T*>(p.final_state)[at] = gpu::narrow<T>(conv.input(t - before));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    causal_conv_forward_kernel(const __grid_constant__ CausalConvParams p) {
  const int64_t before = p.conv.taps - 1, items = conv_rows(p.conv) + p.conv.sequences * before;
  for_items(items, p.conv.channels, [&](int64_t item, int64_t d) {
    in_sequence(p.conv, item, before,
                [&](const ConvSequence& s, int64_t t) { forward_row<T>(p, s, t, d); });
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    causal_conv_slope_kernel(const __grid_constant__ CausalConvBackwardParams p, compute_t<T>* g) {
  const int64_t n = p.conv.channels;
  for_items(conv_rows(p.conv), n, [&](int64_t item, int64_t d) {
    in_sequence(p.conv, item, 0, [&](const ConvSequence& s, int64_t t) {
      const T* const grad_y =
          static_cast<const T*>(p.grad_y) + s.batch * p.grad_y_batch + s.row * p.grad_y_row;
      g[item * n + d] =
          gpu::widen(grad_y[t * p.grad_y_row + d]) * Conv<T>{p.conv, s, d}.result(t).slope;
    });
  });
}

// Gradient of row r of `before` and x together.
template <class T>
__device__ __forceinline__ void dx_row(const CausalConvBackwardParams& p, const compute_t<T>* g,
                                       const ConvSequence& s, int64_t r, int64_t d) {
  const int64_t n = p.conv.channels, before = p.conv.taps - 1;
  if (r < before && p.dbefore == nullptr) return;
  compute_t<T> sum = 0;
  if (p.grad_final != nullptr && r >= s.steps) {
    sum = gpu::widen(static_cast<const T*>(p.grad_final)[(s.n * before + r - s.steps) * n + d]);
  }
  for (int64_t k = 0; k <= before; ++k) {
    const int64_t t = r - k;
    if (t >= 0 && t < s.steps) sum += Conv<T>{p.conv, s, d}.weight(k) * g[(s.first + t) * n + d];
  }
  T* const out = r < before ? static_cast<T*>(p.dbefore) + (s.n * before + r) * n
                            : static_cast<T*>(p.dx) + (s.first + r - before) * n;
  out[d] = gpu::narrow<T>(sum);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    causal_conv_dx_kernel(const __grid_constant__ CausalConvBackwardParams p,
                          const compute_t<T>* g) {
  const int64_t before = p.conv.taps - 1, items = conv_rows(p.conv) + p.conv.sequences * before;
  for_items(items, p.conv.channels, [&](int64_t item, int64_t d) {
    in_sequence(p.conv, item, before,
                [&](const ConvSequence& s, int64_t r) { dx_row<T>(p, g, s, r, d); });
  });
}

// partial (shards, K + 1, D): dweight and, last, dbias of the steps of each shard.
template <class T>
__global__ void __launch_bounds__(kThreads)
    causal_conv_sums_kernel(const __grid_constant__ CausalConv p, const compute_t<T>* g,
                            int64_t shards, compute_t<T>* partial) {
  const int64_t n = p.channels, sums = p.taps + 1, all = conv_rows(p);
  for_items(shards * sums, n, [&](int64_t item, int64_t d) {
    const int64_t shard = item / sums, k = item - shard * sums;
    compute_t<T> sum = 0;
    for (int64_t row = all * shard / shards; row < all * (shard + 1) / shards; ++row) {
      in_sequence(p, row, 0, [&](const ConvSequence& s, int64_t t) {
        const compute_t<T> of_step = g[row * n + d];
        sum += k == p.taps ? of_step : of_step * Conv<T>{p, s, d}.input(t + k - p.taps + 1);
      });
    }
    partial[item * n + d] = sum;
  });
}

// Vectors of channels.

// Steps whose inputs a thread loads before it computes them.
constexpr int kBatch = 4;
// Steps of an item: many, so that its first inputs, which another item reads too, cost little, but
// few where items would not fill a GPU.
constexpr int64_t kFewSteps = 2 * kBatch, kMostSteps = 32, kManyWarps = 2048;
// A warp has 32 vectors of adjacent channels.
constexpr unsigned kWarps = kThreads / 32;

template <class T>
constexpr int kWidth = gpu::kVectorWidth<T>;

// Calls f(item, first channel of this thread).
template <int W, class F>
__device__ __forceinline__ void for_vectors(int64_t items, int64_t channels, const F& f) {
  const int64_t d = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * W;
  if (d >= channels) return;
  const int64_t step = static_cast<int64_t>(gridDim.y) * kWarps;
  for (int64_t item = static_cast<int64_t>(blockIdx.y) * kWarps + threadIdx.y; item < items;
       item += step) {
    f(item, d);
  }
}

template <class C, class T, int W>
__device__ __forceinline__ void widen_all(const gpu::Pack<T, W>& from, C (&to)[W]) {
#pragma unroll
  for (int j = 0; j < W; ++j) to[j] = from[j];
}
template <class T, class C, int W>
__device__ __forceinline__ void store_all(const C (&x)[W], T* to) {
  gpu::Pack<T, W> pack;
#pragma unroll
  for (int j = 0; j < W; ++j) pack.v[j] = gpu::narrow<T>(x[j]);
  gpu::store(to, pack);
}

// Calls f(s, t, x, y) for the rows begin, ..., end - 1 over all sequences, where row s.first + t
// has the kTaps vectors x[k] = fetch(s, t, k). fetch(s, t, k + 1) must be fetch(s, t + 1, k). y is
// load(s, t), which is called early.
template <class C, int W, int kTaps, class Fetch, class Load, class F>
__device__ __forceinline__ void walk(const CausalConv& p, int64_t begin, int64_t end,
                                     const Fetch& fetch, const Load& load, const F& f) {
  constexpr int kLast = kTaps - 1;
  int64_t row = begin;
  for (int64_t n = conv_sequence_of(p, begin, 0); row < end && n < p.sequences; ++n) {
    const ConvSequence s = checked_sequence(p, n);
    const int64_t first = row - s.first, stop = min(end - s.first, s.steps);
    if (first >= stop) continue;  // no steps
    C x[kLast + kBatch][W];
#pragma unroll
    for (int k = 0; k < kLast; ++k) widen_all(fetch(s, first, k), x[k]);
#pragma unroll 1
    for (int64_t t = first; t < stop; t += kBatch) {
      decltype(fetch(s, t, kLast)) loaded[kBatch];
      decltype(load(s, t)) others[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t at = min(t + i, stop - 1);
        loaded[i] = fetch(s, at, kLast);
        others[i] = load(s, at);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        widen_all(loaded[i], x[kLast + i]);
        if (t + i < stop) f(s, t + i, x + i, others[i]);
      }
#pragma unroll
      for (int k = 0; k < kLast; ++k) {
#pragma unroll
        for (int j = 0; j < W; ++j) x[k][j] = x[kBatch + k][j];
      }
    }
    row = s.first + stop;
  }
}

// Vectors of x or `before` for the taps of a step, for `walk`.
template <class T, int kTaps>
struct Inputs {
  const CausalConv& p;
  int64_t d;

  __device__ __forceinline__ gpu::Pack<T, kWidth<T>> operator()(const ConvSequence& s, int64_t t,
                                                                int k) const {
    const int64_t at = t + k - (kTaps - 1);
    const T* const row =
        k < kTaps - 1 && at < 0
            ? static_cast<const T*>(p.before) + s.n * p.before_batch +
                  (at + kTaps - 1) * p.before_row
            : static_cast<const T*>(p.x) + s.batch * p.x_batch + (s.row + at) * p.x_row;
    return gpu::load_constant<kWidth<T>>(row + d);
  }
};
struct Nothing {
  __device__ __forceinline__ Nothing operator()(const ConvSequence&, int64_t) const { return {}; }
};

// silu, by approximations that err by less than the rounding to 16 bits.
__device__ __forceinline__ ValueAndSlope<float> silu_approx(float x) {
  constexpr float kLog2E = 1.44269504f;
  const float e = gpu::exp2_approx(-kLog2E * x);
  const float s = __fdividef(1.0f, 1 + e);
  return {x * s, fma(x * s, 1 - s, s)};
}

// Weights and biases of a thread's channels.
template <class T, int kTaps>
struct Filter {
  static constexpr int W = kWidth<T>;
  using C = compute_t<T>;
  C weight[kTaps][W], bias[W];

  __device__ __forceinline__ Filter(const CausalConv& p, int64_t d) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      widen_all(gpu::load_constant<W>(static_cast<const T*>(p.weight) + k * p.channels + d),
                weight[k]);
    }
    widen_all(gpu::load_constant<W>(static_cast<const T*>(p.bias) + d), bias);
  }
  // out[j] = f(activation) of channel j.
  template <class F>
  __device__ __forceinline__ void apply(bool silu, const C (*x)[W], C (&out)[W], const F& f) const {
#pragma unroll
    for (int j = 0; j < W; ++j) {
      out[j] = bias[j];
#pragma unroll
      for (int k = 0; k < kTaps; ++k) out[j] += weight[k][j] * x[k][j];
    }
    if (silu) {
#pragma unroll
      for (int j = 0; j < W; ++j) out[j] = f(silu_approx(out[j]));
    } else {
#pragma unroll
      for (int j = 0; j < W; ++j) out[j] = f(activation_rules::Identity::at(out[j]));
    }
  }
};

template <class T, int kTaps>
__global__ void __launch_bounds__(kThreads)
    causal_conv_forward_vector_kernel(const __grid_constant__ CausalConvParams p, int64_t steps) {
  constexpr int W = kWidth<T>;
  using C = compute_t<T>;
  const CausalConv& c = p.conv;
  const int64_t rows = conv_rows(c), items = ceil_div(rows, steps);
  for_vectors<W>(items + c.sequences * (kTaps - 1), c.channels, [&](int64_t item, int64_t d) {
    if (item >= items) {
      const int64_t r = item - items;
      const ConvSequence s = checked_sequence(c, r / (kTaps - 1));
#pragma unroll 1
      for (int j = 0; j < W; ++j) forward_row<T>(p, s, s.steps + r % (kTaps - 1), d + j);
      return;
    }
    const Filter<T, kTaps> filter(c, d);
    walk<C, W, kTaps>(c, item * steps, min((item + 1) * steps, rows), Inputs<T, kTaps>{c, d},
                      Nothing{}, [&](const ConvSequence& s, int64_t t, const C(*x)[W], Nothing) {
                        C y[W];
                        filter.apply(c.silu, x, y, [](const auto& act) { return act.value; });
                        store_all(y, static_cast<T*>(p.y) + (s.first + t) * c.channels + d);
                      });
  });
}

template <class T, int kTaps>
__global__ void __launch_bounds__(kThreads)
    causal_conv_slope_vector_kernel(const __grid_constant__ CausalConvBackwardParams p,
                                    int64_t steps, compute_t<T>* g) {
  constexpr int W = kWidth<T>;
  using C = compute_t<T>;
  const CausalConv& c = p.conv;
  const int64_t rows = conv_rows(c);
  for_vectors<W>(ceil_div(rows, steps), c.channels, [&](int64_t item, int64_t d) {
    const Filter<T, kTaps> filter(c, d);
    const auto load = [&](const ConvSequence& s, int64_t t) {
      return gpu::load_constant<W>(static_cast<const T*>(p.grad_y) + s.batch * p.grad_y_batch +
                                   (s.row + t) * p.grad_y_row + d);
    };
    walk<C, W, kTaps>(
        c, item * steps, min((item + 1) * steps, rows), Inputs<T, kTaps>{c, d}, load,
        [&](const ConvSequence& s, int64_t t, const C(*x)[W], const gpu::Pack<T, W>& dy) {
          C y[W];
          filter.apply(c.silu, x, y, [](const auto& act) { return act.slope; });
#pragma unroll
          for (int j = 0; j < W; ++j) y[j] *= dy[j];
          store_all(y, g + (s.first + t) * c.channels + d);
        });
  });
}

template <class T, int kTaps>
__global__ void __launch_bounds__(kThreads, 1)
    causal_conv_dx_vector_kernel(const __grid_constant__ CausalConvBackwardParams p, int64_t steps,
                                 const compute_t<T>* g) {
  constexpr int W = kWidth<T>, kBefore = kTaps - 1;
  using C = compute_t<T>;
  const CausalConv& c = p.conv;
  const int64_t rows = conv_rows(c), items = ceil_div(rows, steps);
  for_vectors<W>(items + c.sequences * kBefore, c.channels, [&](int64_t item, int64_t d) {
    if (item >= items) {
      const int64_t r = item - items;
      const ConvSequence s = checked_sequence(c, r / kBefore);
#pragma unroll 1
      for (int j = 0; j < W; ++j) dx_row<T>(p, g, s, r % kBefore, d + j);
      return;
    }
    const Filter<T, kTaps> filter(c, d);
    // g of steps t, ..., t + K - 1, which tap K - 1, ..., 0 multiplies
    const auto fetch = [&](const ConvSequence& s, int64_t t, int k) {
      if (t + k >= s.steps) return gpu::Pack<C, W>{};
      return gpu::load_constant<W>(g + (s.first + t + k) * c.channels + d);
    };
    walk<C, W, kTaps>(c, item * steps, min((item + 1) * steps, rows), fetch, Nothing{},
                      [&](const ConvSequence& s, int64_t t, const C(*x)[W], Nothing) {
                        C sum[W] = {};
                        if (p.grad_final != nullptr && t + kBefore >= s.steps) {
                          const int64_t row = s.n * kBefore + t + kBefore - s.steps;
                          widen_all(gpu::load_constant<W>(static_cast<const T*>(p.grad_final) +
                                                          row * c.channels + d),
                                    sum);
                        }
#pragma unroll
                        for (int k = 0; k < kTaps; ++k) {
#pragma unroll
                          for (int j = 0; j < W; ++j)
                            sum[j] += filter.weight[k][j] * x[kBefore - k][j];
                        }
                        store_all(sum, static_cast<T*>(p.dx) + (s.first + t) * c.channels + d);
                      });
  });
}

template <class T, int kTaps>
__global__ void __launch_bounds__(kThreads)
    causal_conv_sums_vector_kernel(const __grid_constant__ CausalConv p, const compute_t<T>* g,
                                   int64_t shards, compute_t<T>* partial) {
  constexpr int W = kWidth<T>;
  using C = compute_t<T>;
  const int64_t rows = conv_rows(p);
  for_vectors<W>(shards, p.channels, [&](int64_t shard, int64_t d) {
    C sums[kTaps + 1][W] = {};
    const auto load = [&](const ConvSequence& s, int64_t t) {
      return gpu::load_constant<W>(g + (s.first + t) * p.channels + d);
    };
    walk<C, W, kTaps>(
        p, rows * shard / shards, rows * (shard + 1) / shards, Inputs<T, kTaps>{p, d}, load,
        [&](const ConvSequence&, int64_t, const C(*x)[W], const gpu::Pack<C, W>& of_step) {
#pragma unroll
          for (int j = 0; j < W; ++j) {
#pragma unroll
            for (int k = 0; k < kTaps; ++k) sums[k][j] += of_step[j] * x[k][j];
            sums[kTaps][j] += of_step[j];
          }
        });
#pragma unroll
    for (int k = 0; k <= kTaps; ++k) {
      store_all(sums[k], partial + (shard * (kTaps + 1) + k) * p.channels + d);
    }
  });
}

// Calls f(Taps<K>{}) and returns true if vectors of channels fit these rows.
template <int kTaps>
struct Taps {};
template <class T, class F>
bool with_vectors(const CausalConv& p, const F& f) {
  if constexpr (sizeof(T) == 2) {
    const auto fits = [](auto... strides) { return ((strides % kWidth<T> == 0) && ...); };
    const auto aligned = [](auto... pointers) { return (gpu::aligned_16(pointers) && ...); };
    if (fits(p.channels, p.x_batch, p.x_row, p.before_batch, p.before_row) &&
        aligned(p.x, p.before, p.weight, p.bias)) {
      if (p.taps == 2) f(Taps<2>{});
      if (p.taps == 3) f(Taps<3>{});
      if (p.taps == 4) f(Taps<4>{});
      return p.taps >= 2 && p.taps <= 4;
    }
  }
  return false;
}

constexpr int64_t kMaxGridY = 0xffff;
dim3 grid_of(int64_t rows, int64_t channels) {
  return dim3(static_cast<unsigned>(ceil_div(channels, kThreads)),
              static_cast<unsigned>(min(rows, kMaxGridY)));
}
template <class T>
dim3 vector_grid(int64_t items, int64_t channels) {
  return dim3(static_cast<unsigned>(ceil_div(channels, 32 * kWidth<T>)),
              static_cast<unsigned>(min(ceil_div(items, kWarps), kMaxGridY)));
}
constexpr dim3 kVectorBlock(32, kWarps);
template <class T>
int64_t item_steps(int64_t rows, int64_t channels) {
  const int64_t warps = ceil_div(channels, 32 * kWidth<T>);
  int64_t steps = kMostSteps;
  while (steps > kFewSteps && ceil_div(rows, steps) * warps < kManyWarps) steps /= 2;
  return steps;
}

template <class T>
void enqueue(const CausalConvParams& p, int64_t rows, int64_t states, Stream stream) {
  const int64_t n = p.conv.channels, steps = item_steps<T>(rows, n);
  const int64_t items = ceil_div(rows, steps) + states;
  const bool fits = gpu::aligned_16(p.y) && with_vectors<T>(p.conv, [&]<int kTaps>(Taps<kTaps>) {
                      GPU_LAUNCH((causal_conv_forward_vector_kernel<T, kTaps>),
                                 vector_grid<T>(items, n), kVectorBlock, 0, stream, p, steps);
                    });
  if (fits) return;
  GPU_LAUNCH(causal_conv_forward_kernel<T>, grid_of(rows + states, n), kThreads, 0, stream, p);
}

// `shards` is 0 if sums are not wanted.
template <class T>
void enqueue_backward(const CausalConvBackwardParams& p, int64_t rows, int64_t states,
                      int64_t shards, compute_t<T>* g, compute_t<T>* partial, Stream stream) {
  using C = compute_t<T>;
  const CausalConv& c = p.conv;
  const int64_t n = c.channels, steps = item_steps<T>(rows, n), items = ceil_div(rows, steps);
  const bool aligned = gpu::aligned_16(p.grad_y) && gpu::aligned_16(p.grad_final) &&
                       gpu::aligned_16(p.dx) && p.grad_y_batch % kWidth<T> == 0 &&
                       p.grad_y_row % kWidth<T> == 0;
  const bool fits =
      aligned && with_vectors<T>(c, [&]<int kTaps>(Taps<kTaps>) {
        const C* const known = g;
        if (rows > 0) {
          GPU_LAUNCH((causal_conv_slope_vector_kernel<T, kTaps>), vector_grid<T>(items, n),
                     kVectorBlock, 0, stream, p, steps, g);
        }
        GPU_LAUNCH((causal_conv_dx_vector_kernel<T, kTaps>), vector_grid<T>(items + states, n),
                   kVectorBlock, 0, stream, p, steps, known);
        if (shards > 0) {
          GPU_LAUNCH((causal_conv_sums_vector_kernel<T, kTaps>), vector_grid<T>(shards, n),
                     kVectorBlock, 0, stream, c, known, shards, partial);
        }
      });
  if (fits) return;
  const C* const known = g;
  if (rows > 0) {
    GPU_LAUNCH(causal_conv_slope_kernel<T>, grid_of(rows, n), kThreads, 0, stream, p, g);
  }
  GPU_LAUNCH(causal_conv_dx_kernel<T>, grid_of(rows + states, n), kThreads, 0, stream, p, known);
  if (shards > 0) {
    GPU_LAUNCH(causal_conv_sums_kernel<T>, grid_of(shards * (c.taps + 1), n), kThreads, 0, stream,
               c, known, shards, partial);
  }
}

}  // namespace

Status launch_causal_conv(const CausalConvParams& p, Stream stream) {
  const CausalConv& c = p.conv;
  const int64_t rows = conv_rows(c), states = c.sequences * (c.taps - 1);
  if (rows + states == 0 || c.channels == 0) return nullptr;
  dispatch(c.dtype, [&]<class T>(T) { enqueue<T>(p, rows, states, stream); });
  return gpu::launch_status();
}

int64_t causal_conv_shards(const CausalConv& p) {
  return min(ceil_div(conv_rows(p), kShardRows), kMaxShards);
}

Status launch_causal_conv_backward(const CausalConvBackwardParams& p,
                                   const CausalConvScratch& scratch, void* dweight, void* dbias,
                                   Stream stream) {
  const CausalConv& c = p.conv;
  const int64_t n = c.channels, rows = conv_rows(c), states = c.sequences * (c.taps - 1);
  const int64_t sums = c.taps + 1, shards = causal_conv_shards(c);
  const bool wanted = dweight != nullptr || dbias != nullptr;
  if (n == 0) return nullptr;
  dispatch(c.dtype, [&]<class T>(T) {
    using C = compute_t<T>;
    C* const partial = static_cast<C*>(scratch.partial);
    if (rows + states > 0) {
      enqueue_backward<T>(p, rows, states, wanted ? shards : 0, static_cast<C*>(scratch.g), partial,
                          stream);
    }
    launch_sum_shards(c.dtype, partial, shards, sums * n, c.taps * n, dweight, stream);
    launch_sum_shards(c.dtype, partial + c.taps * n, shards, sums * n, n, dbias, stream);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
