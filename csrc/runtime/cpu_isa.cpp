#include "runtime/cpu_isa.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace omniattn {
namespace {

#define OMNIATTN_NAME(name, ...) #name,
constexpr const char* kNames[kIsaCount] = {OMNIATTN_ISAS(OMNIATTN_NAME)};

// A library for tests may emulate the levels of products, up to one, by the instructions of the
// level below them; the machine need not have them.
bool is_emulated([[maybe_unused]] Isa isa) {
#if defined(OMNIATTN_EMULATED_ISA)
  return !has_all_kernels(isa) && isa <= Isa::OMNIATTN_EMULATED_ISA;
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

#if defined(__x86_64__)

// Whether the processor has an extension of tiles and the system saves their registers. Compilers
// that we support do not know all of these names in __builtin_cpu_supports.
bool cpu_has_tiles(const char* extension) {
  constexpr struct {
    const char* name;
    int bit;  // of EDX of CPUID leaf 7
  } kExtensions[] = {{"amx-bf16", 22}, {"amx-tile", 24}};
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) return false;
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;  // configuration and data
  if ((low & kTileState) != kTileState) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  for (const auto& known : kExtensions) {
    if (std::strcmp(known.name, extension) == 0) return (d >> known.bit & 1) != 0;
  }
  return false;
}

// The result of asking Linux for tile registers, once, for all threads of the process: 0 or errno.
// Where a thread has a signal stack that is too small for them, it refuses (ENOSPC); once granted,
// sigaltstack() refuses such stacks.
int request_tiles() {
  static const int error = [] {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
#else
    return ENOSYS;
#endif
  }();
  return error;
}

bool has_tiles(Isa isa, const char* extension) {
  return cpu_has_tiles(extension) && isa <= cap() && request_tiles() == 0;
}

#endif

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  Isa best = Isa::baseline;
#define HAS(extension) __builtin_cpu_supports(#extension)
#define TILES(extension) has_tiles(kLevel, #extension)
#define OMNIATTN_DETECT(name, operands, present, ...)    \
  {                                                      \
    constexpr Isa kLevel = Isa::name;                    \
    if (!is_emulated(kLevel) && !(present)) return best; \
    best = kLevel;                                       \
  }
  OMNIATTN_BUILT_ISAS(OMNIATTN_DETECT)
  return best;
}

Isa initial() {
  const Isa best = detected_isa(), limit = cap();
  return limit < best ? limit : best;
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

int32_t tile_state() {
#if defined(__x86_64__)
  if (!cpu_has_tiles("amx-tile") || !cpu_has_tiles("amx-bf16")) return kNoTiles;
  if (cap() < Isa::amx_bf16) return kTilesNotAskedFor;
  return request_tiles();
#else
  return kNoTiles;
#endif
}

}  // namespace omniattn
