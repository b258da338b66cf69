// The instruction set that kernels run on, and the kernel tables chosen by it.
//
// Kernel sources are compiled once per level of runtime/isa.h. Each compilation of a family defines
// one table of function pointers in its namespace; OMNIATTN_KERNEL_TABLE declares all of them and a
// selector. The active ISA is the best one of the machine, capped by OMNIATTN_CPU_ISA; tests can
// lower it at run time.
#pragma once

#include "runtime/isa.h"

namespace omniattn {

// ISAs of this machine that this binary was built with, up to `isa`, one bit each. There may be
// gaps: levels that were not built, or that the machine lacks below an emulated one (tests).
uint32_t levels_up_to(Isa isa);
bool has_isa(Isa isa);
// True if the machine has a built level. If it has none, no function below may be called.
bool has_any_isa();
Isa detected_isa();  // the highest of them
// The ISA that kernels run on now.
Isa active_isa();
// Sets the active ISA. Returns false and changes nothing if the machine lacks it.
bool set_active_isa(Isa isa);

const char* isa_name(Isa isa);
// Parses a name as isa_name writes it; false if there is no such ISA.
bool parse_isa(const char* name, Isa& isa);

// State of the AMX tile registers: 0 if the system has granted them, its errno if it refused, or
// one of these constants.
inline constexpr int32_t kNoTiles = -1;           // the processor or the system has none
inline constexpr int32_t kTilesNotAskedFor = -2;  // OMNIATTN_CPU_ISA is below the levels of tiles
int32_t tile_state();

}  // namespace omniattn

#define OMNIATTN_DECLARE_TABLE(level, operands, present, Type, name) \
  namespace isa_##level {                                            \
    extern const Type name##_table;                                  \
  }                                                                  \
  namespace isa_##level##_emulated {                                 \
    extern const Type name##_table;                                  \
  }                                                                  \
  namespace isa_##level##_portable {                                 \
    extern const Type name##_table;                                  \
  }
#define OMNIATTN_CHOOSE_TABLE(level, operands, present, Type, name)    \
  if constexpr (is_built(Isa::level) && has_all_kernels(Isa::level)) { \
    if (OMNIATTN_HAS(level) && has_kernels_for(Isa::level, dtype)) {   \
      table = &isa_##level::name##_table;                              \
    }                                                                  \
  }
#define OMNIATTN_CHOOSE_PRODUCT_TABLE(level, operands, present, Type, name) \
  if constexpr (is_built(Isa::level)) {                                     \
    if (OMNIATTN_HAS(level) && has_kernels_for(Isa::level, factors)) {      \
      table = &isa_##level::name##_table;                                   \
    }                                                                       \
  }
#define OMNIATTN_CHOOSE_BF16_TILE_TABLE(level, operands, present, Type, name) \
  if constexpr (is_built(Isa::level) && multiplies_on_tiles(Isa::level) &&    \
                multiplies(Isa::level, DType::bf16)) {                        \
    if (OMNIATTN_HAS(level)) table = &isa_##level::name##_table;              \
  }
#define OMNIATTN_HAS(level) (levels >> static_cast<int32_t>(Isa::level) & 1) != 0

// name(dtype): the table of the active ISA, or of the one below it that has kernels for the dtype.
#define OMNIATTN_KERNEL_TABLE(Type, name)                 \
  OMNIATTN_ARCH_ISAS(OMNIATTN_DECLARE_TABLE, Type, name)  \
  inline const Type& name(DType dtype) {                  \
    const uint32_t levels = levels_up_to(active_isa());   \
    const Type* table = nullptr;                          \
    OMNIATTN_ARCH_ISAS(OMNIATTN_CHOOSE_TABLE, Type, name) \
    return *table;                                        \
  }
// name(factors), name_on(isa, factors): for a family that multiplies matrices of one dtype.
#define OMNIATTN_PRODUCT_KERNEL_TABLE(Type, name)                 \
  OMNIATTN_ARCH_ISAS(OMNIATTN_DECLARE_TABLE, Type, name)          \
  inline const Type& name##_on(Isa isa, DType factors) {          \
    const uint32_t levels = levels_up_to(isa);                    \
    const Type* table = nullptr;                                  \
    OMNIATTN_ARCH_ISAS(OMNIATTN_CHOOSE_PRODUCT_TABLE, Type, name) \
    return *table;                                                \
  }                                                               \
  inline const Type& name(DType factors) { return name##_on(active_isa(), factors); }
// name(): the table of kernels for levels with bf16 tiles; null where no such level is active.
#define OMNIATTN_BF16_TILE_KERNEL_TABLE(Type, name)                      \
  OMNIATTN_ARCH_ISAS(OMNIATTN_DECLARE_TABLE, Type, name)                 \
  inline const Type* name() {                                            \
    [[maybe_unused]] const uint32_t levels = levels_up_to(active_isa()); \
    const Type* table = nullptr;                                         \
    OMNIATTN_ARCH_ISAS(OMNIATTN_CHOOSE_BF16_TILE_TABLE, Type, name)      \
    return table;                                                        \
  }
