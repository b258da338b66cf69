// linear_cross_entropy on the CPU: logits and their gradients live in the compute type for one
// chunk of tokens at a time.
#include <tuple>

#include "ops/gemm.h"
#include "ops/loss.h"
#include "ops/parallel.h"
#include "ops/registry.h"
#include "semantics/seqlen.h"

namespace omniattn::ops::loss {
namespace {

// Logits of one chunk of tokens: 64 MiB of fp32. Smaller chunks pack the weight more often (a
// quarter of the time at 100 rows), larger ones only cost memory.
constexpr int64_t kChunkLogits = int64_t{1} << 24;
constexpr int64_t kSumTask = 65536;

// total (...) of `out` = the sums over chunks, in order.
void sum_chunks(const Tensor& sums, int64_t chunks, const Tensor& total, DType out) {
  const auto sum = loss_kernels().sum_chunks;
  parallel_ranges(total.numel(), kSumTask, [&](int64_t a, int64_t b) {
    sum(out, sums.const_data_ptr(), chunks, total.numel(), total.mutable_data_ptr(), a, b);
  });
}

void* at(const Tensor& t, int64_t element, DType dtype) {
  return static_cast<char*>(t.mutable_data_ptr()) + element * size_of(dtype);
}

// The arguments that forward and backward share, checked.
struct LinearProblem {
  DType dtype;
  Rows x, weight;
  OptTensor bias;
  Problem loss;
  Tensor losses;
  int64_t chunks, chunk;  // tokens of one

  LinearProblem(const char* op, const Tensor& x_, const Tensor& weight_, const OptTensor& bias_,
                const Tensor& target, const Options& options)
      : dtype(dtype_of(op, "x", x_)),
        x(as_rows(op, "x", x_, dtype)),
        weight(as_rows(op, "weight", weight_, dtype)),
        bias(as_vector(op, "bias", bias_, dtype, weight.rows)),
        loss(op, accumulator(dtype), weight.rows, leading_sizes(x_), target, options),
        losses(empty_tensor(loss.leading, loss.acc)) {
    require(weight_.dim() == 2 && weight.cols == x.cols, op,
            "weight must have shape (V, K) with x (..., K), got K=", x.cols, " and ", weight.cols);
    loss.params.loss = losses.mutable_data_ptr();
    const int64_t most = grain_of(weight.rows, kChunkLogits);
    chunks = std::max<int64_t>(1, ceil_div(x.rows, most));
    chunk = ceil_div(x.rows, chunks);
  }
};

// Runs over the chunks: losses, and gradients of `out` dtype for given weights of the rows.
class LinearLoss {
 public:
  LinearLoss(const LinearProblem& p, DType out, bool x_grad, bool weight_grad, bool bias_grad)
      : p_(p),
        out_(out),
        acc_(p.loss.acc),
        logits_(empty_tensor({p.chunk, p.weight.rows}, acc_)),
        lse_(scratch(p.chunk, acc_)),
        dx_(x_grad, p.x.tensor.sizes(), out),
        dweight_(weight_grad, {p.weight.rows, p.x.cols}, out),
        weight_sums_(weight_grad && out != acc_, {p.weight.rows, p.x.cols}, acc_),
        dbias_(bias_grad, {p.weight.rows}, out),
        bias_sums_(bias_grad, {p.chunks, p.weight.rows}, acc_) {}

  // row_weight: (tokens) or null for no gradients.
  std::tuple<Tensor, Tensor, Tensor> run(const OptTensor& row_weight) {
    for (int64_t c = 0; c < p_.chunks; ++c) {
      const CrossEntropyParams params = forward(c);
      if (row_weight.has_value()) backward(c, params, *row_weight);
    }
    const Tensor dweight = dweight_.tensor(), dbias = dbias_.tensor();
    if (weight_sums_.data() != nullptr) sum_chunks(weight_sums_.tensor(), 1, dweight, out_);
    if (dbias_.data() != nullptr) sum_chunks(bias_sums_.tensor(), p_.chunks, dbias, out_);
    return {dx_.tensor(), dweight, dbias};
  }

 private:
  gemm::Operand inputs(int64_t first) const {
    const auto* const x = static_cast<const char*>(p_.x.data());
    return {x + first * p_.x.stride * size_of(p_.dtype), p_.dtype, p_.x.stride};
  }
  gemm::Operand weight(bool transposed) const {
    return {p_.weight.data(), p_.dtype, p_.weight.stride, transposed};
  }

