#include "runtime/cpu_isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "runtime/machine.h"

namespace omniattn {
namespace {

#define OMNIATTN_NAME(name, ...) #name,
constexpr const char* kNames[kIsaCount] = {OMNIATTN_ISAS(OMNIATTN_NAME)};

constexpr uint32_t bit(Isa isa) { return 1u << static_cast<int32_t>(isa); }

// A library for tests may emulate the product-only levels, from one on, by the instructions of
// another level. The machine need not have them.
bool is_emulated([[maybe_unused]] Isa isa) {
#if defined(OMNIATTN_EMULATED_FROM)
  return !has_all_kernels(isa) && isa >= Isa::OMNIATTN_EMULATED_FROM;
#else
  return false;
#endif
}
bool can_emulate([[maybe_unused]] uint32_t bits) {
#if defined(OMNIATTN_EMULATED_FROM)
  return (bits & bit(Isa::OMNIATTN_EMULATED_BY)) != 0;
#else
  return false;
#endif
}

// The environment may lower the ISA, never raise it. An unknown name is reported by Python
// (config.py).
Isa cap() {
  Isa isa = static_cast<Isa>(kIsaCount - 1);
  const char* name = std::getenv("OMNIATTN_CPU_ISA");
  if (name != nullptr) parse_isa(name, isa);
  return isa;
}

// Requests the tiles of a level that the machine has: 0, an errno or kTilesNotAskedFor.
int32_t ask_for_tiles(Isa isa) {
  return isa > cap() ? kTilesNotAskedFor : Machine::request_tiles();
}

// Built levels of this machine, one bit each. Except emulated ones, a level needs a machine that
// has all levels before it.
struct Levels {
  uint32_t bits = 0;
  int32_t tiles = kNoTiles;

  Levels() {
#define HAS(extension) OMNIATTN_HAS_EXTENSION(#extension)
#define TILES(extension) Machine::has_tiles(#extension)
#define OMNIATTN_ADD(name, operands, present, ...) add(Isa::name, present);
    OMNIATTN_ARCH_ISAS(OMNIATTN_ADD)
  }

 private:
  bool complete_ = true;  // no earlier level was missing

  void add(Isa isa, bool present) {
    if (is_emulated(isa)) {
      if (can_emulate(bits)) bits |= bit(isa);
      return;
    }
    complete_ = complete_ && present;
    if (complete_ && is_built(isa) && multiplies_on_tiles(isa) && tiles != 0) {
      // One request covers all levels.
      tiles = ask_for_tiles(isa);
      complete_ = tiles == 0;
    }
    if (complete_ && is_built(isa)) bits |= bit(isa);
  }
};

const Levels& levels() {
  static const Levels found;
  return found;
}

Isa best_of(uint32_t bits) { return static_cast<Isa>(31 - __builtin_clz(bits)); }

std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{best_of(levels_up_to(cap()))};
  return isa;
}

}  // namespace

uint32_t levels_up_to(Isa isa) { return levels().bits & ((bit(isa) << 1) - 1); }

bool has_any_isa() { return levels().bits != 0; }

bool has_isa(Isa isa) {
  const auto value = static_cast<int32_t>(isa);
  return value >= 0 && value < kIsaCount && (levels_up_to(isa) & bit(isa)) != 0;
}

Isa detected_isa() { return best_of(levels_up_to(static_cast<Isa>(kIsaCount - 1))); }

Isa active_isa() { return active().load(std::memory_order_relaxed); }

bool set_active_isa(Isa isa) {
  if (!has_isa(isa)) return false;
  active().store(isa, std::memory_order_relaxed);
  return true;
}

const char* isa_name(Isa isa) { return kNames[static_cast<int32_t>(isa)]; }

bool parse_isa(const char* name, Isa& isa) {
  for (int32_t i = 0; i < kIsaCount; ++i) {
    if (std::strcmp(name, kNames[i]) == 0) {
      isa = static_cast<Isa>(i);
      return true;
    }
  }
  return false;
}

int32_t tile_state() { return levels().tiles; }

}  // namespace omniattn
