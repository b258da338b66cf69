// Entries of kernels whose items, a sequence and head each, do not depend on each other.
#pragma once

#include "kernels/recurrence/recurrence_rows.h"
#include "runtime/denormals.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Pass<C> is built from params and memory, whose bytes its `room` counts where it is null, and runs
// an item by its number. The problem in params has a dtype and a number of items.
template <template <class> class Pass, class Params>
struct ItemPass {
  using Problem = decltype(Params::problem);

  static int64_t bytes(const Problem& p) {
    int64_t result = 0;
    Params params{};
    params.problem = p;
    dispatch_compute(p.dtype, [&]<class C>(C) { result = Pass<C>(params, nullptr).room.bytes(); });
    return result;
  }
  static void run(const Params& params, void* memory, int64_t begin, int64_t end) {
    const FlushDenormals flush;
    const Problem& p = params.problem;
    OMNIATTN_ASSERT_ITEMS(begin, end, p.items());
    OMNIATTN_ASSERT_HAS(memory, bytes(p));
    dispatch_compute(p.dtype, [&]<class C>(C) {
      Pass<C> pass(params, memory);
      for (int64_t i = begin; i < end; ++i) pass.run(i);
    });
    stream_fence();
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
