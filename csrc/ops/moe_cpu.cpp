// moe_experts on the CPU: the phases of forward and backward, wave by wave.
#include <algorithm>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "ops/moe_routing.h"
#include "ops/parallel.h"
#include "ops/stage.h"

namespace omniattn::ops::moe {
namespace {

// Elements of a task that copies or adds rows.
constexpr int64_t kCopyTask = 2 * kTaskElements;

// One at least: experts without features still add their bias.
int64_t feature_groups(const Problem& p) {
  return std::max<int64_t>(1, ceil_div(p.hidden.features, kMoeFeatures));
}

// Memory for (rows, cols) of a dtype.
struct Buffer {
  Tensor tensor;
  int64_t cols, item;

  Buffer(int64_t rows, int64_t cols_, DType dtype)
      : tensor(scratch(rows * cols_, dtype)), cols(cols_), item(size_of(dtype)) {}
  void* row(int64_t r) const {
    return static_cast<char*>(tensor.mutable_data_ptr()) + r * cols * item;
  }
};

// Runs the products of a wave, whose items are blocks times groups of columns.
class Products {
 public:
  explicit Products(DType dtype)
      : memory_(torch::stable::get_num_threads(), moe_kernels(dtype).workspace_bytes(dtype)) {}

  template <class Params>
  void run(const Params& p, int64_t groups,
           void (*kernel)(const Params&, void*, int64_t, int64_t)) const {
    run_stage(
        std::span(&p, 1), [groups](const Params& x) { return x.block_count * groups; }, memory_,
        kernel);
  }

 private:
  ThreadMemory memory_;
};

// out (count, cols) = the rows of x with these numbers.
void gather(DType dtype, const int64_t* numbers, int64_t count, const Rows& x, void* out) {
  const MoeGatherParams g{.dtype = dtype,
                          .cols = x.cols,
                          .x_stride = x.stride,
                          .tokens = numbers,
                          .x = x.data(),
                          .out = out};
  parallel_ranges(count, grain_of(x.cols, kCopyTask),
                  [&](int64_t a, int64_t b) { moe_kernels(dtype).gather(g, a, b); });
}

void up(const Problem& p, const Wave& wave, const Products& products, const void* x, void* pre,
        void* hidden) {
  const MoeUpParams u{.dtype = p.dtype,
                      .hidden_of = p.hidden,
                      .k = p.dim,
                      .blocks = wave.blocks.data(),
                      .block_count = wave.block_count(),
                      .x = x,
                      .up = p.up.forward(),
                      .bias = data_or_null(p.up_bias),
                      .pre = pre,
                      .hidden = hidden};
  products.run(u, feature_groups(p), moe_kernels(p.dtype).up);
}

void project(const Problem& p, const Wave& wave, const Products& products, const void* a, int64_t k,
             const MoeMatrix& b, const OptTensor& bias, void* out) {
  const MoeProjectParams q{.dtype = p.dtype,
                           .k = k,
                           .n = p.dim,
                           .blocks = wave.blocks.data(),
                           .block_count = wave.block_count(),
                           .a = a,
                           .b = b,
                           .bias = data_or_null(bias),
                           .out = out};
  products.run(q, ceil_div(p.dim, kMoeFeatures), moe_kernels(p.dtype).project);
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
                  [&](int64_t a, int64_t b) { moe_kernels(p.dtype).combine(c, a, b); });
}

// Gradient of weights w (E, out, in) = sum over rows of grad (rows, out)^T in (rows, in).
void weight_grad(const Problem& p, const Routing& routing, const Wave& wave, const Experts& w,
                 const Buffer& grad, const Buffer& in, void* result) {
  const DType operand = moe_kernels(p.dtype).operand(p.dtype);
  const GemmKernels& kernels = gemm_kernels(operand);
  std::vector<GemmParams> products;
  for (int64_t e = wave.first_expert; e < wave.first_expert + wave.experts; ++e) {
    const int64_t row = routing.offsets[e] - wave.row;
    const Buffer& a = w.transposed ? in : grad;
    const Buffer& b = w.transposed ? grad : in;
    products.push_back({.a_dtype = operand,
                        .b_dtype = operand,
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
                        .ldc = b.cols,
                        .a_transposed = true,
                        .b_transposed = false,
                        .accumulate = false});
  }
  // All sizes except k are the same for all, and so are items and workspace.
  const int64_t items = kernels.items(products[0]) * wave.experts;
  const ThreadMemory memory(std::min<int64_t>(items, torch::stable::get_num_threads()),
                            kernels.workspace_bytes(products[0]));
  run_stage(std::span(std::as_const(products)), kernels.items, memory, kernels.run);
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
                            .weight = weight,
                            .out = out + wave.first_expert * x.cols * size_of(p.dtype)};
  parallel_ranges(wave.experts, 1,
                  [&](int64_t a, int64_t b) { moe_kernels(p.dtype).bias_grad(g, a, b); });
}

}  // namespace

