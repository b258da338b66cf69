// apply_rotary and qk_norm_rotary on the CPU: split over threads.
#include "ops/rope.h"

#include "ops/sum_over_rows.h"

namespace omniattn::ops::rope {

void check_positions(const char* op, const RopeParams& p, int64_t entries) {
  for (int64_t b = 0; b < entries; ++b) {
    for (int64_t t = 0; t < p.tokens; ++t) {
      const int64_t row = p.positions[b * p.positions_batch + t * p.positions_token];
      require(row >= 0 && row < p.rows, op, "positions must be in [0, ", p.rows,
              "), the rows of cos and sin, got ", row);
    }
  }
}

void run(const char*, const RopeParams& p, int64_t batch) {
  int64_t heads = 0;
  for (int32_t k = 0; k < p.tensor_count; ++k) heads += p.tensors[k].heads;
  if (heads == 0 || p.dim == 0) return;
  const auto rotate = rope_kernels().rotate;
  parallel_ranges(batch * p.tokens, grain_of(heads * p.dim),
                  [&](int64_t a, int64_t b) { rotate(p, a, b); });
}

void run_forward(const char*, const NormRopeParams& p, int64_t batch) {
  const auto forward = norm_rope_kernels().forward;
  parallel_ranges(batch * p.rope.tokens, grain_of(p.rope.tensors[0].heads * p.rope.dim),
                  [&](int64_t a, int64_t b) { forward(p, a, b); });
}

void run_backward(const char*, const NormRopeBackwardParams& p, int64_t batch, void* dweight) {
  const auto backward = norm_rope_kernels().backward;
  // The sums are kept in the order of the elements, as those of the accumulator type are.
  sum_over_rows(accumulator(p.rope.dtype), batch * p.rope.tokens, p.rope.dim, {dweight, 1}, {},
                [&](void* dw, void*, int64_t a, int64_t b) { backward(p, dw, a, b); });
}

}  // namespace omniattn::ops::rope
