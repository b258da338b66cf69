// The choice of the emulator's schedule, as an op of the emulated library.
#include <torch/csrc/stable/library.h>

#include "emulator/block.h"

namespace {

using namespace omniattn;

void set_schedule(int64_t order, int64_t seed) {
  emulator::schedule = {static_cast<emulator::Order>(order), static_cast<uint64_t>(seed)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(omniattn, m) {
  m.def("emulator_set_schedule(int order, int seed) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(omniattn, CompositeExplicitAutograd, m) {
  m.impl("emulator_set_schedule", TORCH_BOX(&set_schedule));
}
