// Settings of the emulated GPU, its schedule and its shared memory, as ops of the emulated library.
#include <torch/csrc/stable/library.h>

#include "emulator/block.h"

namespace {

using namespace omniattn;

void set_schedule(int64_t order, int64_t seed) {
  emulator::schedule = {static_cast<emulator::Order>(order), static_cast<uint64_t>(seed)};
}

void set_shared_memory(int64_t bytes) {
  emulator::shared_memory_limit = static_cast<size_t>(bytes);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(omniattn, m) {
  m.def("emulator_set_schedule(int order, int seed) -> ()");
  m.def("emulator_set_shared_memory(int bytes) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(omniattn, CompositeExplicitAutograd, m) {
  m.impl("emulator_set_schedule", TORCH_BOX(&set_schedule));
  m.impl("emulator_set_shared_memory", TORCH_BOX(&set_shared_memory));
}
