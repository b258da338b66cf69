// decayed_sum: its schema. Only the CPU has a kernel; context parallelism runs the definition on
// other devices.
#include "ops/recurrences/decayed_sum.h"

#include "ops/registry.h"

namespace omniattn::ops::decayed_sum {
namespace {

const Registry registry([](Registry& ops) { ops.define<decltype(decayed_sum)>("decayed_sum"); });

}  // namespace
}  // namespace omniattn::ops::decayed_sum
