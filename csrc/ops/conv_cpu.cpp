// causal_conv1d on the CPU: split over threads.
#include <cstring>

#include "ops/conv.h"
#include "ops/sum_over_rows.h"

namespace omniattn::ops::conv {
namespace {

// The last K - 1 of the rows in front of x and of x.
void copy_final_state(const CausalConv& p, void* final_state) {
  const int64_t size = size_of(p.dtype), width = p.channels * size, before = p.taps - 1;
  char* out = static_cast<char*>(final_state);
  for (int64_t b = 0; b < p.batch; ++b) {
    const char* const state = static_cast<const char*>(p.before) + b * p.before_batch * size;
    const char* const x = static_cast<const char*>(p.x) + b * p.x_batch * size;
    for (int64_t r = p.steps; r < p.steps + before; ++r, out += width) {
      const char* const row =
          r < before ? state + r * p.before_row * size : x + (r - before) * p.x_row * size;
      std::memcpy(out, row, static_cast<size_t>(width));
    }
  }
}

}  // namespace

void run_forward(const char*, const CausalConvParams& p) {
  const CausalConv& c = p.conv;
  const auto forward = causal_conv_kernels().forward;
  parallel_ranges(c.batch * c.steps, grain_of(c.channels),
                  [&](int64_t a, int64_t b) { forward(p, a, b); });
  if (c.channels > 0) copy_final_state(c, p.final_state);
}

void run_backward(const char*, const CausalConvBackwardParams& p, void* dweight, void* dbias) {
  const CausalConv& c = p.conv;
  const auto backward = causal_conv_kernels().backward;
  const int64_t rows = c.batch * (c.taps - 1 + c.steps);
  sum_over_rows(c.dtype, rows, c.channels, {dweight, c.taps}, {dbias, 1},
                [&](void* dw, void* db, int64_t a, int64_t b) {
                  const Tensor memory = scratch((c.taps - 1) * c.channels, accumulator(c.dtype));
                  backward(p, dw, db, memory.mutable_data_ptr(), a, b);
                });
}

}  // namespace omniattn::ops::conv
