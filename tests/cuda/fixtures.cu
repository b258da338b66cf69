// Kernels that test the emulator: each is right with broken = false, and has one classic mistake
// with broken = true. test_emulator.py looks for the marks "at: <mistake>" to know the line that
// the report must name. On a GPU the right ones test the wrappers of runtime/gpu.h (test_gpu.py).
#include "runtime/gpu.h"

#include <cstring>
#include <string>

namespace omniattn {
namespace {

constexpr int kThreads = 128;

// out = in reversed, as the mean of three rounds through the same buffer.
__global__ void __launch_bounds__(kThreads)
    reverse_kernel(const float* in, float* out, bool broken) {
  GPU_SHARED(float, buffer, kThreads);
  const int t = threadIdx.x;
  float sum = 0;
  for (int round = -1; round <= 1; ++round) {
    buffer[t] = in[t] + static_cast<float>(round);  // at: dropped barrier
    __syncthreads();
    sum += buffer[kThreads - 1 - t];
    if (!broken) __syncthreads();
  }
  out[t] = sum / 3;
}

// Reversal through a double buffer that cp.async fills one tile ahead.
__global__ void __launch_bounds__(kThreads)
    pipeline_kernel(const float* in, float* out, bool broken) {
  float* const buffer = gpu::dynamic_shared<float>();
  const int t = threadIdx.x;
  constexpr int kVectors = kThreads / 4;
  const auto load = [&](int tile) {
    if (t < kVectors) {
      gpu::cp_async_16(buffer + (tile % 2) * kThreads + 4 * t, in + 4 * t);
    }
    gpu::cp_async_commit();
  };
  load(0);
  for (int tile = 0; tile < 4; ++tile) {
    load(tile + 1);
    if (broken) {
      gpu::cp_async_wait<2>();
    } else {
      gpu::cp_async_wait<1>();
    }
    __syncthreads();
    out[t] = buffer[(tile % 2) * kThreads + kThreads - 1 - t];  // at: weakened wait
    __syncthreads();
  }
  gpu::cp_async_wait<0>();
}

// Neighbors of a warp exchange through shared memory.
__global__ void __launch_bounds__(kThreads)
    exchange_kernel(const float* in, float* out, bool broken) {
  GPU_SHARED(float, buffer, kThreads);
  const int t = threadIdx.x;
  buffer[t] = in[t];
  if (!broken) __syncwarp();
  out[t] = buffer[t ^ 1];  // at: missing syncwarp
}

// Warp 0 hands a value to warps 1 to 3 through a named barrier.
__global__ void __launch_bounds__(kThreads)
    handover_kernel(const float* in, float* out, bool broken) {
  GPU_SHARED(float, buffer, 32);
  const int t = threadIdx.x;
  if (t < 32) {
    buffer[t] = in[t];
    gpu::barrier_arrive(1, kThreads);  // at: wrong count
    out[t] = in[t];
  } else {
    gpu::barrier_sync(1, broken ? kThreads - 32 : kThreads);
    out[t] = buffer[t % 32];  // at: wrong count
  }
}

// A count that never arrives.
__global__ void __launch_bounds__(kThreads)
    starve_kernel(const float* in, float* out, bool broken) {
  gpu::barrier_sync(2, broken ? 2 * kThreads : kThreads);  // at: deadlock
  out[threadIdx.x] = in[threadIdx.x];
}

__global__ void __launch_bounds__(kThreads)
    dynamic_bounds_kernel(const float* in, float* out, bool broken) {
  float* const buffer = gpu::dynamic_shared<float>();  // 2 * kThreads elements
  const int t = threadIdx.x;
  buffer[t + (broken ? kThreads + 1 : kThreads)] = in[t];  // at: dynamic bounds
  out[t] = in[t];
}

__global__ void __launch_bounds__(kThreads)
    static_bounds_kernel(const float* in, float* out, bool broken) {
  GPU_SHARED(float, buffer, kThreads);
  const int t = threadIdx.x;
  out[t] = in[t];
  buffer[t] = in[t];
  if (broken) out[t] = buffer[t + 32 * 32];  // at: static bounds
}

__global__ void __launch_bounds__(kThreads)
    global_bounds_kernel(const float* in, float* out, bool broken) {
  out[threadIdx.x] = in[threadIdx.x + (broken ? 1 << 30 : 0)];  // at: global bounds
}

__global__ void __launch_bounds__(kThreads)
    divergent_kernel(const float* in, float* out, bool broken) {
  const int t = threadIdx.x;
  if (broken && t < 64) {
    out[t] = in[t];
    __syncthreads();  // at: divergent barrier
  } else {
    out[t] = in[t];
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads)
    early_exit_kernel(const float* in, float* out, bool broken) {
  const int t = threadIdx.x;
  out[t] = in[t];
  if (broken && t >= 64) return;
  __syncthreads();  // at: early exit
}

__global__ void __launch_bounds__(kThreads)
    shuffle_kernel(const float* in, float* out, bool broken) {
  const int t = threadIdx.x;
  out[t] = in[t];
  if (broken && t % 2 == 0) return;
  out[t] = __shfl_xor_sync(0xffffffffu, in[t], 1);  // at: divergent shuffle
}

__global__ void __launch_bounds__(kThreads)
    pending_copy_kernel(const float* in, float* out, bool broken) {
  float* const buffer = gpu::dynamic_shared<float>();
  const int t = threadIdx.x;
  if (t < kThreads / 4) gpu::cp_async_16(buffer + 4 * t, in + 4 * t);  // at: pending copy
  gpu::cp_async_commit();
  if (!broken) gpu::cp_async_wait<0>();
  out[t] = in[t];
}

__global__ void __launch_bounds__(kThreads)
    vector_store_kernel(const float* in, float* out, bool broken) {
  struct Four {
    float v[4];
  };
  const int t = 4 * threadIdx.x;
  if (t >= kThreads) return;
  const auto x = __builtin_bit_cast(uint4, Four{in[t], in[t + 1], in[t + 2], in[t + 3]});
  gpu::store_16(out + t + (broken ? 1 : 0), x);  // at: unaligned store
}

__global__ void __launch_bounds__(kThreads)
    uninitialised_kernel(const float* in, float* out, bool broken) {
  GPU_SHARED(float, buffer, kThreads);
  const int t = threadIdx.x;
  if (!broken || t != 5) buffer[t] = in[t];
  __syncthreads();
  out[t] = buffer[t];  // at: uninitialised
}

// Warp 7 overwrites what all eight warps read, having met warps 4 to 6 only.
constexpr int kManyThreads = 256;
__global__ void __launch_bounds__(kManyThreads)
    many_readers_kernel(const float* in, float* out, bool broken) {
  GPU_SHARED(float, buffer, 32);
  const int t = threadIdx.x, warp = t / 32, lane = t % 32;
  if (warp == 7) buffer[lane] = in[lane];
  __syncthreads();
  const float x = buffer[lane];  // at: forgotten reader
  if (broken) {
    if (warp >= 4) gpu::barrier_sync(1, kManyThreads / 2);
  } else {
    __syncthreads();
  }
  if (warp == 7) buffer[lane] = -1;  // at: forgotten reader
  if (warp < 4) out[t] = x;
}

struct Fixture {
  const char* name;
  void (*kernel)(const float* in, float* out, bool broken);
  int threads = kThreads;
};
constexpr Fixture kFixtures[] = {
    {"reverse", reverse_kernel},
    {"pipeline", pipeline_kernel},
    {"exchange", exchange_kernel},
    {"handover", handover_kernel},
    {"starve", starve_kernel},
    {"dynamic_bounds", dynamic_bounds_kernel},
    {"static_bounds", static_bounds_kernel},
    {"global_bounds", global_bounds_kernel},
    {"divergent", divergent_kernel},
    {"early_exit", early_exit_kernel},
    {"shuffle", shuffle_kernel},
    {"pending_copy", pending_copy_kernel},
    {"vector_store", vector_store_kernel},
    {"uninitialised", uninitialised_kernel},
    {"many_readers", many_readers_kernel, kManyThreads},
};

// One warp: c (16, 8) = a (16, K) b (K, 8), row-major. Half operands come through ldmatrix.
template <class T>
__global__ void __launch_bounds__(32) matmul_half_kernel(const T* a, const T* b, float* c) {
  GPU_SHARED(T, shared_a, 16 * 16);
  GPU_SHARED(T, shared_b, 16 * 16);  // two blocks of 8 columns
  const int lane = threadIdx.x;
  for (int i = lane; i < 16 * 16; i += 32) {
    shared_a[i] = a[i];
    shared_b[i] = b[i];
  }
  __syncwarp();
  uint32_t fa[4], fb[4];
  gpu::ldmatrix_x4(fa, shared_a + (lane % 16) * 16 + lane / 16 * 8);
  gpu::ldmatrix_x4_trans(fb, shared_b + (lane % 16) * 16 + lane / 16 * 8);
  for (int half = 0; half < 2; ++half) {
    float d[4] = {0, 0, 0, 0};
    const uint32_t operand[2] = {fb[2 * half], fb[2 * half + 1]};
    if (TypeTraits<T>::kDType == DType::bf16) {
      gpu::mma_bf16(d, fa, operand);
    } else {
      gpu::mma_f16(d, fa, operand);
    }
    for (int i = 0; i < 4; ++i) {
      c[(lane / 4 + 8 * (i / 2)) * 16 + 8 * half + 2 * (lane % 4) + i % 2] = d[i];
    }
  }
}

__global__ void __launch_bounds__(32) matmul_tf32_kernel(const float* a, const float* b, float* c) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const uint32_t fa[4] = {gpu::to_tf32(a[g * 8 + t]), gpu::to_tf32(a[(g + 8) * 8 + t]),
                          gpu::to_tf32(a[g * 8 + t + 4]), gpu::to_tf32(a[(g + 8) * 8 + t + 4])};
  const uint32_t fb[2] = {gpu::to_tf32(b[t * 8 + g]), gpu::to_tf32(b[(t + 4) * 8 + g])};
  float d[4] = {0, 0, 0, 0};
  gpu::mma_tf32(d, fa, fb);
  for (int i = 0; i < 4; ++i) c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = d[i];
}

// "" or the error of the launch, valid until the next call.
#if defined(__CUDACC__)
void set_order(int) {}  // the GPU has its own

template <class F>
const char* guarded(const F& f) {
  f();
  const cudaError_t launched = cudaGetLastError(), finished = cudaDeviceSynchronize();
  const cudaError_t error = launched != cudaSuccess ? launched : finished;
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}
#else
void set_order(int order) { emulator::schedule = {static_cast<emulator::Order>(order), 1}; }

template <class F>
const char* guarded(const F& f) {
  static std::string message;
  message.clear();
  try {
    f();
  } catch (const emulator::Error& error) {
    message = error.what();
  }
  return message.c_str();
}
#endif

}  // namespace
}  // namespace omniattn

