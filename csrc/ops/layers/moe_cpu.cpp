// moe_experts on the CPU: the phases of forward and backward, wave by wave.
#include <algorithm>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "ops/layers/moe_routing.h"
#include "ops/parallel.h"
#include "ops/stage.h"
#include "runtime/measured_isa.h"

namespace omniattn::ops::moe {
namespace {

// Elements in a task that copies or adds rows.
constexpr int64_t kCopyTask = 2 * kTaskElements;

// Kernels of the fastest level for this many rows per expert.
const MoeKernels& kernels_of(const Problem& p) {
  const int64_t rows = ceil_div(p.pairs(), std::max<int64_t>(1, p.experts));
  const int64_t madds = rows * p.dim * (p.columns + p.hidden.features);
  return moe_kernels_on(isa_for(MeasuredOp::moe_experts, p.dtype, madds), p.dtype);
}

// At least one: experts without features still add their bias.
int64_t feature_groups(const Problem& p) {
  return std::max<int64_t>(1, ceil_div(p.hidden.features, kMoeFeatures));
}

// Memory for (rows, cols) elements of a dtype.
struct Buffer {
  Tensor tensor;
  int64_t cols;
  DType dtype;

  Buffer(int64_t rows, int64_t cols_, DType dtype_)
      : tensor(scratch(rows * cols_, dtype_)), cols(cols_), dtype(dtype_) {}
  void* row(int64_t r) const {
    return static_cast<char*>(tensor.mutable_data_ptr()) + r * cols * size_of(dtype);
  }
};

// Blocks of a wave, by the way their rows are multiplied.
struct Blocks {
  std::vector<MoeBlock> in_pieces, others;
};

// Runs the products of a wave. An item is one block and one group of columns.
class Products {
 public:
  // rows: the largest number of rows of a wave.
  Products(const Problem& p, int64_t rows)
      : memory_(torch::stable::get_num_threads(), kernels_of(p).workspace_bytes(p.dtype)),
        made_(p.split_bf16 > 0 ? rows : 0, p.columns, p.compute) {}

  // Memory for a product that is computed in pieces before a kernel reads it.
  void* made() const { return made_.row(0); }

  // Runs a kernel on all blocks; `made` holds the finished product of the blocks in pieces.
  template <class Params>
  void run(Params p, const Blocks& blocks, int64_t groups,
           void (*kernel)(const Params&, void*, int64_t, int64_t)) const {
    p.made = nullptr;
    run(p, blocks.others, groups, kernel);
    p.made = made();
    run(p, blocks.in_pieces, groups, kernel);
  }

  template <class Params>
  void run(Params p, const std::vector<MoeBlock>& blocks, int64_t groups,
           void (*kernel)(const Params&, void*, int64_t, int64_t)) const {
    p.blocks = blocks.data();
    p.block_count = static_cast<int64_t>(blocks.size());
    run_stage(
        std::span<const Params>(&p, 1),
        [groups](const Params& x) { return x.block_count * groups; }, memory_, kernel);
  }

