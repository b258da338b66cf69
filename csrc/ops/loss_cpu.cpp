// cross_entropy and linear_cross_entropy with their backwards on the CPU: checks, allocation,
// chunks.
#include "kernels/loss/loss.h"

#include <tuple>
#include <vector>

#include "ops/gemm.h"

namespace {

using namespace omniattn;
using namespace omniattn::ops;

enum class Reduction : int64_t { none, mean, sum };

// Logits of one chunk of tokens of linear_cross_entropy: 64 MiB of fp32. Smaller chunks pack the
// weight more often (a quarter of the time at 100 rows), larger ones only cost memory.
constexpr int64_t kChunkLogits = int64_t{1} << 24;

struct LossOptions {
  int64_t ignore_index;
  double label_smoothing, z_loss;
  Reduction reduction;
};

LossOptions options_of(const char* op, int64_t ignore_index, double label_smoothing, double z_loss,
                       int64_t reduction) {
  require(reduction >= 0 && reduction <= 2, op, "reduction must be 0, 1 or 2, got ", reduction);
  return {ignore_index, label_smoothing, z_loss, static_cast<Reduction>(reduction)};
}

// Checks that targets (...) fit classes (..., cols) and are in range; counts those kept.
struct Targets {
  Tensor tensor;
  int64_t kept = 0;

  Targets(const char* op, const Tensor& target, Sizes leading, int64_t cols, int64_t ignore_index)
      : tensor(target.is_contiguous() ? target : torch::stable::contiguous(target)) {
    require(target.is_cpu() && target.scalar_type() == ScalarType::Long, op,
            "target must be int64 on the CPU, got scalar type ",
            static_cast<int>(target.scalar_type()));
    require_sizes(op, "target", target, leading);
    for (int64_t i = 0; i < target.numel(); ++i) {
      const int64_t t = data()[i];
      if (t == ignore_index) continue;
      require(t >= 0 && t < cols, op, "target must be in [0, ", cols,
              ") or ignore_index=", ignore_index, ", got target=", t, " at flat index ", i);
      ++kept;
    }
  }
  const int64_t* data() const { return static_cast<const int64_t*>(tensor.const_data_ptr()); }
};

Sizes leading_sizes(const Tensor& t) {
  return {t.sizes().data(), static_cast<size_t>(t.dim() - 1)};
}

template <class F>
void with_compute_type(DType dtype, const F& f) {
  dtype == DType::f64 ? f(double{}) : f(float{});
}

// 1 / number of kept rows for the mean, else 1.
double reduction_weight(Reduction reduction, int64_t kept) {
  return reduction == Reduction::mean ? 1.0 / static_cast<double>(std::max<int64_t>(kept, 1)) : 1.0;
}

// The loss of shape `leading`, or its weighted sum in order.
Tensor reduce_losses(const Tensor& rows, const LossOptions& options, int64_t kept) {
  if (options.reduction == Reduction::none) return rows;
  const DType acc = dtype_of("cross_entropy", "loss", rows);
  const Tensor total = empty_cpu(Sizes{}, acc);
  with_compute_type(acc, [&]<class C>(C) {
    const C* const losses = static_cast<const C*>(rows.const_data_ptr());
    double sum = 0;
    for (int64_t i = 0; i < rows.numel(); ++i) sum += static_cast<double>(losses[i]);
    *static_cast<C*>(total.mutable_data_ptr()) =
        static_cast<C>(sum * reduction_weight(options.reduction, kept));
  });
  return total;
}

// The weight of every row's gradient: grad (a scalar, or one per row) times the reduction's.
Tensor row_weights(const char* op, const Tensor* grad, const LossOptions& options, int64_t kept,
                   Sizes leading, DType acc) {
  const Tensor weights = empty_cpu(leading, acc);
  const double scale = reduction_weight(options.reduction, kept);
  const bool per_row = options.reduction == Reduction::none;
  if (grad != nullptr) {
    require_cpu(op, "grad", *grad, acc);
    require_sizes(op, "grad", *grad, per_row ? leading : Sizes{});
  }
  const std::optional<Tensor> dense =
      grad != nullptr ? std::optional<Tensor>(torch::stable::contiguous(*grad)) : std::nullopt;
  with_compute_type(acc, [&]<class C>(C) {
    const C* const from =
        dense.has_value() ? static_cast<const C*>(dense->const_data_ptr()) : nullptr;
    C* const to = static_cast<C*>(weights.mutable_data_ptr());
    for (int64_t i = 0; i < weights.numel(); ++i) {
      to[i] = static_cast<C>(scale) * (from == nullptr ? C(1) : from[per_row ? i : 0]);
    }
  });
  return weights;
}

CrossEntropyParams params_of(DType dtype, int64_t rows, int64_t cols, const void* logits,
                             int64_t stride, const int64_t* target, const LossOptions& options) {
  CrossEntropyParams p{};
  p.dtype = dtype;
  p.rows = rows;
  p.cols = cols;
  p.logits = logits;
  p.stride = stride;
  p.target = target;
  p.ignore_index = options.ignore_index;
  p.label_smoothing = options.label_smoothing;
  p.z_loss = options.z_loss;
  return p;
}

void run_forward(const CrossEntropyParams& p) {
  const auto forward = loss_kernels().forward;
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, p.cols));
  parallel_ranges(p.rows, grain, [&](int64_t a, int64_t b) { forward(p, a, b); });
}

