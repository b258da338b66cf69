// Kernels have no exceptions, and wrong results are worse than an end of the process: a broken
// condition prints a message and aborts. OMNIATTN_FAIL always does so, OMNIATTN_ASSERT where
// OMNIATTN_ASSERTS is defined (the presets dev and asan). They are macros, because the linker could
// keep an inline function of one object's instruction set for all objects.
#pragma once

#include <cstdio>
#include <cstdlib>

#define OMNIATTN_FAIL(message)                                                   \
  do {                                                                           \
    std::fprintf(stderr, "omniattn: %s (%s:%d)\n", message, __FILE__, __LINE__); \
    std::abort();                                                                \
  } while (false)

#if defined(OMNIATTN_ASSERTS)
#define OMNIATTN_ASSERT(condition)                                    \
  do {                                                                \
    if (!(condition)) OMNIATTN_FAIL("assertion failed: " #condition); \
  } while (false)
#else
#define OMNIATTN_ASSERT(condition) static_cast<void>(0)
#endif
