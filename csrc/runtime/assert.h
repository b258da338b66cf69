// What must not happen in a kernel ends the process with a message: kernels have no exceptions, and
// results that nobody computed are worse. OMNIATTN_FAIL is always there, OMNIATTN_ASSERT where
// OMNIATTN_ASSERTS is defined (the presets dev and asan). Macros, because an inline function of one
// object's instruction set could be the copy that the linker keeps for all.
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
