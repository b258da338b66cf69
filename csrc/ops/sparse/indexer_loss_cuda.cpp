// dsa_indexer_loss on CUDA: torch's products for some queries at a time, and the kernels around
// them.
#include <algorithm>

#include "kernels/sums/add.h"
#include "ops/device.h"
#include "ops/sparse/indexer_loss.h"
#include "ops/torch_ops.h"

namespace omniattn::ops::indexer_loss {
namespace {

// Products of queries and keys in memory at a time: 16 MiB in fp32. Tests under emulation have
// several parts.
#if defined(OMNIATTN_EMULATED)
constexpr int64_t kProducts = int64_t{1} << 9;
#else
constexpr int64_t kProducts = int64_t{1} << 22;
#endif

// Queries and keys of the indexer or of the attention, in the compute type.
struct Side {
  int64_t groups, heads, width;  // heads of keys, and heads of queries for each
  Tensor rows;                   // (B groups, Tq heads, width)
  OptTensor keys;                // (B groups, Tk, width); without lists
  HeadView view;                 // of the keys given
};

// t (B, T, groups heads, width) as (B groups, T heads, width) of dtype `acc`.
Tensor by_group(const Tensor& t, DType acc, int64_t groups, int64_t heads, int64_t width) {
  const int64_t batch = t.size(0), tokens = t.size(1);
  const Tensor split =
      torch::stable::reshape(as_dtype(t, acc), {batch, tokens, groups, heads, width});
  return torch::stable::reshape(torch::stable::transpose(split, 1, 2),
                                {batch * groups, tokens * heads, width});
}

Side side_of(const Call& call, const Tensor& q, const Tensor& k, const HeadView& view) {
  const int64_t groups = k.dim() == 4 ? k.size(2) : 1, width = q.size(3);
  const int64_t heads = groups > 0 ? q.size(2) / groups : 0;
  OptTensor keys;
  if (call.p.indices == nullptr) keys = by_group(k, call.acc, groups, 1, width);
  return {groups, heads, width, by_group(q, call.acc, groups, heads, width), keys, view};
}

// A product of the queries of a part: rows (n, m, width), keys (n, s, width), values (n, m, s).
// They are (B, groups, queries, heads, s): with lists n = B groups queries, otherwise n = B groups.
struct Product {
  Tensor rows, keys, values;
};

class Parts {
 public:
  explicit Parts(const Call& call)
      : call_(call),
        lists_(call.p.indices != nullptr),
        columns_(lists_ ? call.p.count : call.p.tk),
        indexer_(side_of(call, call.q_idx, call.k_idx, call.p.k)),
        attention_(side_of(call, call.q, call.k, call.p.attention_k)) {
    const IndexerLossParams& p = call.p;
    const int64_t gathered = lists_ ? p.hkv * p.attention_d + p.d : 0;
    const int64_t each = p.batch * (std::max(p.heads, p.hq) + gathered) * columns_;
    step_ = std::max<int64_t>(1, kProducts / std::max<int64_t>(1, each));
    scores_ = empty_tensor({p.batch, std::min(step_, p.tq), columns_}, call.acc);
    weights_ = empty_tensor({p.batch, std::min(step_, p.tq), columns_}, call.acc);
    if (lists_) places_ = torch::stable::new_empty(scores_, scores_.sizes(), ScalarType::Long);
  }

  // Calls f(rows, product of the indexer) for each part of the queries.
  template <class F>
  void each(bool attends, void* loss, void* kept, const F& f) const {
    const IndexerLossParams& p = call_.p;
    for (int64_t first = 0; first < p.tq; first += step_) {
      IndexerLossRows rows{.problem = p,
                           .first = first,
                           .queries = std::min(step_, p.tq - first),
                           .columns = columns_,
                           .group = attention_.heads,
                           .products = nullptr,
                           .logits = nullptr,
                           .scores = scores_.mutable_data_ptr(),
                           .weights = weights_.mutable_data_ptr(),
                           .loss = loss,
                           .kept = kept};
      const Product product = multiply(indexer_, rows, lists_ ? places() : nullptr);
      rows.products = product.values.mutable_data_ptr();
      OptTensor logits;
      if (attends) {
        logits = multiply(attention_, rows, nullptr).values;
        rows.logits = logits->const_data_ptr();
      }
      f(rows, product);
    }
  }

