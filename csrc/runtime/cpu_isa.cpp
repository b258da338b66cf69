#include "runtime/cpu_isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace omniattn {
namespace {

constexpr const char* kNames[kIsaCount] = {"baseline", "avx2", "avx512", "avx512_bf16"};

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c")) {
    return Isa::baseline;
  }
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return Isa::avx2;
  }
#if defined(OMNIATTN_EMULATE_BF16_DOT)
  return Isa::avx512_bf16;
#else
  return __builtin_cpu_supports("avx512bf16") ? Isa::avx512_bf16 : Isa::avx512;
#endif
#else
  return Isa::baseline;
#endif
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
