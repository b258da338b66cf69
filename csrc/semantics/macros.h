// The function marker of semantics/ and of scalar helpers shared by objects built with different
// instruction-set flags: always inlined, so that no out-of-line copy built with one object's flags
// can be the one the linker keeps for all; constexpr; callable from CUDA kernels.
// OMNIATTN_LAMBDA, after the parameters of a lambda, inlines one inside such a function.
#pragma once

#if defined(__CUDACC__)
#define OMNIATTN_FN __host__ __device__ __forceinline__ constexpr
#define OMNIATTN_LAMBDA
#else
#define OMNIATTN_FN [[gnu::always_inline]] inline constexpr
#define OMNIATTN_LAMBDA __attribute__((always_inline))
#endif
