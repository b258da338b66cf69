// OMNIATTN_FN marks the functions of semantics/ and other scalar helpers that objects built with
// different instruction-set flags share. They are constexpr, callable from CUDA kernels and always
// inlined: the linker would keep one out-of-line copy for all objects, perhaps with instructions
// that the machine lacks. OMNIATTN_LAMBDA, after the parameters of a lambda, inlines the lambda
// inside such a function.
#pragma once

// Unreachable: ends the process, or traps in a kernel. semantics/ cannot print, so there is no
// message.
#if defined(__CUDA_ARCH__)
#define OMNIATTN_UNREACHABLE() \
  {                            \
    __trap();                  \
    __builtin_unreachable();   \
  }
#else
#define OMNIATTN_UNREACHABLE() \
  {                            \
    __builtin_trap();          \
    __builtin_unreachable();   \
  }
#endif

#if defined(__CUDACC__)
#define OMNIATTN_FN __host__ __device__ __forceinline__ constexpr
#define OMNIATTN_LAMBDA
#else
#define OMNIATTN_FN [[gnu::always_inline]] inline constexpr
#define OMNIATTN_LAMBDA __attribute__((always_inline))
#endif