#define OMNIATTN_EXPORT extern "C" __attribute__((visibility("default")))

// in and out have 128 elements.
OMNIATTN_EXPORT const char* run_fixture(const char* name, bool broken, int order, const float* in,
                                        float* out) {
  using namespace omniattn;
  set_order(order);
  for (const Fixture& fixture : kFixtures) {
    if (std::strcmp(fixture.name, name) != 0) continue;
    return guarded([&] {
      GPU_LAUNCH(fixture.kernel, 1, fixture.threads, 2 * kThreads * sizeof(float), nullptr, in, out,
                 broken);
    });
  }
  return "no such fixture";
}

OMNIATTN_EXPORT const char* run_matmul(const char* type, const void* a, const void* b, float* c) {
  using namespace omniattn;
  const std::string name = type;
  return guarded([&] {
    if (name == "tf32") {
      GPU_LAUNCH(matmul_tf32_kernel, 1, 32, 0, nullptr, static_cast<const float*>(a),
                 static_cast<const float*>(b), c);
    } else if (name == "bf16") {
      GPU_LAUNCH(matmul_half_kernel<bf16>, 1, 32, 0, nullptr, static_cast<const bf16*>(a),
                 static_cast<const bf16*>(b), c);
    } else {
      GPU_LAUNCH(matmul_half_kernel<f16>, 1, 32, 0, nullptr, static_cast<const f16*>(a),
                 static_cast<const f16*>(b), c);
    }
  });
}
