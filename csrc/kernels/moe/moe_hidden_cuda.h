// Step between the two products of an expert, see moe.h: gate and up of features, and h.
#pragma once

#include "kernels/moe/moe.h"
#include "runtime/gpu_row.h"

namespace omniattn::gpu {

template <class C, int W>
struct GateAndUp {
  Pack<C, W> gate, up;
};
// W adjacent elements of `from` at a feature; `jump` is the distance from a gate to its up.
template <int W, class T>
__device__ __forceinline__ GateAndUp<compute_t<T>, W> load_features(MoeGate gate, const T* from,
                                                                    int64_t feature, int64_t jump) {
  GateAndUp<compute_t<T>, W> x{};
  if (gate == MoeGate::interleaved) {
    const auto low = load<W>(from + 2 * feature), high = load<W>(from + 2 * feature + W);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const int even = 2 * j;
      x.gate.v[j] = even < W ? low[even % W] : high[even % W];
      x.up.v[j] = even + 1 < W ? low[(even + 1) % W] : high[(even + 1) % W];
    }
    return x;
  }
  const auto first = load<W>(from + feature);
#pragma unroll
  for (int j = 0; j < W; ++j) x.gate.v[j] = first[j];
  if (gate == MoeGate::none) return x;
  const auto second = load<W>(from + feature + jump);
#pragma unroll
  for (int j = 0; j < W; ++j) x.up.v[j] = second[j];
  return x;
}

template <int W, class T>
__device__ __forceinline__ void store_features(MoeGate gate, const GateAndUp<compute_t<T>, W>& x,
                                               T* to, int64_t feature, int64_t jump) {
  Pack<T, W> first, second;
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (gate == MoeGate::interleaved) {
      (2 * j < W ? first : second).v[2 * j % W] = gpu::narrow<T>(x.gate[j]);
      (2 * j + 1 < W ? first : second).v[(2 * j + 1) % W] = gpu::narrow<T>(x.up[j]);
    } else {
      first.v[j] = gpu::narrow<T>(x.gate[j]);
      second.v[j] = gpu::narrow<T>(x.up[j]);
    }
  }
  if (gate == MoeGate::interleaved) {
    store(to + 2 * feature, first);
    store(to + 2 * feature + W, second);
  } else {
    store(to + feature, first);
    if (gate == MoeGate::halves) store(to + feature + jump, second);
  }
}

// h and its derivatives. Without a gate, the activation applies to `gate` and there is no up.
template <class C>
__device__ __forceinline__ Gated<C> hidden_value(const MoeHidden& p, C gate, C up) {
  if (p.clamp.limit > 0) return ClampedProduct<C>(p.clamp)(gate, up);
  const auto act = activate(p.act, gate);
  if (p.gate == MoeGate::none) return {act.value, act.slope, C(0)};
  return {act.value * up, act.slope * up, act.value};
}

}  // namespace omniattn::gpu
