// Lists and reports paths, as ops of each device's library.
#include "ops/path.h"

#include <torch/csrc/stable/library.h>

#include <cstdio>

#if defined(OMNIATTN_CUDA)
#define OMNIATTN_DEVICE "cuda"
#else
#define OMNIATTN_DEVICE "cpu"
#endif

namespace omniattn::ops {

PathNames::PathNames(const char* op, std::vector<const char*> names)
    : op_(op), names_(std::move(names)) {
  tables().push_back(this);
}

std::vector<const PathNames*>& PathNames::tables() {
  static std::vector<const PathNames*> found;
  return found;
}

void PathNames::print(const char* name) const {
  std::fprintf(stderr, "omniattn: %s on " OMNIATTN_DEVICE ": %s\n", op_, name);
}

std::string PathNames::all() {
  std::string lines;
  for (const PathNames* table : tables()) {
    lines += table->op_;
    const char* separator = ": ";
    for (const char* name : table->names_) {
      lines += separator;
      lines += name;
      separator = ", ";
    }
    lines += '\n';
  }
  return lines;
}

namespace {

std::string paths() { return PathNames::all(); }
void report_paths(bool on) { PathNames::set_reports(on); }

}  // namespace
}  // namespace omniattn::ops

STABLE_TORCH_LIBRARY_FRAGMENT(omniattn, m) {
  m.def("paths_" OMNIATTN_DEVICE "() -> str");
  m.def("report_paths_" OMNIATTN_DEVICE "(bool on) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(omniattn, CompositeExplicitAutograd, m) {
  m.impl("paths_" OMNIATTN_DEVICE, TORCH_BOX(&omniattn::ops::paths));
  m.impl("report_paths_" OMNIATTN_DEVICE, TORCH_BOX(&omniattn::ops::report_paths));
}
