// dsa_indexer_loss: checks and allocation. indexer_loss_cpu.cpp and indexer_loss_cuda.cpp run it.
#include "ops/sparse/indexer_loss.h"

#include "ops/device.h"
#include "ops/registry.h"

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

}  // namespace

Call::Call(const char* op_, const Inputs& in, const Options& options) : op(op_) {
  const DType dtype = dtype_of(op, "q_idx", in.q_idx);
  acc = accumulator(dtype);
  const auto rows = [&](const char* name, const Tensor& t, int64_t dims) {
    require_tensor(op, name, t, dtype);
    require(t.dim() == dims, op, name, " must have ", dims, " dimensions, got ", t.dim());
    return with_unit_last_stride(t);
  };
  q_idx = rows("q_idx", in.q_idx, 4);
  k_idx = rows("k_idx", in.k_idx, 3);
  q = rows("q", in.q, 4);
  k = rows("k", in.k, 4);
  const int64_t batch = q_idx.size(0), tq = q_idx.size(1), heads = q_idx.size(2);
  const int64_t tk = k_idx.size(1), d = q_idx.size(3), hq = q.size(2), hkv = k.size(2);
  require_sizes(op, "k_idx", k_idx, {batch, tk, d});
  require_sizes(op, "q", q, {batch, tq, hq, k.size(3)});
  require_sizes(op, "k", k, {batch, tk, hkv, k.size(3)});
  require(hkv > 0 ? hq % hkv == 0 : hq == 0, op, "Hq must be a multiple of Hkv, got Hq=", hq,
          ", Hkv=", hkv);
  require_tensor(op, "lse", in.lse, acc);
  require_sizes(op, "lse", in.lse, {batch, hq, tq});
  lse = as_dense(in.lse);
  int64_t count = 0;
  if (in.w.has_value()) {
    require_tensor(op, "w", *in.w, acc);
    require_sizes(op, "w", *in.w, {batch, tq, heads});
    w = as_dense(*in.w);
  }
  if (in.indices.has_value()) {
    require_tensor(op, "indices", *in.indices, ScalarType::Int);
    require(in.indices->dim() == 3, op, "indices must have 3 dimensions, got ", in.indices->dim());
    count = in.indices->size(2);
    require_sizes(op, "indices", *in.indices, {batch, tq, count});
    indices = as_dense(*in.indices);
  }
  if (in.key_padding.has_value()) {
    require_tensor(op, "key_padding", *in.key_padding, ScalarType::Bool);
    require_sizes(op, "key_padding", *in.key_padding, {batch, tk});
    real = with_unit_last_stride(*in.key_padding);
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
       .scale = options.scale,
       .causal = options.causal,
       .relu = options.relu};
}

namespace {

OMNIATTN_FIELDS(Incoming, Tensor grad_loss);
OMNIATTN_FIELDS(Saved, Tensor kept);

// loss (B, Tq) in the compute dtype; kept: for the backward (kernels/indexer/indexer_loss.h).
OMNIATTN_FIELDS(Results, Tensor loss; Output kept);

Results dsa_indexer_loss(const OpCall& given, const Inputs& in, const Options& options) {
  const DeviceScope scope(in.q_idx);
  const Call call(given.op, in, options);
  const IndexerLossParams& p = call.p;
  const Output kept(given.saves, {p.batch, p.tq, loss_kept(p)}, call.acc);
  const Tensor loss = empty_tensor({p.batch, p.tq}, call.acc);
  if (loss.numel() > 0) forward(call, loss, kept);
  return {loss, kept};
}

Gradients dsa_indexer_loss_backward(const OpCall& given, const Incoming& grads, const Inputs& in,
                                    const Saved& saved, const Options& options) {
  const char* const op = given.op;
  const DeviceScope scope(in.q_idx);
  const Call call(op, in, options);
  const IndexerLossParams& p = call.p;
  require_tensor(op, "grad_loss", grads.grad_loss, call.acc);
  require_sizes(op, "grad_loss", grads.grad_loss, {p.batch, p.tq});
  require_tensor(op, "kept", saved.kept, call.acc);
  require_sizes(op, "kept", saved.kept, {p.batch, p.tq, loss_kept(p)});
  return backward(call, as_dense(grads.grad_loss), as_dense(saved.kept));
}

const Registry registry([](Registry& ops) {
  ops.constant("indexer_loss_kept", kLossKept);
  ops.add<dsa_indexer_loss>("dsa_indexer_loss", saves_last);
  ops.add<dsa_indexer_loss_backward>("dsa_indexer_loss_backward");
});

}  // namespace
}  // namespace omniattn::ops::indexer_loss
