// The function marker of semantics/ and of scalar helpers shared by objects built with different
// instruction-set flags: always inlined, so that no out-of-line copy built with one object's flags
// can be the one the linker keeps for all; constexpr; callable from CUDA kernels.
#pragma once

#if defined(__CUDACC__)
#define OMNIATTN_FN __host__ __device__ __forceinline__ constexpr
#else
#define OMNIATTN_FN [[gnu::always_inline]] inline constexpr
#endif
