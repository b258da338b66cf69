// All instruction sets that kernels are compiled for, in one table. cmake/isa.cmake reads names,
// operands and extensions from it.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"

// level(name, operands, present): slowest first; a level includes the extensions of all before it.
//
// operands  the types multiplied in their storage format. A level with f32 has all kernels, for
//           every dtype but f64 (see kF64Level), and widens the other 16-bit types. A level without
//           f32 has products of its types only; everything else runs on the level before it.
// present   true if the machine has it; HAS(x) names the extension of the compiler option -mx,
//           TILES(x) one whose registers the system grants to a process on request (cpu_isa.cpp),
//           whose instructions tiles.h writes as assembly, since not every compiler has them.
// clang-format off
#define OMNIATTN_PORTABLE_ISAS(level, ...) level(baseline, f64 | f32, true, __VA_ARGS__)
#define OMNIATTN_X86_ISAS(level, ...)                                                            \
  level(avx2, f64 | f32, HAS(avx2) && HAS(fma) && HAS(f16c), __VA_ARGS__)                        \
  level(avx512, f64 | f32, HAS(avx512f) && HAS(avx512bw) && HAS(avx512vl) && HAS(avx512dq),      \
        __VA_ARGS__)                                                                             \
  level(avx512_bf16, bf16, HAS(avx512bf16), __VA_ARGS__)                                         \
  level(amx_bf16, bf16, TILES(amx-tile) && TILES(amx-bf16), __VA_ARGS__)                         \
  level(amx_fp16, f16, TILES(amx-fp16), __VA_ARGS__)
// clang-format on

// All levels, and the levels of this architecture.
#define OMNIATTN_ISAS(...) OMNIATTN_PORTABLE_ISAS(__VA_ARGS__) OMNIATTN_X86_ISAS(__VA_ARGS__)
#if defined(__x86_64__)
#define OMNIATTN_ARCH_ISAS(...) OMNIATTN_ISAS(__VA_ARGS__)
#else
#define OMNIATTN_ARCH_ISAS(...) OMNIATTN_PORTABLE_ISAS(__VA_ARGS__)
#endif

namespace omniattn {

#define OMNIATTN_NAME(name, ...) name,
enum class Isa : int32_t { OMNIATTN_ISAS(OMNIATTN_NAME) };
#undef OMNIATTN_NAME

#define OMNIATTN_COUNT(...) +1
inline constexpr int32_t kIsaCount = OMNIATTN_ISAS(OMNIATTN_COUNT);
#undef OMNIATTN_COUNT

// True if the level multiplies the type in its storage format.
OMNIATTN_FN bool multiplies(Isa isa, DType dtype) {
  enum : uint32_t {
    f64 = 1u << static_cast<int>(DType::f64),
    f32 = 1u << static_cast<int>(DType::f32),
    bf16 = 1u << static_cast<int>(DType::bf16),
    f16 = 1u << static_cast<int>(DType::f16),
  };
  uint32_t types = 0;
  switch (isa) {
#define OMNIATTN_OPERANDS(name, operands, ...) \
  case Isa::name:                              \
    types = operands;                          \
    break;
    OMNIATTN_ISAS(OMNIATTN_OPERANDS)
#undef OMNIATTN_OPERANDS
  }
  return (types >> static_cast<int>(dtype) & 1) != 0;
}

// True if the level multiplies in tile registers (runtime/tiles.h).
OMNIATTN_FN bool multiplies_on_tiles(Isa isa) {
  return isa == Isa::amx_bf16 || isa == Isa::amx_fp16;
}

// Levels of this build, one bit each. cmake/isa.cmake defines OMNIATTN_LEVELS where it omits some.
#if !defined(OMNIATTN_LEVELS)
#define OMNIATTN_LEVELS (1u << kIsaCount) - 1
#endif
inline constexpr uint32_t kBuiltLevels = OMNIATTN_LEVELS;
OMNIATTN_FN bool is_built(Isa isa) { return (kBuiltLevels >> static_cast<int>(isa) & 1) != 0; }

// True if the level has all kernels.
OMNIATTN_FN bool has_all_kernels(Isa isa) { return multiplies(isa, DType::f32); }

// The only level with kernels for f64, which users compare with rather than train in: the slowest
// one of the build, since each machine that the build runs on has it. On every further level these
// kernels would take a third of its size and of its compilation.
inline constexpr Isa kF64Level = static_cast<Isa>(__builtin_ctz(kBuiltLevels));
// True if the level has kernels for the dtype: all of them, or its products.
OMNIATTN_FN bool has_kernels_for(Isa isa, DType dtype) {
  if (!has_all_kernels(isa)) return multiplies(isa, dtype);
  return dtype != DType::f64 || isa == kF64Level;
}

// Namespaces that kernels are compiled into (OMNIATTN_ISA), each with its level. The _emulated and
// _portable ones exist in tests only: they run a level's kernels with the instructions of avx512
// and of avx2.
#define OMNIATTN_NAMESPACES(name, ...) \
  namespace isa_##name {               \
    constexpr Isa kIsa = Isa::name;    \
  }                                    \
  namespace isa_##name##_emulated {    \
    constexpr Isa kIsa = Isa::name;    \
  }                                    \
  namespace isa_##name##_portable {    \
    constexpr Isa kIsa = Isa::name;    \
  }
OMNIATTN_ISAS(OMNIATTN_NAMESPACES)
#undef OMNIATTN_NAMESPACES

}  // namespace omniattn
