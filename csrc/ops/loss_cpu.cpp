// cross_entropy and linear_cross_entropy with their backwards on the CPU: loops over rows, chunks
// of tokens.
#include "ops/loss.h"

#include "ops/gemm.h"

namespace {

// Logits of one chunk of tokens of linear_cross_entropy: 64 MiB of fp32. Smaller chunks pack the
// weight more often (a quarter of the time at 100 rows), larger ones only cost memory.
constexpr int64_t kChunkLogits = int64_t{1} << 24;

template <class F>
void with_compute_type(DType dtype, const F& f) {
  dtype == DType::f64 ? f(double{}) : f(float{});
}

// 1 / number of kept rows for the mean, else 1.
double weight_of(const CrossEntropyParams& p, Reduction reduction) {
  if (reduction != Reduction::mean) return 1.0;
  const auto ignored = std::count(p.target, p.target + p.rows, p.ignore_index);
  return 1.0 / static_cast<double>(std::max<int64_t>(p.rows - ignored, 1));
}

int64_t grain_of(int64_t cols) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, cols)); }

bool writes_gradients(DType, DType) { return false; }

void check_targets(const char* op, const CrossEntropyParams& p) {
  for (int64_t i = 0; i < p.rows; ++i) {
    const int64_t t = p.target[i];
    require((t >= 0 && t < p.cols) || t == p.ignore_index, op, "target must be in [0, ", p.cols,
            ") or ignore_index=", p.ignore_index, ", got target=", t, " at flat index ", i);
  }
}

void run_forward(const CrossEntropyParams& p) {
  const auto forward = loss_kernels().forward;
  parallel_ranges(p.rows, grain_of(p.cols), [&](int64_t a, int64_t b) { forward(p, a, b); });
}

void run_backward(const CrossEntropyBackwardParams& p) {
  const auto backward = loss_kernels().backward;
  parallel_ranges(p.forward.rows, grain_of(p.forward.cols),
                  [&](int64_t a, int64_t b) { backward(p, a, b); });
}

void run_total(const CrossEntropyParams& p, Reduction reduction, void* total) {
  with_compute_type(p.dtype, [&]<class C>(C) {
    double sum = 0;
    for (int64_t i = 0; i < p.rows; ++i) sum += static_cast<double>(static_cast<C*>(p.loss)[i]);
    *static_cast<C*>(total) = static_cast<C>(sum * weight_of(p, reduction));
  });
}

void run_row_weights(const CrossEntropyParams& p, Reduction reduction, const void* grad,
                     void* weights) {
  with_compute_type(p.dtype, [&]<class C>(C) {
    const C scale = static_cast<C>(weight_of(p, reduction));
    for (int64_t i = 0; i < p.rows; ++i) {
      const int64_t from = reduction == Reduction::none ? i : 0;
      static_cast<C*>(weights)[i] = scale * static_cast<const C*>(grad)[from];
    }
  });
}

struct LinearLoss {
  const char* op;
  DType dtype, acc;
  Rows x, weight;
  OptTensor bias;
  Sizes leading;
  Tensor targets, losses;
  CrossEntropyParams every;  // all tokens, without their logits

  LinearLoss(const char* name, const Tensor& x_, const Tensor& weight_, const OptTensor& bias_,
             const Tensor& target, const LossOptions& options)
      : op(name),
        dtype(dtype_of(name, "x", x_)),
        acc(accumulator(dtype)),
        x(as_rows(name, "x", x_)),
        weight(as_rows(name, "weight", weight_)),
        bias(contiguous(bias_)),
        leading(leading_sizes(x_)),
        targets(dense_targets(name, target, leading)),
        losses(empty_tensor(leading, acc)),
        every(params_of(acc, x.rows, weight.rows, nullptr, weight.rows, targets.const_data_ptr(),
                        options)) {
    every.loss = losses.mutable_data_ptr();
    require_tensor(op, "x", x_, dtype);
    require_tensor(op, "weight", weight_, dtype);
    require(weight_.dim() == 2 && weight.cols == x.cols, op,
            "weight must have shape (V, K) with x (..., K), got K=", x.cols, " and ", weight.cols);
    if (bias.has_value()) {
      require_tensor(op, "bias", *bias, dtype);
      require_sizes(op, "bias", *bias, {&weight.rows, 1});
    }
    check_targets(op, every);
  }

