// Settings of the process: the active instruction set, for `omniattn info` and for tests that run
// every ISA in one process, and batch invariance.
#include <torch/csrc/stable/library.h>

#include "runtime/measured_isa.h"

namespace {

using omniattn::Isa;

int64_t cpu_isa() { return static_cast<int64_t>(omniattn::active_isa()); }
int64_t built_cpu_isas() { return omniattn::kBuiltLevels; }
// Returns -1 if this machine has none of the built levels.
int64_t detected_cpu_isa() {
  return omniattn::has_any_isa() ? static_cast<int64_t>(omniattn::detected_isa()) : -1;
}
bool set_cpu_isa(int64_t isa) { return omniattn::set_active_isa(static_cast<Isa>(isa)); }
bool has_cpu_isa(int64_t isa) { return omniattn::has_isa(static_cast<Isa>(isa)); }
// Returns false for an unknown op or level.
bool set_least_madds(int64_t op, int64_t isa, int64_t madds) {
  const bool known =
      op >= 0 && op < omniattn::kMeasuredOpCount && isa >= 0 && isa < omniattn::kIsaCount;
  if (known) {
    omniattn::least_madds(static_cast<omniattn::MeasuredOp>(op), static_cast<Isa>(isa)) = madds;
  }
  return known;
}
void set_batch_invariance(bool on) { omniattn::batch_invariance() = on; }
int64_t tile_state() { return omniattn::tile_state(); }

}  // namespace

STABLE_TORCH_LIBRARY(omniattn, m) {
  m.def("built_cpu_isas() -> int");
  m.def("cpu_isa() -> int");
  m.def("detected_cpu_isa() -> int");
  m.def("has_cpu_isa(int isa) -> bool");
  m.def("set_batch_invariance(bool on) -> ()");
  m.def("set_cpu_isa(int isa) -> bool");
  m.def("set_least_madds(int op, int isa, int madds) -> bool");
  m.def("tile_state() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(omniattn, CompositeExplicitAutograd, m) {
  m.impl("built_cpu_isas", TORCH_BOX(&built_cpu_isas));
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("detected_cpu_isa", TORCH_BOX(&detected_cpu_isa));
  m.impl("has_cpu_isa", TORCH_BOX(&has_cpu_isa));
  m.impl("set_batch_invariance", TORCH_BOX(&set_batch_invariance));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
  m.impl("set_least_madds", TORCH_BOX(&set_least_madds));
  m.impl("tile_state", TORCH_BOX(&tile_state));
}
