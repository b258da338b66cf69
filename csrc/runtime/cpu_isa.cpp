#include "runtime/cpu_isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace omniattn {
namespace {

#define OMNIATTN_NAME(name, ...) #name,
constexpr const char* kNames[kIsaCount] = {OMNIATTN_ISAS(OMNIATTN_NAME)};

// A library for tests may emulate one level with other instructions; the machine need not have it.
bool is_emulated([[maybe_unused]] Isa isa) {
#if defined(OMNIATTN_EMULATED_ISA)
  return isa == Isa::OMNIATTN_EMULATED_ISA;
#else
  return false;
#endif
}

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  Isa best = Isa::baseline;
#define HAS(extension) __builtin_cpu_supports(#extension)
#define OMNIATTN_DETECT(name, operands, present, ...)     \
  if (!(present) && !is_emulated(Isa::name)) return best; \
  best = Isa::name;
  OMNIATTN_BUILT_ISAS(OMNIATTN_DETECT)
  return best;
}

// The environment may lower the ISA, never raise it. An unknown name is reported by Python
// (config.py).
Isa initial() {
  const Isa best = detected_isa();
  Isa cap = best;
  const char* name = std::getenv("OMNIATTN_CPU_ISA");
  if (name == nullptr || !parse_isa(name, cap)) return best;
  return cap < best ? cap : best;
}

std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{initial()};
  return isa;
}

}  // namespace

Isa detected_isa() {
  static const Isa isa = detect();
  return isa;
}

Isa active_isa() { return active().load(std::memory_order_relaxed); }

bool set_active_isa(Isa isa) {
  const auto value = static_cast<int32_t>(isa);
  if (value < 0 || isa > detected_isa()) return false;
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

}  // namespace omniattn