  // Fills `losses`, and gradients of `out` dtype for given weights of the rows where wanted. Logits
  // and their gradients live in fp32 for one chunk of tokens at a time.
  std::tuple<Tensor, Tensor, Tensor> run(const OptTensor& row_weight, DType out, bool x_grad,
                                         bool weight_grad, bool bias_grad) const {
    const int64_t tokens = x.rows, vocab = weight.rows, width = x.cols;
    const int64_t most = std::max<int64_t>(1, kChunkLogits / std::max<int64_t>(1, vocab));
    const int64_t chunks = std::max<int64_t>(1, (tokens + most - 1) / most);
    const int64_t chunk = (tokens + chunks - 1) / chunks;
    const int64_t logits_sizes[] = {chunk, vocab};
    const Tensor logits = empty_tensor({logits_sizes, 2}, acc);
    const Tensor lse = empty_tensor({&chunk, 1}, acc);

    constexpr int64_t kNone = 0;
    const Tensor dx = empty_tensor(x_grad ? x.tensor.sizes() : Sizes{&kNone, 1}, out);
    const int64_t weight_sizes[] = {vocab, width};
    const Sizes weight_shape = weight_grad ? Sizes{weight_sizes, 2} : Sizes{&kNone, 1};
    const Tensor dweight = empty_tensor(weight_shape, out);
    const Tensor weight_sums = out == acc ? dweight : empty_tensor(weight_shape, acc);
    const int64_t bias_sizes[] = {chunks, bias_grad ? vocab : 0};
    const Tensor bias_sums = empty_tensor({bias_sizes, 2}, acc);
    const Tensor dbias = empty_tensor({&bias_sizes[1], 1}, out);

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
      p.forward = every;
      p.forward.rows = rows;
      p.forward.logits = logits.const_data_ptr();
      p.forward.target += first;
      p.grad_dtype = acc;
      p.forward.loss = static_cast<char*>(every.loss) + first * acc_size;
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
    int64_t ignore_index, double label_smoothing, double z_loss, double softcap, int64_t reduction,
    bool x_grad, bool weight_grad, bool bias_grad) {
  constexpr const char* op = "linear_cross_entropy";
  const LossOptions options =
      options_of(op, ignore_index, label_smoothing, z_loss, softcap, reduction);
  const bool wanted = x_grad || weight_grad || bias_grad;
  require(!wanted || options.reduction != Reduction::none, op,
          "gradients of unreduced losses are the backward's, got reduction=none");
  const LinearLoss loss(op, x, weight, bias, target, options);
  OptTensor weights;
  if (wanted) {
    weights = empty_tensor(loss.leading, loss.acc);
    with_compute_type(loss.acc, [&]<class C>(C) {
      const C one = 1;
      run_row_weights(loss.every, options.reduction, &one, weights->mutable_data_ptr());
    });
  }
  auto [dx, dweight, dbias] = loss.run(weights, loss.acc, x_grad, weight_grad, bias_grad);
  return {reduce_losses(loss.losses, loss.every, options.reduction), dx, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, const OptTensor& bias,
    const Tensor& target, int64_t ignore_index, double label_smoothing, double z_loss,
    double softcap, bool x_grad, bool weight_grad, bool bias_grad) {
  constexpr const char* op = "linear_cross_entropy_backward";
  const LossOptions options{ignore_index, label_smoothing, z_loss, softcap, Reduction::none};
  const LinearLoss loss(op, x, weight, bias, target, options);
  const Tensor weights = row_weights(op, grad, loss.every, Reduction::none, loss.leading);
  return loss.run(weights, loss.dtype, x_grad, weight_grad, bias_grad);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, CPU, m) {
  OMNIATTN_IMPL(m, "linear_cross_entropy", linear_cross_entropy);
  m.impl("linear_cross_entropy_backward", TORCH_BOX(&linear_cross_entropy_backward));
}