  bool lists() const { return lists_; }
  // Rows of the keys of a part's lists among B Tk.
  Tensor places_of(const IndexerLossRows& rows) const {
    const Tensor flat = torch::stable::view(*places_, {places_->numel()});
    return slice(flat, 0, 0, call_.p.batch * rows.queries * columns_);
  }

 private:
  int64_t* places() const { return static_cast<int64_t*>(places_->mutable_data_ptr()); }

  Product multiply(const Side& side, const IndexerLossRows& part, int64_t* places) const {
    const IndexerLossParams& p = call_.p;
    Tensor rows = slice(side.rows, 1, part.first * side.heads, part.queries * side.heads);
    OptTensor keys = side.keys;
    if (lists_) {
      const int64_t count = p.batch * side.groups * part.queries;
      rows = torch::stable::reshape(rows, {count, side.heads, side.width});
      keys = empty_tensor({count, columns_, side.width}, call_.acc);
      require_launched(call_.op,
                       launch_indexer_loss_gather(part, side.view, side.groups, side.width,
                                                  keys->mutable_data_ptr(), places, stream()));
    }
    const Tensor values = empty_tensor({rows.size(0), rows.size(1), columns_}, call_.acc);
    multiply_batches(rows, torch::stable::transpose(*keys, 1, 2), values);
    return {rows, *keys, values};
  }

  const Call& call_;
  bool lists_;
  int64_t columns_;
  Side indexer_, attention_;
  int64_t step_;
  Tensor scores_, weights_;
  OptTensor places_;
};

// dk (B, Tk, D) += the products of the gradients and the queries of a part.
void add_key_gradients(const Call& call, const Parts& parts, const IndexerLossRows& rows,
                       const Product& x, const Tensor& dk) {
  const int64_t keys = x.keys.size(0) * x.keys.size(1), width = call.p.d;
  const Tensor found = empty_tensor(x.keys.sizes(), call.acc);
  multiply_batches(torch::stable::transpose(x.values, 1, 2), x.rows, found);
  if (!parts.lists()) {
    require_launched(call.op, launch_add(call.acc, found.const_data_ptr(), width, keys, width,
                                         dk.mutable_data_ptr(), stream()));
  } else if (call.p.tk > 0) {
    call_torch("aten::index_put_", "", torch::stable::view(dk, {call.p.batch * call.p.tk, width}),
               std::vector<OptTensor>{parts.places_of(rows)},
               torch::stable::view(found, {keys, width}), true);
  }
}

}  // namespace

void forward(const Call& call, const Tensor& loss, const Output& kept) {
  const NoGrad no_grad;
  const Parts parts(call);
  parts.each(true, loss.mutable_data_ptr(), kept.data(),
             [&](const IndexerLossRows& rows, const Product&) {
               require_launched(call.op, launch_indexer_loss(rows, stream()));
             });
}

Gradients backward(const Call& call, const Tensor& grad, const Tensor& kept) {
  const NoGrad no_grad;
  const IndexerLossParams& p = call.p;
  const Parts parts(call);
  const Tensor dq = empty_tensor(call.q_idx.sizes(), call.acc);
  Tensor dk = empty_tensor(call.k_idx.sizes(), call.acc);
  torch::stable::zero_(dk);
  const Output dw(call.w.has_value(), {p.batch, p.tq, p.heads}, call.acc);
  parts.each(!parts.lists(), nullptr, kept.mutable_data_ptr(),
             [&](const IndexerLossRows& rows, const Product& x) {
               require_launched(call.op, launch_indexer_loss_backward(
                                             {rows, grad.const_data_ptr(), dw.data()}, stream()));
               const Tensor found = empty_tensor(x.rows.sizes(), call.acc);
               multiply_batches(x.values, x.keys, found);
               Tensor part = slice(dq, 1, rows.first, rows.queries);
               torch::stable::copy_(part, torch::stable::view(found, part.sizes()));
               add_key_gradients(call, parts, rows, x, dk);
             });
  return {as_dtype(dq, p.dtype), as_dtype(dk, p.dtype), dw};
}

}  // namespace omniattn::ops::indexer_loss
