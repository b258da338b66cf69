// Kernels have no exceptions, and aborting is better than wrong results: a broken condition prints
// a message and aborts. OMNIATTN_FAIL always does so, OMNIATTN_ASSERT where OMNIATTN_ASSERTS is
// defined (the presets dev and asan). They are macros because the linker could keep one object's
// copy of an inline function, with its instruction set, for all objects.
#pragma once

#include <cstdio>
#include <cstdlib>

#define OMNIATTN_FAIL(message) \
  (std::fprintf(stderr, "omniattn: %s (%s:%d)\n", message, __FILE__, __LINE__), std::abort())

// Checked at the entry of a kernel: its items are among `count`; a tensor or buffer of `bytes`
// bytes is given, unless it is empty.
#define OMNIATTN_ASSERT_ITEMS(begin, end, count) \
  OMNIATTN_ASSERT(0 <= (begin) && (begin) <= (end) && (end) <= (count))
#define OMNIATTN_ASSERT_HAS(data, bytes) OMNIATTN_ASSERT((bytes) == 0 || (data) != nullptr)
// Checks rows of `cols` elements, `stride` apart; stride 0 repeats one row.
#define OMNIATTN_ASSERT_ROWS(data, stride, rows, cols) \
  OMNIATTN_ASSERT((rows) * (cols) == 0 ||              \
                  ((data) != nullptr && ((rows) == 1 || (stride) == 0 || (stride) >= (cols))))

#if defined(OMNIATTN_ASSERTS)
#define OMNIATTN_ASSERT(condition)                                    \
  do {                                                                \
    if (!(condition)) OMNIATTN_FAIL("assertion failed: " #condition); \
  } while (false)
#else
#define OMNIATTN_ASSERT(condition) static_cast<void>(sizeof(!(condition)))
#endif
