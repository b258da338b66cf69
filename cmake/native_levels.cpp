// Prints the levels that this machine would use, as a list of CMake: the best one that has all
// kernels, and the product-only ones above it. isa.cmake runs it with all levels known.
#include <cstdio>

#include "runtime/cpu_isa.h"

int main() {
  using namespace omniattn;
  const Isa last = static_cast<Isa>(kIsaCount - 1);
  int32_t first = 0;
  for (int32_t i = 0; i < kIsaCount; ++i) {
    if (has_isa(static_cast<Isa>(i)) && has_all_kernels(static_cast<Isa>(i))) first = i;
  }
  const uint32_t used = levels_up_to(last) >> first << first;
  const char* separator = "";
  for (int32_t i = 0; i < kIsaCount; ++i) {
    if ((used >> i & 1) == 0) continue;
    std::printf("%s%s", separator, isa_name(static_cast<Isa>(i)));
    separator = ";";
  }
}
