// attention_tangents: checks and results.
#include "ops/attention/attention_tangents.h"

#include "ops/attention/attention_sequences.h"
#include "ops/registry.h"

namespace omniattn::ops::attention_tangents {
namespace {

// Rules of the score that leave S' = scale (q' k^T + q k'^T).
constexpr uint32_t kConstantTerms = term(ScoreKind::sinks) | terms_of(ScoreRole::head_scale) |
                                    terms_of(ScoreRole::bias) | terms_of(ScoreRole::table);

}  // namespace

// Tangents of attention along tangents of q, k and v and, with grad_out, those of its gradients,
// also along tangents of grad_out and grad_lse. out, lse and lse_tail are the results of the call.
Results attention_tangents(const OpCall& given, const Heads& heads, const Tangents& tangents,
                           const Gradients& grads, const Saved& saved, const Rules& rules) {
  using namespace attention;
  const char* const op = given.op;
  const auto& [q, k, v] = heads;
  require(!starts_with(rules.mask, LayoutKind::paged), op, "pages must be gathered first");
  const Call call =
      check({op, q, k, v, saved.aux, saved.seed, rules.mask, rules.score, rules.params});
  const AttentionProblem& p = call.problem;
  require((p.terms & ~kConstantTerms) == 0, op,
          "the score must be a softmax of scaled products, a bias, tables and sinks");
  const bool wants_gradients = grads.grad_out.has_value();
  require(wants_gradients || !(grads.grad_lse.has_value() || grads.tangent_grad_out.has_value() ||
                               grads.tangent_grad_lse.has_value()),
          op, "grad_out must be given with other gradients");

  Tensors kept;
  const auto rows = [&](const char* name, const Tensor& t, Sizes sizes) {
    kept.push_back(as_heads(op, name, t, scalar_type(p.dtype)));
    require_sizes(op, name, t, sizes);
    return view_of(kept.back());
  };
  const auto optional_rows = [&](const char* name, const OptTensor& t, Sizes sizes) {
    return t.has_value() ? rows(name, *t, sizes) : HeadView{};
  };
  const auto statistics = [&](const char* name, const OptTensor& t) -> const void* {
    if (!t.has_value()) return nullptr;
    require_tensor(op, name, *t, accumulator(p.dtype));
    require_sizes(op, name, *t, call.lse_sizes);
    kept.push_back(torch::stable::contiguous(*t));
    return kept.back().const_data_ptr();
  };
  AttentionTangentParams x{};
  x.problem = p;
  x.out = rows("out", saved.out, call.out_sizes);
  x.lse = statistics("lse", saved.lse);
  x.lse_tail = statistics("lse_tail", saved.lse_tail);
  x.moved_q = optional_rows("tangent_q", tangents.tangent_q, q.sizes());
  x.moved_k = optional_rows("tangent_k", tangents.tangent_k, k.sizes());
  x.moved_v = optional_rows("tangent_v", tangents.tangent_v, v.sizes());
  x.grad_out = optional_rows("grad_out", grads.grad_out, call.out_sizes);
  x.moved_grad_out = optional_rows("tangent_grad_out", grads.tangent_grad_out, call.out_sizes);
  x.grad_lse = statistics("grad_lse", grads.grad_lse);
  x.moved_grad_lse = statistics("tangent_grad_lse", grads.tangent_grad_lse);

  const auto gradient = [&](const Tensor& t) {
    return wants_gradients ? empty_tensor(t.sizes(), p.dtype) : empty_tensor({0}, p.dtype);
  };
  const Results y{empty_tensor(call.out_sizes, p.dtype),
                  empty_tensor(call.lse_sizes, accumulator(p.dtype)), gradient(q), gradient(k),
                  gradient(v)};
  x.moved_out = mutable_view_of(y.tangent_out);
  x.moved_lse = y.tangent_lse.mutable_data_ptr();
  if (wants_gradients) {
    x.moved_grad_q = mutable_view_of(y.tangent_grad_q);
    x.moved_grad_k = mutable_view_of(y.tangent_grad_k);
    x.moved_grad_v = mutable_view_of(y.tangent_grad_v);
  }
  // Kernels do not write rows of sequences without queries or keys.
  const bool has_work = p.batch > 0 && p.hq > 0 && p.tq > 0 && p.tk > 0;
  if (call.has_layout || !has_work) {
    with_fields(y, [](const auto&... t) { (torch::stable::fill_(t, 0), ...); });
  }
  if (has_work) run_tangents(x, call);
  return y;
}

namespace {

const Registry registry([](Registry& ops) {
  ops.implement<attention_tangents>("attention_tangents");
});

}  // namespace
}  // namespace omniattn::ops::attention_tangents
