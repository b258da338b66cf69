// mesa_step: its schema. Elsewhere than on the CPU a composition of torch's ops implements it
// (python/omniattn/compositions/least_squares.py).
#include "ops/recurrences/least_squares.h"

#include "ops/registry.h"

namespace omniattn::ops::least_squares {
namespace {

const Registry registry([](Registry& ops) { ops.define<decltype(mesa_step)>("mesa_step"); });

}  // namespace
}  // namespace omniattn::ops::least_squares