 private:
  ThreadMemory memory_;
  Buffer made_;
};

// c (rows, n) = a (rows, k) B + bias in pieces of bf16, for the experts that pieces support.
Blocks multiply_in_pieces(const Problem& p, const Routing& routing, const Wave& wave, const void* a,
                          int64_t k, const MoeMatrix& b, const OptTensor& bias, int64_t n,
                          void* c) {
  if (p.split_bf16 == 0 || p.dtype != DType::f32) return {{}, wave.blocks};
  const auto* const rows = static_cast<const float*>(a);
  const auto* const biases = static_cast<const float*>(data_or_null(bias));
  std::vector<GemmParams> products;
  for (int64_t e = wave.first_expert; e < wave.first_expert + wave.experts; ++e) {
    const int64_t row = routing.offsets[e] - wave.row;
    products.push_back({.a_dtype = p.dtype,
                        .b_dtype = p.dtype,
                        .c_dtype = p.dtype,
                        .m = routing.offsets[e + 1] - routing.offsets[e],
                        .n = n,
                        .k = k,
                        .a = rows + row * k,
                        .b = static_cast<const float*>(b.data) + e * b.expert,
                        .bias = biases != nullptr ? biases + e * n : nullptr,
                        .c = static_cast<float*>(c) + row * n,
                        .lda = k,
                        .ldb = b.k_stride == 1 ? b.n_stride : b.k_stride,
                        .ldc = n,
                        .a_transposed = false,
                        .b_transposed = b.k_stride == 1,
                        .accumulate = false,
                        .split_bf16 = p.split_bf16});
  }
  const std::vector<bool> made = gemm::multiply_in_pieces(products);
  Blocks blocks;
  for (const MoeBlock& block : wave.blocks) {
    const bool in_pieces = made[static_cast<size_t>(block.expert - wave.first_expert)];
    (in_pieces ? blocks.in_pieces : blocks.others).push_back(block);
  }
  return blocks;
}

// out (count, cols) = the rows of x with the given numbers.
void gather(const MoeKernels& kernels, DType dtype, const int64_t* numbers, int64_t count,
            const Rows& x, void* out) {
  const MoeGatherParams g{.dtype = dtype,
                          .cols = x.cols,
                          .x_stride = x.stride,
                          .tokens = numbers,
                          .x = x.data(),
                          .out = out};
  parallel_ranges(count, grain_of(x.cols, kCopyTask),
                  [&](int64_t a, int64_t b) { kernels.gather(g, a, b); });
}

void up(const Problem& p, const Routing& routing, const Wave& wave, const Products& products,
        const void* x, void* pre, void* hidden) {
  const MoeUpParams u{.dtype = p.dtype,
                      .hidden_of = p.hidden,
                      .k = p.dim,
                      .blocks = nullptr,
                      .block_count = 0,
                      .x = x,
                      .up = p.up.forward(),
                      .bias = data_or_null(p.up_bias),
                      .made = nullptr,
                      .pre = pre,
                      .hidden = hidden};
  const Blocks blocks = multiply_in_pieces(p, routing, wave, x, p.dim, p.up.forward(), p.up_bias,
                                           p.columns, products.made());
  products.run(u, blocks, feature_groups(p), kernels_of(p).up);
}

void project(const Problem& p, const Routing& routing, const Wave& wave, const Products& products,
             const void* a, int64_t k, const MoeMatrix& b, const OptTensor& bias, void* out) {
  const MoeProjectParams q{.dtype = p.dtype,
                           .k = k,
                           .n = p.dim,
                           .blocks = nullptr,
                           .block_count = 0,
                           .a = a,
                           .b = b,
                           .bias = data_or_null(bias),
                           .out = out};
  const Blocks blocks = multiply_in_pieces(p, routing, wave, a, k, b, bias, p.dim, out);
  products.run(q, blocks.others, ceil_div(p.dim, kMoeFeatures), kernels_of(p).project);
}

void combine(const Problem& p, const Routing& routing, const Buffer& rows, const void* weight,
             void* y) {
  const MoeCombineParams c{.dtype = p.dtype,
                           .cols = p.dim,
                           .slots = p.slots,
                           .rows = rows.row(0),
                           .row_of_slot = routing.row_of_slot.data(),
                           .weight = weight,
                           .y = y};
  parallel_ranges(p.tokens, grain_of(p.dim * std::max<int64_t>(1, p.slots), kCopyTask),
                  [&](int64_t a, int64_t b) { kernels_of(p).combine(c, a, b); });
}

// Gradient of weights w (E, out, in) = sum over rows of grad (rows, out)^T in (rows, in). If the
// dtypes differ, the wider operand becomes A, which may transpose the product.
void weight_grad(const Problem& p, const Routing& routing, const Wave& wave, const Experts& w,
                 const Buffer& grad, const Buffer& in, void* result) {
  const bool in_first =
      grad.dtype == in.dtype ? w.transposed : size_of(in.dtype) > size_of(grad.dtype);
  const Buffer &a = in_first ? in : grad, &b = in_first ? grad : in;
  std::vector<GemmParams> products;
  for (int64_t e = wave.first_expert; e < wave.first_expert + wave.experts; ++e) {
    const int64_t row = routing.offsets[e] - wave.row;
    products.push_back({.a_dtype = a.dtype,
                        .b_dtype = b.dtype,
                        .c_dtype = p.dtype,
                        .m = a.cols,
                        .n = b.cols,
                        .k = routing.offsets[e + 1] - routing.offsets[e],
                        .a = a.row(row),
                        .b = b.row(row),
                        .bias = nullptr,
                        .c = static_cast<char*>(result) + e * a.cols * b.cols * size_of(p.dtype),
                        .lda = a.cols,
                        .ldb = b.cols,
                        .ldc = w.transposed ? grad.cols : in.cols,
                        .a_transposed = true,
                        .b_transposed = false,
                        .accumulate = false,
                        .c_transposed = in_first != w.transposed,
                        .split_bf16 = p.split_bf16});
  }
  gemm::multiply_each(products);
}

void bias_grad(const Problem& p, const Routing& routing, const Wave& wave, const Buffer& x,
               const void* weight, void* result) {
  const auto first = routing.offsets.begin() + wave.first_expert;
  std::vector<int64_t> offsets(first, first + wave.experts + 1);
  for (int64_t& offset : offsets) offset -= wave.row;
  char* const out = static_cast<char*>(result);
  const MoeBiasGradParams g{.dtype = p.dtype,
                            .cols = x.cols,
                            .offsets = offsets.data(),
                            .x = x.row(0),
                            .computed = x.dtype == kernels_of(p).operands(p.dtype).computed,
                            .weight = weight,
                            .out = out + wave.first_expert * x.cols * size_of(p.dtype)};
  parallel_ranges(wave.experts, 1, [&](int64_t a, int64_t b) { kernels_of(p).bias_grad(g, a, b); });
}

}  // namespace

void run_forward(const Problem& p, void* y, void* pre) {
  const Routing routing(p);
  const MoeKernels& kernels = kernels_of(p);
  const MoeOperands operands = kernels.operands(p.dtype);
  const int64_t features = p.hidden.features;
  const std::vector<Wave> all =
      waves(routing, p.dim * size_of(operands.tensor) + features * size_of(operands.computed));
  const Buffer gathered(most_rows(all), p.dim, operands.tensor);
  const Buffer hidden(most_rows(all), features, operands.computed);
  const Buffer rows(routing.rows(), p.dim, p.compute);
  char* const kept = static_cast<char*>(pre);
  const int64_t pre_row = p.columns * size_of(p.dtype);
  if (pre != nullptr) {
    std::memset(kept + routing.rows() * pre_row, 0, (p.pairs() - routing.rows()) * pre_row);
  }
  const Products products(p, most_rows(all));
  for (const Wave& wave : all) {
    gather(kernels, p.dtype, routing.tokens_of(wave), wave.rows, p.x, gathered.row(0));
    up(p, routing, wave, products, gathered.row(0),
       pre != nullptr ? kept + wave.row * pre_row : nullptr, hidden.row(0));
    project(p, routing, wave, products, hidden.row(0), features, p.down.forward(), p.down_bias,
            rows.row(wave.row));
  }
  combine(p, routing, rows, p.weights.const_data_ptr(), y);
}

namespace {

// The backward. Its arrays hold the rows of one wave, unless all rows are needed.
class Backward {
 public:
  // pre: null to recompute it.
  Backward(const Problem& p, const Rows& grad_y, const void* pre, const MoeGradients& grads)
      : p_(p),
        grad_y_(grad_y),
        pre_(static_cast<const char*>(pre)),
        grads_(grads),
        kernels_(kernels_of(p)),
        operands_(kernels_.operands(p.dtype)),
        groups_(feature_groups(p)),
        routing_(p),
        waves_(waves(routing_, row_bytes())),
        products_(p, most_rows(waves_)),
        gathered_x_(most_rows(waves_), p.dim, operands_.tensor),
        gathered_grad_(most_rows(waves_), p.dim, operands_.tensor),
        grad_pre_(most_rows(waves_), p.columns, operands_.computed),
        hidden_(most_rows(waves_), p.hidden.features, operands_.computed),
        recomputed_(pre != nullptr ? 0 : most_rows(waves_), p.columns, p.dtype),
        dx_rows_(grads.x != nullptr ? routing_.rows() : 0, p.dim, p.compute),
        row_weight_(routing_.rows(), 1, p.compute),
        grad_weight_(routing_.rows(), groups_, p.compute) {}

