#include "emulator/report.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace omniattn::emulator {
namespace {

const char* base_name(const char* path) {
  const char* const slash = std::strrchr(path, '/');
  return slash != nullptr ? slash + 1 : path;
}

}  // namespace

std::string position(const Location& location) {
  return text(base_name(location.file_name()), ':', location.line());
}

std::string position(const void* pc) {
  Dl_info module;
  if (dladdr(pc, &module) == 0) return text(pc);
  const auto offset =
      reinterpret_cast<uintptr_t>(pc) - reinterpret_cast<uintptr_t>(module.dli_fbase);
  // A test stops at its first error, so the 50 ms of another process do not matter.
  const std::string command =
      text("addr2line -e '", module.dli_fname, "' 0x", std::hex, offset, " 2>/dev/null");
  char line[1024] = "";
  if (FILE* const pipe = popen(command.c_str(), "r")) {
    if (std::fgets(line, sizeof line, pipe) == nullptr) line[0] = '\0';
    pclose(pipe);
  }
  line[std::strcspn(line, " \n")] = '\0';  // drops "(discriminator 2)"
  if (line[0] == '\0' || line[0] == '?') {
    return text(base_name(module.dli_fname), "+0x", std::hex, offset);
  }
  return base_name(line);
}

}  // namespace omniattn::emulator