void run_backward(const CrossEntropyBackwardParams& p) {
  const auto backward = loss_kernels().backward;
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, p.forward.cols));
  parallel_ranges(p.forward.rows, grain, [&](int64_t a, int64_t b) { backward(p, a, b); });
}

// ---- cross_entropy ------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                         int64_t ignore_index, double label_smoothing,
                                         double z_loss, int64_t reduction) {
  constexpr const char* op = "cross_entropy";
  const LossOptions options = options_of(op, ignore_index, label_smoothing, z_loss, reduction);
  const DType dtype = dtype_of(op, "logits", logits), acc = accumulator(dtype);
  require_cpu(op, "logits", logits, dtype);
  const Rows rows = as_rows(op, "logits", logits);
  const Targets targets(op, target, leading_sizes(logits), rows.cols, ignore_index);

  const Tensor loss = empty_cpu(leading_sizes(logits), acc);
  const Tensor lse = empty_cpu({&rows.rows, 1}, acc);
  CrossEntropyParams p =
      params_of(dtype, rows.rows, rows.cols, rows.data(), rows.stride, targets.data(), options);
  p.loss = loss.mutable_data_ptr();
  p.lse = lse.mutable_data_ptr();
  run_forward(p);
  return {reduce_losses(loss, options, targets.kept), lse};
}

Tensor cross_entropy_backward(const Tensor& grad, const Tensor& logits, const Tensor& target,
                              const Tensor& lse, int64_t ignore_index, double label_smoothing,
                              double z_loss, int64_t reduction) {
  constexpr const char* op = "cross_entropy_backward";
  const LossOptions options = options_of(op, ignore_index, label_smoothing, z_loss, reduction);
  const DType dtype = dtype_of(op, "logits", logits), acc = accumulator(dtype);
  require_cpu(op, "logits", logits, dtype);
  const Rows rows = as_rows(op, "logits", logits);
  const Targets targets(op, target, leading_sizes(logits), rows.cols, ignore_index);
  require_cpu(op, "lse", lse, acc);
  require_sizes(op, "lse", lse, {&rows.rows, 1});
  require(lse.is_contiguous(), op, "lse must be contiguous");
  const Tensor weights = row_weights(op, &grad, options, targets.kept, leading_sizes(logits), acc);

  const Tensor dlogits = empty_cpu(logits.sizes(), dtype);
  CrossEntropyBackwardParams p{};
  p.forward =
      params_of(dtype, rows.rows, rows.cols, rows.data(), rows.stride, targets.data(), options);
  p.forward.lse = lse.mutable_data_ptr();
  p.row_weight = weights.const_data_ptr();
  p.dlogits = dlogits.mutable_data_ptr();
  p.stream = rows.rows * rows.cols * size_of(dtype) > kLargeBytes;
  run_backward(p);
  return dlogits;
}

