// multi_token_attention on the CPU.
#include "ops/attention/multi_token.h"

#include "kernels/multi_token/multi_token.h"

#include <algorithm>
#include <vector>

#include "ops/registry.h"
#include "ops/shards.h"
#include "ops/stage.h"
#include "ops/step_view.h"

namespace omniattn::ops::multi_token {
namespace {

// Items of the backward, each with sums of its own: enough for threads, few for the memory.
constexpr int64_t kBackwardItems = 8;

// Checked arguments of forward and backward.
struct Problem {
  const char* op;
  DType dtype, acc;
  MultiToken shared{};
  std::vector<Tensor> copies;  // of arguments that kernels cannot read in place
  Tensor packed;

  Problem(const OpCall& call, const Inputs& in, const Options& x)
      : op(call.op), dtype(dtype_of(op, "q", in.q)), acc(accumulator(dtype)) {
    for (const auto& [name, t, dims] :
         {std::tuple{"q", &in.q, 4}, std::tuple{"k", &in.k, 4}, std::tuple{"v", &in.v, 4},
          std::tuple{"weight", &in.weight, 3}, std::tuple{"head_weight", &in.head_weight, 3}}) {
      require_tensor(op, name, *t, dtype);
      require(t->dim() == dims, op, name, " must have ", dims, " dimensions, got ", t->dim());
    }
    MultiToken& p = shared;
    p.dtype = dtype;
    p.batch = in.q.size(0), p.queries = in.q.size(1), p.heads = in.q.size(2),
    p.width = in.q.size(3);
    p.keys = in.k.size(1), p.kv_heads = in.k.size(2), p.value_width = in.v.size(3);
    require(p.kv_heads > 0 ? p.heads % p.kv_heads == 0 : p.heads == 0, op,
            "Hq must be a multiple of Hkv, got Hq=", p.heads, ", Hkv=", p.kv_heads);
    p.query_taps = in.weight.size(1), p.key_taps = in.weight.size(2);
    require(p.query_taps >= 1 && p.key_taps % 2 == 1, op,
            "weight must have shape (Hq, cq >= 1, odd ck), got cq=", p.query_taps,
            ", ck=", p.key_taps);
    p.mixed_heads = in.head_weight.size(1);
    require(p.mixed_heads >= 1 && p.heads % p.mixed_heads == 0, op,
            "head_weight must have shape (Hq / C, C, C) with C a divisor of Hq=", p.heads,
            ", got C=", p.mixed_heads);
    p.lead = x.lead;
    require(0 <= p.lead && p.lead <= p.queries, op, "lead must be in [0, ", p.queries,
            "], got lead=", p.lead);
    p.causal = x.causal, p.scale = x.scale;
    p.q = view("q", in.q, in.q.sizes());
    p.k = view("k", in.k, {p.batch, p.keys, p.kv_heads, p.width});
    p.v = view("v", in.v, {p.batch, p.keys, p.kv_heads, p.value_width});
    p.weight = parameter("weight", in.weight, {p.heads, p.query_taps, p.key_taps});
    p.head_weight =
        parameter("head_weight", in.head_weight, {p.groups(), p.mixed_heads, p.mixed_heads});
  }

  std::array<int64_t, 4> out_sizes() const {
    return {shared.batch, shared.rows(), shared.heads, shared.value_width};
  }
  // False if all results are 0.
  bool has_weights() const {
    return shared.batch > 0 && shared.heads > 0 && shared.rows() > 0 && shared.keys > 0;
  }
  StepView view(const char* name, const Tensor& given, Sizes want) {
    return step_view(op, name, given, dtype, want, copies);
  }
  void pack(bool gradients) {
    MultiToken& p = shared;
    p.packs_gradients = gradients;
    packed = scratch(p.packed_elements(), acc);
    p.packed = packed.mutable_data_ptr();
    const MultiTokenKernels& kernels = multi_token_kernels(dtype);
    run_items(p, p.batch * p.kv_heads * p.panels(), kernels.pack_bytes(p), kernels.pack);
  }

 private:
  const void* parameter(const char* name, const Tensor& given, Sizes want) {
    require_sizes(op, name, given, want);
    return copies.emplace_back(as_dense(given)).const_data_ptr();
  }
};

void fill_with_zeros(const Output& result) {
  if (result.data() == nullptr) return;
  Tensor all = result.tensor();
  torch::stable::zero_(all);
}

}  // namespace

Results multi_token_attention(const OpCall& call, const Inputs& in, const Options& options) {
  Problem p(call, in, options);
  const auto sizes = p.out_sizes();
  Results r{.out = {true, {sizes.data(), sizes.size()}, p.dtype}};
  if (!p.has_weights()) {
    fill_with_zeros(r.out);
    return r;
  }
  p.pack(false);
  p.shared.items_per_group = p.shared.blocks();
  const MultiTokenParams params{.problem = p.shared, .out = r.out.data()};
  const MultiTokenKernels& kernels = multi_token_kernels(p.dtype);
  run_items(params, p.shared.items(), kernels.bytes(p.shared), kernels.forward);
  return r;
}

Gradients multi_token_attention_backward(const OpCall& call, const Incoming& grads,
                                         const Inputs& in, const Options& options,
                                         const Wanted& wanted) {
  Problem p(call, in, options);
  Gradients d{.dq = {wanted.q_grad, in.q.sizes(), p.dtype},
              .dk = {wanted.k_grad, in.k.sizes(), p.dtype},
              .dv = {wanted.v_grad, in.v.sizes(), p.dtype},
              .dweight = {wanted.weight_grad, in.weight.sizes(), p.dtype},
              .dhead_weight = {wanted.head_weight_grad, in.head_weight.sizes(), p.dtype}};
  if (!p.has_weights() || !grads.grad_out.has_value()) {
    with_fields(d, [](const auto&... gradient) { (fill_with_zeros(gradient), ...); });
    return d;
  }
  p.pack(true);
  MultiToken& x = p.shared;
  const int64_t parts = std::clamp<int64_t>(kBackwardItems / (x.batch * x.groups()), 1, x.blocks());
  x.items_per_group = parts;
  const auto sizes = p.out_sizes();
  const StepView grad_out = p.view("grad_out", *grads.grad_out, {sizes.data(), sizes.size()});
  Shards items(p.dtype, parts), readers(p.dtype, x.readers() * parts);
  Shards entries(p.dtype, x.batch * parts);
  const MultiTokenBackwardParams params{.problem = x,
                                        .grad_out = grad_out,
                                        .dq = items.zeros_of(d.dq),
                                        .dk = readers.zeros_of(d.dk),
                                        .dv = readers.zeros_of(d.dv),
                                        .dweight = entries.zeros_of(d.dweight),
                                        .dhead_weight = entries.zeros_of(d.dhead_weight)};
  const MultiTokenBackwardKernels& kernels = multi_token_backward_kernels(p.dtype);
  run_items(params, x.items(), kernels.bytes(x), kernels.backward);
  for (const Shards* each : {&items, &readers, &entries}) each->sum();
  return d;
}

namespace {

const Registry registry([](Registry& ops) {
  ops.implement<multi_token_attention>("multi_token_attention", differentiable);
  ops.implement<multi_token_attention_backward>("multi_token_attention_backward");
});

}  // namespace
}  // namespace omniattn::ops::multi_token