  void run() const {
    gather(moe_kernels(p_.compute), p_.compute, routing_.slot_of_row.data(), routing_.rows(),
           {p_.weights, p_.pairs(), 1, 1}, row_weight_.row(0));
    for (const Wave& wave : waves_) {
      up_backward(wave, pre_of(wave));
      gradients(wave);
    }
    if (grads_.x != nullptr) combine(p_, routing_, dx_rows_, nullptr, grads_.x);
    if (grads_.weights != nullptr) sum_slots();
  }

 private:
  int64_t row_bytes() const {
    return 2 * p_.dim * size_of(operands_.tensor) +
           (p_.columns + p_.hidden.features) * size_of(operands_.computed);
  }

  const void* pre_of(const Wave& wave) const {
    if (pre_ == nullptr || grads_.up != nullptr) {
      gather(kernels_, p_.dtype, routing_.tokens_of(wave), wave.rows, p_.x, gathered_x_.row(0));
    }
    if (pre_ != nullptr) return pre_ + wave.row * p_.columns * size_of(p_.dtype);
    up(p_, routing_, wave, products_, gathered_x_.row(0), recomputed_.row(0), nullptr);
    return recomputed_.row(0);
  }

  void up_backward(const Wave& wave, const void* pre) const {
    gather(kernels_, p_.dtype, routing_.tokens_of(wave), wave.rows, grad_y_, gathered_grad_.row(0));
    const MoeUpBackwardParams u{.dtype = p_.dtype,
                                .hidden_of = p_.hidden,
                                .k = p_.dim,
                                .blocks = nullptr,
                                .block_count = 0,
                                .grad_y = gathered_grad_.row(0),
                                .down = p_.down.backward(),
                                .down_bias = data_or_null(p_.down_bias),
                                .made = nullptr,
                                .pre = pre,
                                .weight = row_weight_.row(wave.row),
                                .grad_pre = grad_pre_.row(0),
                                .weighted_hidden = hidden_.row(0),
                                .grad_weight = grad_weight_.row(wave.row)};
    const Blocks blocks =
        multiply_in_pieces(p_, routing_, wave, gathered_grad_.row(0), p_.dim, p_.down.backward(),
                           {}, p_.hidden.features, products_.made());
    products_.run(u, blocks, groups_, kernels_.up_backward);
  }

