// moe_experts on CUDA: memory and phases. All arrays have the maximum number of rows and blocks, so
// that nothing waits for the routing.
#include "kernels/moe/moe_cuda.h"
#include "kernels/torch_paths/torch_paths.h"
#include "ops/device.h"
#include "ops/layers/moe.h"
#include "ops/path.h"
#include "ops/torch_ops.h"

namespace omniattn::ops::moe {
namespace {

bool whole_16_bytes(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
}
bool whole_16_bytes(const Experts& w) {
  return whole_16_bytes(w.data(), w.expert_stride) &&
         (w.transposed ? w.in_stride : w.out_stride) % 8 == 0;
}
bool whole_16_bytes(const OptTensor& bias) { return whole_16_bytes(data_or_null(bias), 0); }

// True if dtype, sizes and addresses allow tensor cores. grad_y: null in the forward.
bool takes_mma(const Problem& p, const Rows* grad_y) {
  return size_of(p.dtype) == 2 && p.dim % 8 == 0 && p.hidden.features % 8 == 0 &&
         whole_16_bytes(p.x.data(), p.x.stride) && whole_16_bytes(p.up) && whole_16_bytes(p.down) &&
         whole_16_bytes(p.up_bias) && whole_16_bytes(p.down_bias) &&
         (grad_y == nullptr || whole_16_bytes(grad_y->data(), grad_y->stride));
}

// True if no two elements share an address.
bool is_plain(const Experts& w) {
  return (w.transposed ? w.in_stride >= w.out : w.out_stride >= w.in) &&
         w.expert_stride >= w.out * w.in;
}

// Limits of aten/src/ATen/native/cuda/GroupMM.cu, whose fast kernel is for these GPUs. It needs no
// alignment of the experts' rows if the rows are those of the left operand.
constexpr Condition<Problem> kGroupedMm[] = {
    {"kernels of this package are wanted", [](const Problem& p) { return !p.own_kernels; }},
    {"x is not bfloat16", [](const Problem& p) { return p.dtype == DType::bf16; }},
    {"the compute capability is not 9 or 10",
     [](const Problem&) {
       const int64_t generation = gpu_generation();
       return generation == 9 || generation == 10;
     }},
    {"there are no rows or columns",
     [](const Problem& p) { return p.pairs() * p.experts * p.dim * p.hidden.features > 0; }},
    {"there are more than 1024 experts", [](const Problem& p) { return p.experts <= 1024; }},
    {"elements of weights share memory",
     [](const Problem& p) { return is_plain(p.up) && is_plain(p.down); }},
};

// A path is a set of product kernels; both passes are otherwise the same. With kMoeFinished, torch
// multiplies for them.
const PathTable<const char*(const Problem&, const Rows*), const MoeProductKernels> kPaths(
    "moe_experts",
    {
        {"torch_grouped_mm",
         [](const Problem& p, const Rows* grad_y) {
           return takes_mma(p, grad_y) ? broken(kGroupedMm, p)
                                       : "rows or weights are not 16-bit in whole 16 bytes";
         },
         &kMoeFinished},
        {"mma",
         [](const Problem& p, const Rows* grad_y) { return refused_unless(takes_mma(p, grad_y)); },
         &kMoeMma},
        {"fma", [](const Problem&, const Rows*) { return refused_unless(true); }, &kMoeFma},
    });

// Arrays of the routing, in one allocation.
struct Routing {
  Tensor memory;
  MoeRouting arrays;

