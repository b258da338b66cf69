// Which instruction set the kernels run on, and the selection of a kernel table by it.
//
// Kernel sources are compiled once per ISA (cmake/isa.cmake). Each compilation of a family defines
// one table of function pointers in its namespace; OMNIATTN_KERNEL_TABLE declares them all and a
// selector. For avx512_bf16 only the families of OMNIATTN_DOT_KERNEL_TABLE are compiled, and of
// these only what multiplies bf16 (runtime/dispatch.h): all else runs as avx512 there. The active
// ISA is the best of the machine, capped by OMNIATTN_CPU_ISA, and can be lowered at run time by
// tests.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"

namespace omniattn {

enum class Isa : int32_t { baseline = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };
inline constexpr int32_t kIsaCount = 4;

// Best ISA of this machine among those this binary was built with.
Isa detected_isa();
// The ISA that kernels run on now.
Isa active_isa();
// Sets the active ISA; false, and no change, if the machine lacks it.
bool set_active_isa(Isa isa);

const char* isa_name(Isa isa);
// Parses a name given by isa_name; false if there is none such.
bool parse_isa(const char* name, Isa& isa);

}  // namespace omniattn

#if defined(__x86_64__)
#define OMNIATTN_TABLES(Type, name)                         \
  namespace isa_baseline {                                  \
  extern const Type name##_table;                           \
  }                                                         \
  namespace isa_avx2 {                                      \
  extern const Type name##_table;                           \
  }                                                         \
  namespace isa_avx512 {                                    \
  extern const Type name##_table;                           \
  }                                                         \
  inline const Type& name##_until_avx512(Isa isa) {         \
    return isa >= Isa::avx512 ? isa_avx512::name##_table    \
           : isa == Isa::avx2 ? isa_avx2::name##_table      \
                              : isa_baseline::name##_table; \
  }
#define OMNIATTN_KERNEL_TABLE(Type, name) \
  OMNIATTN_TABLES(Type, name)             \
  inline const Type& name() { return name##_until_avx512(active_isa()); }
// Of a family that has products of factors of one dtype.
#define OMNIATTN_DOT_KERNEL_TABLE(Type, name)                                                \
  OMNIATTN_TABLES(Type, name)                                                                \
  namespace isa_avx512_bf16 {                                                                \
  extern const Type name##_table;                                                            \
  }                                                                                          \
  inline const Type& name(DType factors) {                                                   \
    const Isa isa = active_isa();                                                            \
    return isa == Isa::avx512_bf16 && factors == DType::bf16 ? isa_avx512_bf16::name##_table \
                                                             : name##_until_avx512(isa);     \
  }
#else
#define OMNIATTN_KERNEL_TABLE(Type, name) \
  namespace isa_baseline {                \
  extern const Type name##_table;         \
  }                                       \
  inline const Type& name() { return isa_baseline::name##_table; }
#define OMNIATTN_DOT_KERNEL_TABLE(Type, name) \
  namespace isa_baseline {                    \
  extern const Type name##_table;             \
  }                                           \
  inline const Type& name(DType) { return isa_baseline::name##_table; }
#endif