void run_forward(const Problem& p, void* y, void* pre) {
  const Routing routing(p);
  const DType operand = moe_kernels(p.dtype).operand(p.dtype);
  const int64_t features = p.hidden.features;
  const std::vector<Wave> all = waves(routing, (p.dim + features) * size_of(operand));
  const Buffer gathered(most_rows(all), p.dim, operand);
  const Buffer hidden(most_rows(all), features, operand);
  const Buffer rows(routing.rows(), p.dim, p.compute);
  char* const kept = static_cast<char*>(pre);
  const int64_t pre_row = p.columns * size_of(p.dtype);
  if (pre != nullptr) {
    std::memset(kept + routing.rows() * pre_row, 0, (p.pairs() - routing.rows()) * pre_row);
  }
  const Products products(p.dtype);
  for (const Wave& wave : all) {
    gather(p.dtype, routing.tokens_of(wave), wave.rows, p.x, gathered.row(0));
    up(p, wave, products, gathered.row(0), pre != nullptr ? kept + wave.row * pre_row : nullptr,
       hidden.row(0));
    project(p, wave, products, hidden.row(0), features, p.down.forward(), p.down_bias,
            rows.row(wave.row));
  }
  combine(p, routing, rows, p.weights.const_data_ptr(), y);
}

namespace {

// The backward. Its arrays hold the rows of one wave, except where all rows are needed.
class Backward {
 public:
  // pre: null to compute it again.
  Backward(const Problem& p, const Rows& grad_y, const void* pre, const MoeGradients& grads)
      : p_(p),
        grad_y_(grad_y),
        pre_(static_cast<const char*>(pre)),
        grads_(grads),
        operand_(moe_kernels(p.dtype).operand(p.dtype)),
        groups_(feature_groups(p)),
        routing_(p),
        waves_(waves(routing_, row_bytes())),
        products_(p.dtype),
        gathered_x_(most_rows(waves_), p.dim, operand_),
        gathered_grad_(most_rows(waves_), p.dim, operand_),
        grad_pre_(most_rows(waves_), p.columns, operand_),
        hidden_(most_rows(waves_), p.hidden.features, operand_),
        recomputed_(pre != nullptr ? 0 : most_rows(waves_), p.columns, p.dtype),
        dx_rows_(grads.x != nullptr ? routing_.rows() : 0, p.dim, p.compute),
        row_weight_(routing_.rows(), 1, p.compute),
        grad_weight_(routing_.rows(), groups_, p.compute) {}

  void run() const {
    gather(p_.compute, routing_.slot_of_row.data(), routing_.rows(), {p_.weights, p_.pairs(), 1, 1},
           row_weight_.row(0));
    for (const Wave& wave : waves_) {
      up_backward(wave, pre_of(wave));
      gradients(wave);
    }
    if (grads_.x != nullptr) combine(p_, routing_, dx_rows_, nullptr, grads_.x);
    if (grads_.weights != nullptr) sum_slots();
  }

 private:
  int64_t row_bytes() const {
    return (2 * p_.dim + p_.columns + p_.hidden.features) * size_of(operand_);
  }

  const void* pre_of(const Wave& wave) const {
    if (pre_ == nullptr || grads_.up != nullptr) {
      gather(p_.dtype, routing_.tokens_of(wave), wave.rows, p_.x, gathered_x_.row(0));
    }
    if (pre_ != nullptr) return pre_ + wave.row * p_.columns * size_of(p_.dtype);
    up(p_, wave, products_, gathered_x_.row(0), recomputed_.row(0), nullptr);
    return recomputed_.row(0);
  }

  void up_backward(const Wave& wave, const void* pre) const {
    gather(p_.dtype, routing_.tokens_of(wave), wave.rows, grad_y_, gathered_grad_.row(0));
    const MoeUpBackwardParams u{.dtype = p_.dtype,
                                .hidden_of = p_.hidden,
                                .k = p_.dim,
                                .blocks = wave.blocks.data(),
                                .block_count = wave.block_count(),
                                .grad_y = gathered_grad_.row(0),
                                .down = p_.down.backward(),
                                .down_bias = data_or_null(p_.down_bias),
                                .pre = pre,
                                .weight = row_weight_.row(wave.row),
                                .grad_pre = grad_pre_.row(0),
                                .weighted_hidden = hidden_.row(0),
                                .grad_weight = grad_weight_.row(wave.row)};
    products_.run(u, groups_, moe_kernels(p_.dtype).up_backward);
  }

  void gradients(const Wave& wave) const {
    if (grads_.x != nullptr) {
      project(p_, wave, products_, grad_pre_.row(0), p_.columns, p_.up.backward(), {},
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
  DType operand_;
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