  // (experts,) int32: the end of each expert's rows.
  Tensor ends() const {
    const auto* const memory_of = static_cast<const int64_t*>(memory.const_data_ptr());
    return torch::stable::to(slice(memory, 0, arrays.offsets + 1 - memory_of, arrays.experts),
                             ScalarType::Int);
  }
};

Routing route(const Problem& p, int64_t block_rows) {
  MoeRouting r{};
  r.tokens = p.tokens;
  r.slots = p.slots;
  r.experts = p.experts;
  r.index = static_cast<const int64_t*>(p.index.const_data_ptr());
  r.block_rows = block_rows;
  r.block_count = MoeRouting::most_blocks(r.pairs(), r.experts, block_rows);
  constexpr int64_t kBlockNumbers = sizeof(MoeBlock) / sizeof(int64_t);
  const int64_t numbers =
      r.chunks() * r.experts + 2 * (r.experts + 1) + 3 * r.pairs() + kBlockNumbers * r.block_count;
  const Tensor memory = torch::stable::new_empty(p.index, {numbers}, ScalarType::Long);
  auto* next = static_cast<int64_t*>(memory.mutable_data_ptr());
  const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
  r.counts = take(r.chunks() * r.experts);
  r.offsets = take(r.experts + 1);
  r.block_starts = take(r.experts + 1);
  r.token_of_row = take(r.pairs());
  r.slot_of_row = take(r.pairs());
  r.row_of_slot = take(r.pairs());
  r.blocks = reinterpret_cast<MoeBlock*>(take(kBlockNumbers * r.block_count));
  require_launched(p.op, launch_moe_route(r, stream()));
  return {memory, r};
}

MoeProduct product(const Problem& p, const MoeRouting& r, const MoeRows& a, const MoeMatrix& b,
                   int64_t k, int64_t n) {
  return {.dtype = p.dtype,
          .blocks = r.blocks,
          .block_count = r.block_count,
          .a = a,
          .b = b,
          .k = k,
          .n = n};
}
// Rows of tokens, indexed by row of the routing.
MoeRows gathered(const Rows& x, const MoeRouting& r) {
  return {x.data(), r.token_of_row, x.stride};
}
MoeRows dense(const Tensor& t) { return {t.const_data_ptr(), nullptr, t.size(1)}; }

// The left operand of a product: rows, or the product itself if torch multiplies, and its memory.
struct Left {
  MoeRows rows;
  OptTensor memory;
};
// Rows (rows, k) of experts times their matrices (experts, k, n).
Left left(const Routing& routing, const MoeProductKernels& kernels, const Tensor& rows,
          const Tensor& matrices) {
  if (&kernels != &kMoeFinished) return {dense(rows), std::nullopt};
  const OptTensor ends = routing.ends(), no_bias;
  const std::optional<ScalarType> same_dtype;
  const Tensor made =
      as_dense(call_torch("aten::_grouped_mm", "", rows, matrices, ends, no_bias, same_dtype));
  return {dense(made), made};
}
// Rows of tokens likewise.
Left left(const Problem& p, const Routing& routing, const MoeProductKernels& kernels, const Rows& x,
          const Tensor& matrices) {
  const MoeRouting& r = routing.arrays;
  if (&kernels != &kMoeFinished) return {gathered(x, r), std::nullopt};
  const Tensor rows = empty_tensor({r.pairs(), x.cols}, p.dtype);
  require_launched(p.op, launch_moe_gather(p.dtype, r, gathered(x, r), x.cols,
                                           rows.mutable_data_ptr(), stream()));
  return left(routing, kernels, rows, matrices);
}
// Matrices of the products x W^T (forward); those of y W (backward) are the weights themselves.
Tensor forward_of(const Experts& w) { return torch::stable::transpose(w.tensor, 1, 2); }

void up(const Problem& p, const Routing& routing, const MoeProductKernels& kernels, void* pre,
        void* hidden) {
  const MoeRouting& r = routing.arrays;
  const Left x = left(p, routing, kernels, p.x, forward_of(p.up));
  const MoeUpProduct u{.product = product(p, r, x.rows, p.up.forward(), p.dim, p.columns),
                       .hidden_of = p.hidden,
                       .bias = data_or_null(p.up_bias),
                       .pre = pre,
                       .hidden = hidden};
  require_launched(p.op, kernels.up(u, stream()));
}

// y = sum over each token's slots of weight times (row of a times the expert's b, plus its bias).
void project(const Problem& p, const Routing& routing, const MoeProductKernels& kernels,
             const Tensor& a, const MoeMatrix& b, const Tensor& matrices, const void* bias,
             const void* weights, void* y) {
  const MoeRouting& r = routing.arrays;
  const Left x = left(routing, kernels, a, matrices);
  const Tensor rows = empty_tensor({r.pairs(), p.dim}, p.compute);
  const MoeProjectProduct q{.product = product(p, r, x.rows, b, a.size(1), p.dim),
                            .bias = bias,
                            .out = rows.mutable_data_ptr()};
  require_launched(p.op, kernels.project(q, stream()));
  const MoeCombineParams c{.dtype = p.dtype,
                           .cols = p.dim,
                           .slots = p.slots,
                           .rows = rows.const_data_ptr(),
                           .row_of_slot = r.row_of_slot,
                           .weight = weights,
                           .y = y};
  require_launched(p.op, launch_moe_combine(c, p.tokens, stream()));
}

}  // namespace

void run_forward(const Problem& p, void* y, void* pre) {
  const MoeProductKernels& kernels = *kPaths.first(p, nullptr).run;
  const Routing routing = route(p, kernels.block_rows);
  const MoeRouting& r = routing.arrays;
  const Tensor hidden = empty_tensor({r.pairs(), p.hidden.features}, p.dtype);
  if (pre != nullptr) {
    require_launched(p.op, launch_moe_clear(p.dtype, r, p.columns, pre, stream()));
  }
  up(p, routing, kernels, pre, hidden.mutable_data_ptr());
  project(p, routing, kernels, hidden, p.down.forward(), forward_of(p.down),
          data_or_null(p.down_bias), p.weights.const_data_ptr(), y);
}

namespace {

// out: gradient of w (E, out, in), sums over rows of grad (rows, out)^T in (rows, in).
void weight_grad(const Problem& p, const MoeRouting& r, const MoeProductKernels& kernels,
                 const Experts& w, const MoeRows& grad, const MoeRows& in, void* out) {
  const MoeWeightGrad g{.dtype = p.dtype,
                        .experts = p.experts,
                        .offsets = r.offsets,
                        .a = w.transposed ? in : grad,
                        .b = w.transposed ? grad : in,
                        .m = w.transposed ? w.in : w.out,
                        .n = w.transposed ? w.out : w.in,
                        .out = out};
  require_launched(p.op, kernels.weight_grad(g, stream()));
}

// out: sums over each expert's rows of x (rows, cols), weighted by `by` if it is not null.
void column_sums(const Problem& p, const MoeRouting& r, const MoeRows& x, int64_t cols,
                 const void* by, void* out) {
  const MoeColumnSums s{.dtype = p.dtype,
                        .experts = p.experts,
                        .cols = cols,
                        .offsets = r.offsets,
                        .x = x,
                        .slot_of_row = r.slot_of_row,
                        .weights = by,
                        .out = out};
  require_launched(p.op, launch_moe_column_sums(s, stream()));
}

// out: gradient of the routing weights, summed from its parts (rows, parts).
void slot_grad(const Problem& p, const MoeRouting& r, const Tensor& parts, const Rows& grad_y,
               void* out) {
  const MoeSlotGradParams s{.dtype = p.dtype,
                            .pairs = r.pairs(),
                            .slots = p.slots,
                            .cols = p.dim,
                            .parts = parts.size(1),
                            .index = r.index,
                            .row_of_slot = r.row_of_slot,
                            .grad_weight = parts.const_data_ptr(),
                            .grad_y = {grad_y.data(), nullptr, grad_y.stride},
                            .down_bias = data_or_null(p.down_bias),
                            .out = out};
  require_launched(p.op, launch_moe_slot_grad(s, stream()));
}

}  // namespace

void run_backward(const Problem& p, const Rows& grad_y, const void* pre,
                  const MoeGradients& grads) {
  const MoeProductKernels& kernels = *kPaths.first(p, &grad_y).run;
  const Routing routing = route(p, kernels.block_rows);
  const MoeRouting& r = routing.arrays;
  const int64_t features = p.hidden.features, parts = ceil_div(features, kMoeTileColumns);
  const Tensor recomputed = empty_tensor({pre != nullptr ? 0 : r.pairs(), p.columns}, p.dtype);
  if (pre == nullptr) {
    up(p, routing, kernels, recomputed.mutable_data_ptr(), nullptr);
    pre = recomputed.const_data_ptr();
  }
  const Tensor grad_pre = empty_tensor({r.pairs(), p.columns}, p.dtype);
  const Tensor hidden = empty_tensor({r.pairs(), features}, p.dtype);
  const Tensor grad_weight = empty_tensor({r.pairs(), parts}, p.compute);
  const MoeRows grad_rows = gathered(grad_y, r);
  const void* const weights = p.weights.const_data_ptr();
  const Left grad = left(p, routing, kernels, grad_y, p.down.tensor);
  const MoeUpBackwardProduct u{
      .product = product(p, r, grad.rows, p.down.backward(), p.dim, features),
      .hidden_of = p.hidden,
      .slot_of_row = r.slot_of_row,
      .weights = weights,
      .pre = pre,
      .grad_pre = grad_pre.mutable_data_ptr(),
      .weighted_hidden = hidden.mutable_data_ptr(),
      .grad_weight = grad_weight.mutable_data_ptr()};
  require_launched(p.op, kernels.up_backward(u, stream()));
  if (grads.x != nullptr) {
    project(p, routing, kernels, grad_pre, p.up.backward(), p.up.tensor, nullptr, nullptr, grads.x);
  }
  if (grads.up != nullptr) {
    weight_grad(p, r, kernels, p.up, dense(grad_pre), gathered(p.x, r), grads.up);
  }
  if (grads.down != nullptr) {
    weight_grad(p, r, kernels, p.down, grad_rows, dense(hidden), grads.down);
  }
  if (grads.up_bias != nullptr) {
    column_sums(p, r, dense(grad_pre), p.columns, nullptr, grads.up_bias);
  }
  if (grads.down_bias != nullptr) column_sums(p, r, grad_rows, p.dim, weights, grads.down_bias);
  if (grads.weights != nullptr) slot_grad(p, r, grad_weight, grad_y, grads.weights);
}

}  // namespace omniattn::ops::moe
