// dsa_indexer_loss on the CPU: checks, allocation, and the split over threads. On CUDA it is a
// composition (python/omniattn/compositions/indexer_loss.py).
#include <algorithm>
#include <tuple>

#include "kernels/indexer/indexer_loss.h"
#include "ops/checks.h"
#include "ops/registry.h"
#include "ops/stage.h"
#include "runtime/denormals.h"

namespace omniattn::ops::indexer_loss {
namespace {

HeadView view_of_heads(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.dim() == 4 ? t.stride(2) : 0};
}

// Null means all keys, so empty lists, which select no key, need a valid address.
const int32_t* lists(const OptTensor& indices) {
  static constexpr int32_t kNone = -1;
  if (!indices.has_value()) return nullptr;
  return indices->numel() > 0 ? static_cast<const int32_t*>(indices->const_data_ptr()) : &kNone;
}

// Checked arguments of both passes.
struct Call {
  Tensor q_idx, k_idx, q, k, lse;
  OptTensor w, indices, real;
  DType acc;
  IndexerLossParams p;

  Call(const char* op, const Tensor& q_idx_, const Tensor& k_idx_, const OptTensor& w_,
       const Tensor& q_, const Tensor& k_, const Tensor& lse_, const OptTensor& indices_,
       const OptTensor& key_padding, double scale, bool causal, bool relu) {
    const DType dtype = dtype_of(op, "q_idx", q_idx_);
    acc = accumulator(dtype);
    const auto rows = [&](const char* name, const Tensor& t, int64_t dims) {
      require_tensor(op, name, t, dtype);
      require(t.dim() == dims, op, name, " must have ", dims, " dimensions, got ", t.dim());
      return with_unit_last_stride(t);
    };
    q_idx = rows("q_idx", q_idx_, 4);
    k_idx = rows("k_idx", k_idx_, 3);
    q = rows("q", q_, 4);
    k = rows("k", k_, 4);
    const int64_t batch = q_idx.size(0), tq = q_idx.size(1), heads = q_idx.size(2);
    const int64_t tk = k_idx.size(1), d = q_idx.size(3), hq = q.size(2), hkv = k.size(2);
    require_sizes(op, "k_idx", k_idx, {batch, tk, d});
    require_sizes(op, "q", q, {batch, tq, hq, k.size(3)});
    require_sizes(op, "k", k, {batch, tk, hkv, k.size(3)});
    require(hkv > 0 ? hq % hkv == 0 : hq == 0, op, "Hq must be a multiple of Hkv, got Hq=", hq,
            ", Hkv=", hkv);
    require_tensor(op, "lse", lse_, acc);
    require_sizes(op, "lse", lse_, {batch, hq, tq});
    lse = as_dense(lse_);
    int64_t count = 0;
    if (w_.has_value()) {
      require_tensor(op, "w", *w_, acc);
      require_sizes(op, "w", *w_, {batch, tq, heads});
      w = as_dense(*w_);
    }
    if (indices_.has_value()) {
      require_tensor(op, "indices", *indices_, ScalarType::Int);
      require(indices_->dim() == 3, op, "indices must have 3 dimensions, got ", indices_->dim());
      count = indices_->size(2);
      require_sizes(op, "indices", *indices_, {batch, tq, count});
      indices = as_dense(*indices_);
    }
    if (key_padding.has_value()) {
      require_tensor(op, "key_padding", *key_padding, ScalarType::Bool);
      require_sizes(op, "key_padding", *key_padding, {batch, tk});
      real = with_unit_last_stride(*key_padding);
    }
    p = {.dtype = dtype,
         .batch = batch,
         .tq = tq,
         .tk = tk,
         .heads = heads,
         .d = d,
         .hq = hq,
         .hkv = hkv,
         .attention_d = k.size(3),
         .q = view_of_heads(q_idx),
         .k = view_of_heads(k_idx),
         .w = data_or_null(w),
         .attention_q = view_of_heads(q),
         .attention_k = view_of_heads(k),
         .lse = lse.const_data_ptr(),
         .indices = lists(indices),
         .count = count,
         .real = static_cast<const uint8_t*>(data_or_null(real)),
         .real_stride = real.has_value() ? real->stride(0) : 0,
         .scale = scale,
         .causal = causal,
         .relu = relu};
  }
};

template <class Params>
void run(AttentionKernel<Params> kernel, const Params& x, int64_t items, int64_t elements) {
  run_items(x, items, elements * size_of(accumulator(x.problem.dtype)),
            [kernel](const Params& params, void* scratch, int64_t begin, int64_t end) {
              const FlushDenormals flush;
              kernel(params, scratch, begin, end);
            });
}

Tensor loss_of(const Call& call, const Tensor* kept) {
  const IndexerLossParams& p = call.p;
  const Tensor loss = empty_tensor({p.batch, p.tq}, call.acc);
  const IndexerLossForwardParams x{p, loss.mutable_data_ptr(),
                                   kept != nullptr ? kept->mutable_data_ptr() : nullptr};
  if (loss.numel() > 0) {
    run(indexer_loss_kernels().forward, x, p.batch * loss_blocks(p), loss_forward_scratch(p));
  }
  return loss;
}

constexpr const char* kOp = "dsa_indexer_loss";

std::tuple<Tensor, Tensor> dsa_indexer_loss(const Tensor& q_idx, const Tensor& k_idx,
                                            const OptTensor& w, const Tensor& q, const Tensor& k,
                                            const Tensor& lse, const OptTensor& indices,
                                            const OptTensor& key_padding, double scale, bool causal,
                                            bool relu) {
  const Call call(kOp, q_idx, k_idx, w, q, k, lse, indices, key_padding, scale, causal, relu);
  const Tensor kept = empty_tensor({call.p.batch, call.p.tq, loss_kept(call.p)}, call.acc);
  return {loss_of(call, &kept), kept};
}

Tensor dsa_indexer_loss_only(const Tensor& q_idx, const Tensor& k_idx, const OptTensor& w,
                             const Tensor& q, const Tensor& k, const Tensor& lse,
                             const OptTensor& indices, const OptTensor& key_padding, double scale,
                             bool causal, bool relu) {
  return loss_of({kOp, q_idx, k_idx, w, q, k, lse, indices, key_padding, scale, causal, relu},
                 nullptr);
}

std::tuple<Tensor, Tensor, Tensor> dsa_indexer_loss_backward(
    const Tensor& grad_loss, const Tensor& q_idx, const Tensor& k_idx, const OptTensor& w,
    const Tensor& q, const Tensor& k, const Tensor& lse, const OptTensor& indices,
    const OptTensor& key_padding, const Tensor& kept_given, double scale, bool causal, bool relu) {
  constexpr const char* op = "dsa_indexer_loss_backward";
  const Call call(op, q_idx, k_idx, w, q, k, lse, indices, key_padding, scale, causal, relu);
  const IndexerLossParams& p = call.p;
  require_tensor(op, "grad_loss", grad_loss, call.acc);
  require_sizes(op, "grad_loss", grad_loss, {p.batch, p.tq});
  require_tensor(op, "kept", kept_given, call.acc);
  require_sizes(op, "kept", kept_given, {p.batch, p.tq, loss_kept(p)});
  const Tensor grad = as_dense(grad_loss), kept = as_dense(kept_given);
  const Tensor dq = empty_tensor(q_idx.sizes(), p.dtype), dk = empty_tensor(k_idx.sizes(), p.dtype);
  const Output dw(w.has_value(), {p.batch, p.tq, p.heads}, call.acc);
  const int64_t splits = loss_splits(p);
  const Tensor sums = scratch(splits * loss_sums(p), call.acc);
  const IndexerLossBackwardParams x{
      .problem = p,
      .grad = grad.const_data_ptr(),
      .kept = kept.const_data_ptr(),
      .q_grad = {dq.mutable_data_ptr(), dq.stride(0), dq.stride(1), dq.stride(2)},
      .k_grad = {dk.mutable_data_ptr(), dk.stride(0), dk.stride(1), 0},
      .w_grad = dw.data(),
      .splits = splits,
      .sums = sums.mutable_data_ptr()};
  const auto& kernels = indexer_loss_kernels();
  run(kernels.backward, x, p.batch * splits, loss_backward_scratch(p));
  parallel_ranges(p.batch * p.tk, grain_of(splits * p.d),
                  [&](int64_t begin, int64_t end) { kernels.finish(x, nullptr, begin, end); });
  return {dq, dk, dw.tensor()};
}

const Registry registry([](Registry& ops) {
  ops.implement<dsa_indexer_loss>("dsa_indexer_loss", differentiable);
  ops.implement<dsa_indexer_loss_only>("dsa_indexer_loss_only");
  ops.implement<dsa_indexer_loss_backward>("dsa_indexer_loss_backward");
});

}  // namespace
}  // namespace omniattn::ops::indexer_loss
