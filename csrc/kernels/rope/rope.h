// Rotary position embedding (Su et al. 2021, arXiv 2104.09864): 2 * half elements of each head,
// from `start` on, are rotated by the angles in their token's row of the tables; the other elements
// are copied. Pairs are (n, n + half), or (2n, 2n + 1) if interleaved, counted from `start`; see
// semantics/rope.h. Computed in fp32 (fp64 for fp64), rounded once. A work item is a token: its row
// of the tables is read once for all heads.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"

namespace omniattn {

// One of the tensors rotated together, (batch, tokens, heads, dim) with unit stride in dim.
struct RopeTensor {
  const void* in;
  void* out;  // may be `in`
  int64_t heads;
  int64_t in_batch, in_token, in_head;
  int64_t out_batch, out_token, out_head;
};

struct RopeParams {
  DType dtype;
  int64_t tokens;            // per batch entry; item i is token i % tokens of entry i / tokens
  int64_t dim, start, half;  // start + 2 * half <= dim
  int64_t rows;              // rows of the tables
  RopeTensor tensors[2];
  int32_t tensor_count;
  const void *cos, *sin;  // (batch, rows, half) in the compute type, unit stride in half
  int64_t cos_batch, cos_row, sin_batch, sin_row;
  const int64_t* positions;  // (batch, tokens): row of the tables; null: the index of the token
  int64_t positions_batch, positions_token;
  bool interleaved;
  bool inverse;      // rotate by the negative angle: the backward
  bool past_caches;  // outputs are new contiguous tensors, too large for the caches
};
static_assert(std::is_trivially_copyable_v<RopeParams>);

struct RopeKernels {
  void (*rotate)(const RopeParams&, int64_t begin, int64_t end);
};

OMNIATTN_KERNEL_TABLE(RopeKernels, rope_kernels)

// A position outside the tables stops the kernel: the host cannot read
// positions without waiting for the GPU.
Status launch_rope(const RopeParams& p, int64_t batch, Stream stream);

}  // namespace omniattn