  void gradients(const Wave& wave) const {
    if (grads_.x != nullptr) {
      project(p_, routing_, wave, products_, grad_pre_.row(0), p_.columns, p_.up.backward(), {},
              dx_rows_.row(wave.row));
    }
    if (grads_.up != nullptr) {
      weight_grad(p_, routing_, wave, p_.up, grad_pre_, gathered_x_, grads_.up);
    }
    if (grads_.down != nullptr) {
      weight_grad(p_, routing_, wave, p_.down, gathered_grad_, hidden_, grads_.down);
    }
    if (grads_.up_bias != nullptr) {
      bias_grad(p_, routing_, wave, grad_pre_, nullptr, grads_.up_bias);
    }
    if (grads_.down_bias != nullptr) {
      bias_grad(p_, routing_, wave, gathered_grad_, row_weight_.row(wave.row), grads_.down_bias);
    }
  }

  void sum_slots() const {
    const MoeSlotSumParams s{.dtype = p_.compute,
                             .parts = groups_,
                             .row_of_slot = routing_.row_of_slot.data(),
                             .rows = grad_weight_.row(0),
                             .out = grads_.weights};
    parallel_ranges(p_.pairs(), grain_of(groups_, kCopyTask),
                    [&](int64_t a, int64_t b) { moe_kernels(p_.compute).slot_sum(s, a, b); });
  }

  const Problem& p_;
  const Rows& grad_y_;
  const char* pre_;
  const MoeGradients& grads_;
  const MoeKernels& kernels_;
  MoeOperands operands_;
  int64_t groups_;
  Routing routing_;
  std::vector<Wave> waves_;
  Products products_;
  Buffer gathered_x_, gathered_grad_, grad_pre_, hidden_, recomputed_;
  Buffer dx_rows_, row_weight_, grad_weight_;  // of all waves
};

}  // namespace

void run_backward(const Problem& p, const Rows& grad_y, const void* pre,
                  const MoeGradients& grads) {
  Backward(p, grad_y, pre, grads).run();
}

}  // namespace omniattn::ops::moe
