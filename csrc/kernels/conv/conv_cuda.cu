// Causal depthwise convolution on CUDA, see conv.h. Each thread computes one channel of a row;
// neighboring rows find their common inputs in L1. The backward writes g first and reads it for dx
// and for partial sums of dweight, which are then added in order, without atomics.
#include "kernels/conv/conv.h"

#include "kernels/sums/sums.h"
#include "runtime/dispatch.h"
#include "runtime/gpu.h"
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

template <class T>
__global__ void __launch_bounds__(kThreads)
    causal_conv_forward_kernel(const __grid_constant__ CausalConvParams p) {
  const int64_t n = p.conv.channels, before = p.conv.taps - 1;
  for_items(conv_rows(p.conv) + p.conv.sequences * before, n, [&](int64_t item, int64_t d) {
    in_sequence(p.conv, item, before, [&](const ConvSequence& s, int64_t t) {
      const Conv<T> conv{p.conv, s, d};
      if (t < s.steps) {
        static_cast<T*>(p.y)[(s.first + t) * n + d] = gpu::narrow<T>(conv.result(t).value);
      } else {
        const int64_t at = (s.n * before + t - s.steps) * n + d;
        static_cast<T*>(p.final_state)[at] = gpu::narrow<T>(conv.input(t - before));
      }
    });
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

// Also computes the gradients of the rows `before`.
template <class T>
__global__ void __launch_bounds__(kThreads)
    causal_conv_dx_kernel(const __grid_constant__ CausalConvBackwardParams p,
                          const compute_t<T>* g) {
  const int64_t n = p.conv.channels, before = p.conv.taps - 1;
  for_items(conv_rows(p.conv) + p.conv.sequences * before, n, [&](int64_t item, int64_t d) {
    in_sequence(p.conv, item, before, [&](const ConvSequence& s, int64_t r) {
      if (r < before && p.dbefore == nullptr) return;
      compute_t<T> sum = 0;
      if (p.grad_final != nullptr && r >= s.steps) {
        sum = gpu::widen(static_cast<const T*>(p.grad_final)[(s.n * before + r - s.steps) * n + d]);
      }
      for (int64_t k = 0; k <= before; ++k) {
        const int64_t t = r - k;
        if (t >= 0 && t < s.steps) {
          sum += Conv<T>{p.conv, s, d}.weight(k) * g[(s.first + t) * n + d];
        }
      }
      T* const out = r < before ? static_cast<T*>(p.dbefore) + (s.n * before + r) * n
                                : static_cast<T*>(p.dx) + (s.first + r - before) * n;
      out[d] = gpu::narrow<T>(sum);
    });
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

dim3 grid_of(int64_t rows, int64_t channels) {
  constexpr int64_t kMaxGridY = 0xffff;
  return dim3(static_cast<unsigned>(ceil_div(channels, kThreads)),
              static_cast<unsigned>(min(rows, kMaxGridY)));
}

}  // namespace

Status launch_causal_conv(const CausalConvParams& p, Stream stream) {
  const CausalConv& c = p.conv;
  const int64_t rows = conv_rows(c) + c.sequences * (c.taps - 1);
  if (rows == 0 || c.channels == 0) return nullptr;
  dispatch(c.dtype, [&]<class T>(T) {
    GPU_LAUNCH(causal_conv_forward_kernel<T>, grid_of(rows, c.channels), kThreads, 0, stream, p);
  });
  return gpu::launch_status();
}

int64_t causal_conv_shards(const CausalConv& p) {
  return min(ceil_div(conv_rows(p), kShardRows), kMaxShards);
}

Status launch_causal_conv_backward(const CausalConvBackwardParams& p,
                                   const CausalConvScratch& scratch, void* dweight, void* dbias,
                                   Stream stream) {
  const CausalConv& c = p.conv;
  const int64_t n = c.channels, steps = conv_rows(c), rows = c.sequences * (c.taps - 1) + steps;
  const int64_t shards = causal_conv_shards(c), sums = c.taps + 1;
  if (n == 0) return nullptr;
  dispatch(c.dtype, [&]<class T>(T) {
    using C = compute_t<T>;
    C* const g = static_cast<C*>(scratch.g);
    C* const partial = static_cast<C*>(scratch.partial);
    if (steps > 0) {
      GPU_LAUNCH(causal_conv_slope_kernel<T>, grid_of(steps, n), kThreads, 0, stream, p, g);
    }
    if (rows > 0) {
      GPU_LAUNCH(causal_conv_dx_kernel<T>, grid_of(rows, n), kThreads, 0, stream, p,
                 static_cast<const C*>(g));
    }
    if ((dweight != nullptr || dbias != nullptr) && shards > 0) {
      GPU_LAUNCH(causal_conv_sums_kernel<T>, grid_of(shards * sums, n), kThreads, 0, stream, c,
                 static_cast<const C*>(g), shards, partial);
    }
    launch_sum_shards(c.dtype, partial, shards, sums * n, c.taps * n, dweight, stream);
    launch_sum_shards(c.dtype, partial + c.taps * n, shards, sums * n, n, dbias, stream);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
