// Queries of cpu_isa.cpp to the machine. Tests compile it with another header of this name.
#pragma once

#include <cerrno>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
// True if the processor and the system have an extension; `name` is the compiler's name for it.
#define OMNIATTN_HAS_EXTENSION(name) (__builtin_cpu_init(), __builtin_cpu_supports(name))
#endif

namespace omniattn {

struct Machine {
#if defined(__x86_64__)
  // True if the processor has an extension of tiles and the system saves their registers. Some
  // compilers that we support lack some of these names in __builtin_cpu_supports.
  static bool has_tiles(const char* extension) {
    constexpr struct {
      const char* name;
      int subleaf, place, bit;  // of CPUID leaf 7; place is 0 for EAX, 3 for EDX
    } kExtensions[] = {{"amx-bf16", 0, 3, 22}, {"amx-tile", 0, 3, 24}, {"amx-fp16", 1, 0, 21}};
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) return false;
    unsigned low = 0, high = 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    constexpr unsigned kTileState = 3u << 17;  // configuration and data
    if ((low & kTileState) != kTileState) return false;
    unsigned found[2][4] = {};
    const auto ask = [&](unsigned leaf) {
      unsigned (&x)[4] = found[leaf];
      return __get_cpuid_count(7, leaf, &x[0], &x[1], &x[2], &x[3]) != 0;
    };
    if (!ask(0) || (found[0][0] >= 1 && !ask(1))) return false;  // its EAX is the last subleaf
    for (const auto& known : kExtensions) {
      if (std::strcmp(known.name, extension) != 0) continue;
      return (found[known.subleaf][known.place] >> known.bit & 1) != 0;
    }
    return false;
  }
#endif

  // Asks Linux for tile registers, for all threads of the process; returns 0 or errno. Linux
  // refuses (ENOSPC) while a thread has a signal stack that is too small for them; once they are
  // granted, sigaltstack() refuses such stacks.
  static int request_tiles() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
#else
    return ENOSYS;
#endif
  }
};

}  // namespace omniattn
