// Kernels whose machine code test_build.py counts.
#include "runtime/gpu_mma.h"
#include "runtime/gpu_row.h"

namespace omniattn {

// Stores of 16 bytes, four per thread, in four parts each if kSplit.
template <bool kSplit>
__global__ void __launch_bounds__(128) store_kernel(const bf16* x, bf16* y, float factor) {
  const int i = 32 * static_cast<int>(threadIdx.x);
#pragma unroll
  for (int part = 0; part < 32; part += 8) {
    auto pack = gpu::load<8>(x + i + part);
#pragma unroll
    for (int j = 0; j < 8; ++j) pack.v[j] = gpu::narrow<bf16>(pack[j] * factor);
    if constexpr (kSplit) {
      const auto whole = __builtin_bit_cast(uint4, pack);
      volatile uint32_t* const words = reinterpret_cast<uint32_t*>(y + i + part);
      words[0] = whole.x;
      words[1] = whole.y;
      words[2] = whole.z;
      words[3] = whole.w;
    } else {
      gpu::store(y + i + part, pack);
    }
  }
}
template __global__ void store_kernel<true>(const bf16*, bf16*, float);
template __global__ void store_kernel<false>(const bf16*, bf16*, float);

// Eight products per tile. Every tenth tile is weighted by kWeights numbers in local memory.
__global__ void __launch_bounds__(32) tile_kernel(const uint4* x, float* y, int tiles) {
  constexpr int kWeights = 64;
  float acc[8][4], weights[kWeights];
  gpu::clear(acc);
  for (int i = 0; i < kWeights; ++i) weights[i] = y[i];
  for (int tile = 0; tile < tiles; ++tile) {
    const uint4 v = x[32 * tile + gpu::lane_id()];
    const uint32_t a[4] = {v.x, v.y, v.z, v.w}, b[2] = {v.x, v.z};
#pragma unroll
    for (int n = 0; n < 8; ++n) gpu::mma<bf16>(acc[n], a, b);
    if (tile % 10 == 9) {
#pragma unroll 1
      for (int i = 0; i < 100; ++i) acc[0][0] *= weights[(tile + i) % kWeights];
    }
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) y[32 * n + gpu::lane_id()] = acc[n][0] + acc[n][1];
}

}  // namespace omniattn
