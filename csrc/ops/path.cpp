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
    : op_(op), names_(std::move(names)), reasons_(names_.size()) {
  for (size_t n = 0; n < names_.size(); ++n) {
    if (is_torch_path(names_[n])) reasons_[n] = "the package has not looked for it in torch";
  }
  tables().push_back(this);
}

std::vector<PathNames*>& PathNames::tables() {
  static std::vector<PathNames*> found;
  return found;
}

void PathNames::print(const char* name, const std::string& refusals) const {
  const bool some = !refusals.empty();
  std::fprintf(stderr, "omniattn: %s on " OMNIATTN_DEVICE ": %s%s%s%s\n", op_, name,
               some ? " (" : "", refusals.c_str(), some ? ")" : "");
}

bool PathNames::omit(const std::string& op, const std::string& name, const std::string& reason) {
  for (PathNames* table : tables()) {
    for (size_t n = 0; op == table->op_ && n + 1 < table->names_.size(); ++n) {
      if (name != table->names_[n]) continue;
      table->reasons_[n] = reason;
      return true;
    }
  }
  return false;
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

std::string PathNames::all_omitted() {
  std::string lines;
  for (const PathNames* table : tables()) {
    for (size_t n = 0; n < table->names_.size(); ++n) {
      const char* const reason = table->omitted(n);
      if (reason == nullptr) continue;
      lines += std::string(table->op_) + ": " + table->names_[n] + ": " + reason + '\n';
    }
  }
  return lines;
}

namespace {

std::string paths() { return PathNames::all(); }
std::string omitted_paths() { return PathNames::all_omitted(); }
void report_paths(bool on) { PathNames::set_reports(on); }
bool omit_path(std::string op, std::string path, std::string reason) {
  return PathNames::omit(op, path, reason);
}

}  // namespace
}  // namespace omniattn::ops

STABLE_TORCH_LIBRARY_FRAGMENT(omniattn, m) {
  m.def("paths_" OMNIATTN_DEVICE "() -> str");
  m.def("omitted_paths_" OMNIATTN_DEVICE "() -> str");
  m.def("omit_path_" OMNIATTN_DEVICE "(str op, str path, str reason) -> bool");
  m.def("report_paths_" OMNIATTN_DEVICE "(bool on) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(omniattn, CompositeExplicitAutograd, m) {
  m.impl("paths_" OMNIATTN_DEVICE, TORCH_BOX(&omniattn::ops::paths));
  m.impl("omitted_paths_" OMNIATTN_DEVICE, TORCH_BOX(&omniattn::ops::omitted_paths));
  m.impl("omit_path_" OMNIATTN_DEVICE, TORCH_BOX(&omniattn::ops::omit_path));
  m.impl("report_paths_" OMNIATTN_DEVICE, TORCH_BOX(&omniattn::ops::report_paths));
}
