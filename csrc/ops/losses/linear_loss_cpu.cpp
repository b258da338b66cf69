// Products of linear_loss.h on the CPU: gradients of logits are in the accumulator type.
#include "ops/layers/gemm.h"
#include "ops/losses/linear_loss.h"

namespace omniattn::ops::loss {
namespace {

constexpr int64_t kSumTask = 65536;

// total (...), of dtype `out`, = the sum over chunks, added in order.
void sum_chunks(const Tensor& sums, int64_t chunks, const Tensor& total, DType out) {
  const auto sum = loss_kernels(out).sum_chunks;
  parallel_ranges(total.numel(), kSumTask, [&](int64_t a, int64_t b) {
    sum(out, sums.const_data_ptr(), chunks, total.numel(), total.mutable_data_ptr(), a, b);
  });
}

gemm::Operand inputs(const Projection& p, int64_t first) {
  const auto* const rows = static_cast<const char*>(p.x.data());
  return {rows + first * p.x.stride * size_of(p.dtype), p.dtype, p.x.stride};
}
gemm::Operand weights(const Projection& p, bool transposed) {
  return {p.weight.data(), p.dtype, p.weight.stride, transposed};
}

}  // namespace

void Projection::multiply(int64_t first, int64_t count, const Tensor& logits) const {
  gemm::multiply(inputs(*this, first), weights(*this, true), data_or_null(bias),
                 logits.mutable_data_ptr(), acc, weight.rows, count, weight.rows, x.cols);
}

void LayerGradients::add(int64_t c, const Tensor& dlogits) {
  const int64_t vocab = p_.weight.rows, width = p_.x.cols;
  const int64_t first = chunks_.first(c), count = chunks_.length(c);
  gemm::Operand grads{dlogits.const_data_ptr(), p_.acc, vocab};
  if (dx_.data() != nullptr) {
    gemm::multiply(grads, weights(p_, false), nullptr, at(dx_.tensor(), first * width, out_), out_,
                   width, count, width, vocab);
  }
  if (dbias_.data() != nullptr) {
    gemm::sum_columns({dlogits, count, vocab, vocab}, p_.acc,
                      at(bias_sums_.tensor(), c * vocab, p_.acc));
  }
  if (dweight_.data() != nullptr) {
    void* const sums = weight_sums_.data() != nullptr ? weight_sums_.data() : dweight_.data();
    grads.transposed = true;
    gemm::multiply(grads, inputs(p_, first), nullptr, sums, p_.acc, width, vocab, width, count,
                   c > 0);
  }
}

Gradients LayerGradients::total() const {
  const Tensor dweight = dweight_.tensor(), dbias = dbias_.tensor();
  if (weight_sums_.data() != nullptr) sum_chunks(weight_sums_.tensor(), 1, dweight, out_);
  if (dbias_.data() != nullptr) sum_chunks(bias_sums_.tensor(), chunks_.count, dbias, out_);
  return {dx_.tensor(), dweight, dbias};
}

}  // namespace omniattn::ops::loss
