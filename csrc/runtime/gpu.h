// The GPU features that CUDA kernels may use, as thin PTX wrappers; kernels include no other CUDA
// header. For tests, the emulator's header of the same name comes first in the include path and
// defines the same names for the CPU. PTX ISA 8.x, sm_80 and newer.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/stream.h"

// Declares static shared memory, always in this form; the array is aligned to 16 bytes.
#define GPU_SHARED(T, name, n) __shared__ __align__(16) T name[n]

// Declares a function that must not be inlined.
#define GPU_NOINLINE __device__ __noinline__ inline

// Enqueues a kernel; errors show in cudaGetLastError().
#define GPU_LAUNCH(kernel, grid, threads, shared_bytes, stream, ...)            \
  do {                                                                          \
    if ((shared_bytes) > (48u << 10)) {                                         \
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, \
                           static_cast<int>(shared_bytes));                     \
    }                                                                           \
    kernel<<<(grid), (threads), (shared_bytes), (stream)>>>(__VA_ARGS__);       \
  } while (false)

// Stops the kernel if `condition`, on values that only the GPU knows, is false. The message goes to
// stderr; torch raises "device-side assert triggered" at its next call that waits for the GPU, as
// for its own kernels. The process must be restarted to use the GPU.
extern "C" __host__ __device__ void __assert_fail(const char*, const char*, unsigned,
                                                  const char*) noexcept;
#define GPU_REQUIRE(condition, message)                                     \
  do {                                                                      \
    if (!(condition)) __assert_fail(message, __FILE__, __LINE__, __func__); \
  } while (false)

namespace omniattn::gpu {

template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// D (16 x 8, fp32) += A (16 x 16) B (16 x 8)
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// D (16 x 8, fp32) += A (16 x 8) B (8 x 8); operands come from to_tf32
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

// Loads four 8 x 8 matrices of 16-bit elements; lane l addresses row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Stores 16 bytes to global memory in one instruction. An assignment of a uint4 that was packed
// from narrower values becomes four instructions.
__device__ __forceinline__ void store_16(void* global, const uint4& x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(global)),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// Copies 16 bytes from global to shared memory, or writes zeros if not `valid` (even then the
// address must be legal).
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kPending groups of this thread are unfinished.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Named barriers: `count` threads arrive at barrier `id`; those that sync wait for all of them.
__device__ __forceinline__ void barrier_sync(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int count) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// Takes one instruction instead of the bit operations of runtime/dtype.h; NaNs lose their payload.
template <class T>
__device__ __forceinline__ compute_t<T> widen(T x) {
  if constexpr (TypeTraits<T>::kDType == DType::f16) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
  } else {
    return omniattn::widen(x);
  }
}
template <class T>
__device__ __forceinline__ T narrow(compute_t<T> x) {
  if constexpr (TypeTraits<T>::kDType == DType::f16) {
    T y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  } else if constexpr (TypeTraits<T>::kDType == DType::bf16) {
    T y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  } else {
    return x;
  }
}

// Hides the origin of x from the compiler, so that it does not compute expressions of x ahead of a
// loop and keep them in registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Packs two elements into one register.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t y;
  if constexpr (TypeTraits<T>::kDType == DType::f16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  } else {
    static_assert(TypeTraits<T>::kDType == DType::bf16);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  }
  return y;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Bytes of shared memory that one block can have on the current GPU.
inline int64_t shared_memory_limit() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}

inline Status launch_status() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace omniattn::gpu
