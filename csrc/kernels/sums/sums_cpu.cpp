// Sums over shards on the CPU, see sums.h.
#include "kernels/sums/sums.h"

#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

void sum_shards(DType dtype, const void* partial, int64_t shards, int64_t stride, int64_t n,
                void* out) {
  OMNIATTN_ASSERT(shards >= 0 && (shards <= 1 || stride >= n));  // with 0 shards callers zero `out`
  OMNIATTN_ASSERT_HAS(out, n);
  dispatch(dtype, [&]<class T>(T) {
    const auto* const sums = static_cast<const compute_t<T>*>(partial);
    for_row<T, Order::any>(n, [&](int64_t i, auto part) {
      auto total = part.load_sums(sums + i);
      for (int64_t s = 1; s < shards; ++s) total += part.load_sums(sums + s * stride + i);
      part.store(static_cast<T*>(out) + i, total);
    });
  });
}

}  // namespace

extern const SumKernels sum_kernels_table;
const SumKernels sum_kernels_table{sum_shards};

}  // namespace omniattn::OMNIATTN_ISA