// ---- linear_cross_entropy -----------------------------------------------------------------------

struct LinearLoss {
  const char* op;
  DType dtype, acc;
  Rows x, weight;
  OptTensor bias;
  Targets targets;
  Sizes leading;
  LossOptions options;

  LinearLoss(const char* name, const Tensor& x_, const Tensor& weight_, const OptTensor& bias_,
             const Tensor& target, const LossOptions& options_)
      : op(name),
        dtype(dtype_of(name, "x", x_)),
        acc(accumulator(dtype)),
        x(as_rows(name, "x", x_)),
        weight(as_rows(name, "weight", weight_)),
        bias(contiguous(bias_)),
        targets(name, target, leading_sizes(x_), weight.rows, options_.ignore_index),
        leading(leading_sizes(x_)),
        options(options_) {
    require_cpu(op, "x", x_, dtype);
    require_cpu(op, "weight", weight_, dtype);
    require(weight_.dim() == 2 && weight.cols == x.cols, op,
            "weight must have shape (V, K) with x (..., K), got K=", x.cols, " and ", weight.cols);
    if (bias.has_value()) {
      require_cpu(op, "bias", *bias, dtype);
      require_sizes(op, "bias", *bias, {&weight.rows, 1});
    }
  }

  // Fills `losses` (tokens), and gradients of `out` dtype for given weights of the rows where
  // wanted. Logits and their gradients live in fp32 for one chunk of tokens at a time.
  std::tuple<Tensor, Tensor, Tensor> run(const Tensor& losses, const OptTensor& row_weight,
                                         DType out, bool x_grad, bool weight_grad,
                                         bool bias_grad) const {
    const int64_t tokens = x.rows, vocab = weight.rows, width = x.cols;
    const int64_t most = std::max<int64_t>(1, kChunkLogits / std::max<int64_t>(1, vocab));
    const int64_t chunks = std::max<int64_t>(1, (tokens + most - 1) / most);
    const int64_t chunk = (tokens + chunks - 1) / chunks;
    const int64_t logits_sizes[] = {chunk, vocab};
    const Tensor logits = empty_cpu({logits_sizes, 2}, acc);
    const Tensor lse = empty_cpu({&chunk, 1}, acc);

    constexpr int64_t kNone = 0;
    const Tensor dx = empty_cpu(x_grad ? x.tensor.sizes() : Sizes{&kNone, 1}, out);
    const int64_t weight_sizes[] = {vocab, width};
    const Sizes weight_shape = weight_grad ? Sizes{weight_sizes, 2} : Sizes{&kNone, 1};
    const Tensor dweight = empty_cpu(weight_shape, out);
    const Tensor weight_sums = out == acc ? dweight : empty_cpu(weight_shape, acc);
    const int64_t bias_sizes[] = {chunks, bias_grad ? vocab : 0};
    const Tensor bias_sums = empty_cpu({bias_sizes, 2}, acc);
    const Tensor dbias = empty_cpu({&bias_sizes[1], 1}, out);

    const int64_t size = size_of(dtype), acc_size = size_of(acc);
    const Operand weights{weight.data(), dtype, weight.stride};
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t first = c * chunk;
      const int64_t rows = std::clamp<int64_t>(tokens - first, 0, chunk);
      const Operand inputs{static_cast<const char*>(x.data()) + first * x.stride * size, dtype,
                           x.stride};
      Operand transposed = weights;
      transposed.transposed = true;
      multiply(inputs, transposed, data_or_null(bias), logits.mutable_data_ptr(), acc, vocab, rows,
               vocab, width);

      CrossEntropyBackwardParams p{};
      p.forward = params_of(acc, rows, vocab, logits.const_data_ptr(), vocab,
                            targets.data() + first, options);
      p.forward.loss = static_cast<char*>(losses.mutable_data_ptr()) + first * acc_size;
      p.forward.lse = lse.mutable_data_ptr();
      run_forward(p.forward);
      if (!row_weight.has_value()) continue;
      p.row_weight = static_cast<const char*>(row_weight->const_data_ptr()) + first * acc_size;
      p.dlogits = logits.mutable_data_ptr();
      run_backward(p);

      Operand grads{logits.const_data_ptr(), acc, vocab};
      if (x_grad) {
        multiply(grads, weights, nullptr,
                 static_cast<char*>(dx.mutable_data_ptr()) + first * width * size_of(out), out,
                 width, rows, width, vocab);
      }
      if (bias_grad) {
        sum_columns({logits, rows, vocab, vocab}, acc,
                    static_cast<char*>(bias_sums.mutable_data_ptr()) + c * vocab * acc_size);
      }
      if (weight_grad) {
        grads.transposed = true;
        multiply(grads, inputs, nullptr, weight_sums.mutable_data_ptr(), acc, width, vocab, width,
                 rows, c > 0);
      }
    }
    if (weight_grad && out != acc) sum_chunks(weight_sums, 1, dweight, out);
    if (bias_grad) sum_chunks(bias_sums, chunks, dbias, out);
    return {dx, dweight, dbias};
  }

  static void sum_chunks(const Tensor& sums, int64_t chunks, const Tensor& total, DType out) {
    const auto sum = loss_kernels().sum_chunks;
    parallel_ranges(total.numel(), 65536, [&](int64_t a, int64_t b) {
      sum(out, sums.const_data_ptr(), chunks, total.numel(), total.mutable_data_ptr(), a, b);
    });
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_cross_entropy(
    const Tensor& x, const Tensor& weight, const OptTensor& bias, const Tensor& target,
    int64_t ignore_index, double label_smoothing, double z_loss, int64_t reduction, bool x_grad,
    bool weight_grad, bool bias_grad) {
  constexpr const char* op = "linear_cross_entropy";
  const LossOptions options = options_of(op, ignore_index, label_smoothing, z_loss, reduction);
  const bool wanted = x_grad || weight_grad || bias_grad;
  require(!wanted || options.reduction != Reduction::none, op,
          "gradients of unreduced losses are the backward's, got reduction=none");
  const LinearLoss loss(op, x, weight, bias, target, options);
  const Tensor losses = empty_cpu(loss.leading, loss.acc);
  OptTensor weights;
  if (wanted) {
    weights = row_weights(op, nullptr, options, loss.targets.kept, loss.leading, loss.acc);
  }
  auto [dx, dweight, dbias] = loss.run(losses, weights, loss.acc, x_grad, weight_grad, bias_grad);
  return {reduce_losses(losses, options, loss.targets.kept), dx, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, const OptTensor& bias,
    const Tensor& target, int64_t ignore_index, double label_smoothing, double z_loss, bool x_grad,
    bool weight_grad, bool bias_grad) {
  constexpr const char* op = "linear_cross_entropy_backward";
  const LossOptions options{ignore_index, label_smoothing, z_loss, Reduction::none};
  const LinearLoss loss(op, x, weight, bias, target, options);
  const Tensor losses = empty_cpu(loss.leading, loss.acc);
  const Tensor weights = row_weights(op, &grad, options, loss.targets.kept, loss.leading, loss.acc);
  return loss.run(losses, weights, loss.dtype, x_grad, weight_grad, bias_grad);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, CPU, m) {
  OMNIATTN_IMPL(m, "cross_entropy", cross_entropy);
  m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  OMNIATTN_IMPL(m, "linear_cross_entropy", linear_cross_entropy);
  m.impl("linear_cross_entropy_backward", TORCH_BOX(&linear_cross_entropy_backward));
}
