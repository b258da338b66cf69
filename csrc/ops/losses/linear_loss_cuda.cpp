// Products of linear_loss.h on CUDA: torch's (cuBLAS).
#include "kernels/sums/add.h"

#include "ops/losses/linear_loss.h"
#include "ops/torch_ops.h"

namespace omniattn::ops::loss {
namespace {

// Elements of a product that is added to the sums of dweight, at most: torch's products that
// accumulate have Scalar arguments.
constexpr int64_t kAddedElements = kChunkLogits / 4;

Tensor rows_of(const Tensor& matrix, int64_t first, int64_t count) {
  return slice(matrix, 0, first, count);
}
// x or dx as (tokens, K).
Tensor as_tokens(const Projection& p, const Tensor& x) {
  return torch::stable::reshape(x, {p.x.rows, p.x.cols});
}
Tensor transposed(const Tensor& matrix) { return torch::stable::transpose(matrix, 0, 1); }

// sums (V, K) = grads (n, V)^T x (n, K), or += it.
void add_weight_gradients(const char* op, const Tensor& grads, const Tensor& x, const Tensor& sums,
                          DType acc, bool accumulate) {
  if (!accumulate) {
    multiply(transposed(grads), x, sums);
    return;
  }
  const int64_t vocab = sums.size(0), width = sums.size(1);
  const int64_t step = std::min(vocab, grain_of(width, kAddedElements));
  const Tensor product = empty_tensor({step, width}, acc);
  for (int64_t first = 0; first < vocab; first += step) {
    const int64_t count = std::min(step, vocab - first);
    const Tensor part = rows_of(product, 0, count);
    multiply(transposed(slice(grads, 1, first, count)), x, part);
    require_launched(op, launch_add(acc, part.const_data_ptr(), width, count, width,
                                    at(sums, first * width, acc), stream()));
  }
}

}  // namespace

void Projection::multiply(int64_t first, int64_t count, const Tensor& logits) const {
  ops::multiply(rows_of(as_tokens(*this, x.tensor), first, count), transposed(weight.tensor),
                rows_of(logits, 0, count));
  if (!bias.has_value()) return;
  require_launched(op, launch_add(dtype, bias->const_data_ptr(), 0, count, weight.rows,
                                  logits.mutable_data_ptr(), stream()));
}

void LayerGradients::add(int64_t c, const Tensor& dlogits) {
  const int64_t first = chunks_.first(c), count = chunks_.length(c);
  const Tensor grads = rows_of(dlogits, 0, count);
  if (dx_.data() != nullptr) {
    multiply(grads, p_.weight.tensor, rows_of(as_tokens(p_, dx_.tensor()), first, count));
  }
  if (dbias_.data() != nullptr) {
    Tensor sums = torch::stable::select(bias_sums_.tensor(), 0, c);
    torch::stable::sum_out(sums, grads, Sizes{0}, false, scalar_type(p_.acc));
  }
  if (dweight_.data() != nullptr) {
    const Output& sums = weight_sums_.data() != nullptr ? weight_sums_ : dweight_;
    add_weight_gradients(p_.op, grads, rows_of(as_tokens(p_, p_.x.tensor), first, count),
                         sums.tensor(), p_.acc, c > 0);
  }
}

Gradients LayerGradients::total() const {
  Tensor dweight = dweight_.tensor(), dbias = dbias_.tensor();
  if (weight_sums_.data() != nullptr) torch::stable::copy_(dweight, weight_sums_.tensor());
  if (dbias_.data() != nullptr) {
    torch::stable::copy_(dbias, torch::stable::sum(bias_sums_.tensor(), Sizes{0}));
  }
  return {dx_.tensor(), dweight, dbias};
}

}  // namespace omniattn::ops::loss