  CrossEntropyParams forward(int64_t c) {
    const int64_t vocab = p_.weight.rows, first = c * p_.chunk;
    CrossEntropyParams params = p_.loss.params;
    params.rows = std::clamp<int64_t>(p_.x.rows - first, 0, p_.chunk);
    params.logits = logits_.const_data_ptr();
    params.target += first;
    params.loss = at(p_.losses, first, acc_);
    params.lse = lse_.mutable_data_ptr();
    gemm::multiply(inputs(first), weight(true), data_or_null(p_.bias), logits_.mutable_data_ptr(),
                   acc_, vocab, params.rows, vocab, p_.x.cols);
    run_forward(p_.loss.op, params);
    return params;
  }

  // Gradients take the place of the logits.
  void backward(int64_t c, const CrossEntropyParams& params, const Tensor& row_weight) {
    const int64_t vocab = p_.weight.rows, width = p_.x.cols, first = c * p_.chunk;
    run_backward(p_.loss.op, {.forward = params,
                              .grad_dtype = acc_,
                              .row_weight = at(row_weight, first, acc_),
                              .dlogits = logits_.mutable_data_ptr(),
                              .stream = false});
    gemm::Operand grads{logits_.const_data_ptr(), acc_, vocab};
    if (dx_.data() != nullptr) {
      gemm::multiply(grads, weight(false), nullptr, at(dx_.tensor(), first * width, out_), out_,
                     width, params.rows, width, vocab);
    }
    if (dbias_.data() != nullptr) {
      gemm::sum_columns({logits_, params.rows, vocab, vocab}, acc_,
                        at(bias_sums_.tensor(), c * vocab, acc_));
    }
    if (dweight_.data() != nullptr) {
      void* const sums = weight_sums_.data() != nullptr ? weight_sums_.data() : dweight_.data();
      grads.transposed = true;
      gemm::multiply(grads, inputs(first), nullptr, sums, acc_, width, vocab, width, params.rows,
                     c > 0);
    }
  }

  const LinearProblem& p_;
  DType out_, acc_;
  Tensor logits_, lse_;
  Output dx_, dweight_, weight_sums_, dbias_, bias_sums_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_cross_entropy(
    const Tensor& x, const Tensor& weight, const OptTensor& bias, const Tensor& target,
    int64_t ignore_index, double label_smoothing, double z_loss, double softcap, int64_t reduction,
    bool x_grad, bool weight_grad, bool bias_grad) {
  constexpr const char* op = "linear_cross_entropy";
  const Options options{ignore_index, label_smoothing, z_loss, softcap,
                        static_cast<Reduction>(reduction)};
  const bool wanted = x_grad || weight_grad || bias_grad;
  require(!wanted || options.reduction != Reduction::none, op,
          "gradients of unreduced losses are the backward's, got reduction=none");
  const LinearProblem p(op, x, weight, bias, target, options);
  OptTensor row_weights;
  if (wanted) {
    row_weights = empty_tensor(p.loss.leading, p.loss.acc);
    loss_kernels().row_weights(p.loss.params, options.reduction == Reduction::mean, false, nullptr,
                               row_weights->mutable_data_ptr());
  }
  auto [dx, dweight, dbias] =
      LinearLoss(p, p.loss.acc, x_grad, weight_grad, bias_grad).run(row_weights);
  return {p.loss.reduced(p.losses), dx, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, const OptTensor& bias,
    const Tensor& target, int64_t ignore_index, double label_smoothing, double z_loss,
    double softcap, bool x_grad, bool weight_grad, bool bias_grad) {
  const LinearProblem p("linear_cross_entropy_backward", x, weight, bias, target,
                        {ignore_index, label_smoothing, z_loss, softcap, Reduction::none});
  const Tensor row_weights = p.loss.row_weights(grad);
  return LinearLoss(p, p.dtype, x_grad, weight_grad, bias_grad).run(row_weights);
}

const Registry registry([](Registry& ops) {
  ops.implement<linear_cross_entropy>("linear_cross_entropy", differentiable);
  ops.implement<linear_cross_entropy_backward>("linear_cross_entropy_backward");
});

}  // namespace
}  // namespace omniattn::ops::loss
