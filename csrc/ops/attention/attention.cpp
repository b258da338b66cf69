// attention, attention_int8, attention_backward, attention_weights, attention_select: checks and
// results, for either device.
#include "ops/attention/attention.h"

#include <algorithm>
#include <cmath>

#include "ops/attention/attention_tangents.h"
#include "ops/device.h"
#include "ops/registry.h"
#include "ops/seed.h"

namespace omniattn::ops::attention {
namespace {

// params: scale, dropout_p, then the parameters of score rules.
constexpr size_t kFixedParams = 2;

// Factors of the rows of k or v, of this shape.
HeadView factors_of(const char* op, const char* name, const Tensor& t, DType dtype, Sizes sizes) {
  require_tensor(op, name, t, accumulator(dtype));
  require_sizes(op, name, t, sizes);
  return view_of(t);
}

void check_dropout(const Arguments& given, Call& call) {
  AttentionProblem& p = call.problem;
  const double dropout_p = given.params[1];
  require(dropout_p >= 0 && dropout_p <= 1, given.op,
          "dropout_p must be in [0, 1], got dropout_p=", dropout_p);
  p.dropout = make_dropout(dropout_p, 0, 0);
  if (dropout_p > 0) {
    require(given.seed.has_value(), given.op, "dropout_p > 0 needs a seed");
    require_seed(given.op, *given.seed);
    decode_seed(call, *given.seed);
  }
}

}  // namespace

Tensor as_heads(const char* op, const char* name, const Tensor& t, ScalarType type) {
  require_tensor(op, name, t, type);
  require(t.dim() == 4, op, name, " must have 4 dimensions (B, T, H, D), got ", t.dim());
  return with_unit_last_stride(t);
}

void read_seed(Call& call, const Tensor& seed) {
  const ElementStream stream = ops::read_seed(seed);
  call.problem.dropout.key = stream.key;
  call.problem.dropout.offset = stream.offset;
}

Call check(const Arguments& given) {
  const auto& [op, q, k, v, aux, seed, mask, score, params, k_scale, v_scale] = given;
  Call call{};
  AttentionProblem& p = call.problem;
  p.dtype = dtype_of(op, "q", q);
  p.is_int8 = k_scale != nullptr;
  const ScalarType type = scalar_type(p.dtype), type_k = p.is_int8 ? ScalarType::Char : type;
  call.kept = {as_heads(op, "q", q, type), as_heads(op, "k", k, type_k),
               as_heads(op, "v", v, type_k)};
  p.batch = q.size(0), p.tq = q.size(1), p.hq = q.size(2), p.d = q.size(3);
  p.tk = k.size(1), p.hkv = k.size(2), p.dv = v.size(3);
  p.lse_stride = p.tq;
  call.out_sizes = {p.batch, p.tq, p.hq, p.dv};
  call.lse_sizes = {p.batch, p.hq, p.tq};
  const int64_t rows = starts_with(mask, LayoutKind::paged) ? k.size(0) : p.batch;
  const int64_t k_sizes[] = {rows, p.tk, p.hkv, p.d}, v_sizes[] = {rows, p.tk, p.hkv, p.dv};
  require_sizes(op, "k", k, {k_sizes, 4});
  require_sizes(op, "v", v, {v_sizes, 4});
  require(p.hq == 0 || (p.hkv > 0 && p.hq % p.hkv == 0), op,
          "Hq must be a multiple of Hkv, got Hq=", p.hq, ", Hkv=", p.hkv);
  p.q = view_of(call.kept[0]);
  p.k = view_of(call.kept[1]);
  p.v = view_of(call.kept[2]);
  if (p.is_int8) {
    p.k_scale = factors_of(op, "k_scale", *k_scale, p.dtype, {k_sizes, 3});
    p.v_scale = factors_of(op, "v_scale", *v_scale, p.dtype, {k_sizes, 3});
  }

  require(params.size() >= kFixedParams, op, "params must hold scale and dropout_p, got ",
          params.size(), " values");
  require(std::isfinite(params[0]), op, "scale must be finite, got scale=", params[0]);
  check_dropout(given, call);
  decode_mask(given, call);
  decode_score(given, call);
  return call;
}

namespace {

// attention: weights(f(scale q k^T) + bias) v on (B, T, H, D). mask: kind, a, b, aux index per rule
// (semantics/mask.h), ANDed; symbolic, as windows and lengths are in compiled graphs. score: kind,
// aux index, params index per rule (semantics/score.h). params: scale, dropout_p, parameters of
// score rules. seed: [seed, offset]. None means an empty list, since AOTInductor's runner turns one
// into None.
OMNIATTN_FIELDS(Heads, Tensor q, k, v);
OMNIATTN_FIELDS(Keys, Tensor q, k);
OMNIATTN_FIELDS(Side, OptTensors aux);
OMNIATTN_FIELDS(Seed, OptTensor seed);
OMNIATTN_FIELDS(Rules, OptSymInts mask; OptInts score; Floats params);

template <class T>
const std::vector<T>& list(const std::optional<std::vector<T>>& given) {
  static const std::vector<T> none;
  return given.has_value() ? *given : none;
}

void fill(const Tensor& t, double value) { torch::stable::fill_(t, value); }

// has_queries: there are rows to compute. has_work: these rows also have keys or sinks to see.
bool has_queries(const AttentionProblem& p) { return p.batch > 0 && p.tq > 0 && p.hq > 0; }
bool has_work(const AttentionProblem& p) {
  return has_queries(p) && (p.tk > 0 || p.sinks != nullptr);
}

// lse (B, Hq, Tq); lse_tail, of the same shape, is the rounding error of lse (semantics/softmax.h).
OMNIATTN_FIELDS(Attended, Tensor out, lse; Output lse_tail);

Attended run(const Call& call, bool saves) {
  const AttentionProblem& p = call.problem;
  if constexpr (kOnCuda) {
    const auto found = has_work(p) ? run_forward_in_torch(call) : std::nullopt;
    if (found.has_value()) {
      const Output lse_tail(saves, call.lse_sizes, accumulator(p.dtype));
      if (saves) fill(lse_tail.tensor(), 0);
      return {found->out, found->lse, lse_tail};
    }
  }
  const Tensor out = empty_tensor(call.out_sizes, p.dtype);
  const Tensor lse = empty_tensor(call.lse_sizes, accumulator(p.dtype));
  const Output lse_tail(saves, call.lse_sizes, accumulator(p.dtype));
  if (lse.numel() == 0) return {out, lse, lse_tail};
  // Kernels do not write rows of packed sequences without keys, and do not run without work.
  if (call.is_packed || !has_work(p)) {
    fill(out, 0);
    fill(lse, divides_rows(p.score) ? -INFINITY : 0);
    if (saves) fill(lse_tail.tensor(), 0);
  }
  if (has_work(p)) {
    run_forward({p, mutable_view_of(out), lse.mutable_data_ptr(), lse_tail.data(), nullptr}, call);
  }
  return {out, lse, lse_tail};
}

Attended attention(const OpCall& op, const Heads& x, const Side& side, const Seed& seed,
                   const Rules& rules) {
  const DeviceScope scope(x.q);
  const Call call = check({.op = op.op,
                           .q = x.q,
                           .k = x.k,
                           .v = x.v,
                           .aux = list(side.aux),
                           .seed = seed.seed,
                           .mask = list(rules.mask),
                           .score = list(rules.score),
                           .params = rules.params});
  return run(call, op.saves);
}

OMNIATTN_FIELDS(CodedHeads, Tensor q, k, v, k_scale, v_scale);
OMNIATTN_FIELDS(AttendedCodes, Tensor out, lse);

// attention of a cached or paged batch to int8 keys and values, each row of which has a factor:
// k_scale and v_scale (B, Tk, Hkv), or pages of them. No gradient.
AttendedCodes attention_int8(const OpCall& op, const CodedHeads& x, const Side& side,
                             const Rules& rules) {
  const DeviceScope scope(x.q);
  const Call call = check({.op = op.op,
                           .q = x.q,
                           .k = x.k,
                           .v = x.v,
                           .aux = list(side.aux),
                           .seed = {},
                           .mask = list(rules.mask),
                           .score = list(rules.score),
                           .params = rules.params,
                           .k_scale = &x.k_scale,
                           .v_scale = &x.v_scale});
  require(call.has_layout && !call.is_packed, op.op, "keys must be those of a cache");
  const Attended found = run(call, false);
  return {found.out, found.lse};
}

// Results of the forward and their gradients, checked and in the layout that kernels read.
struct Results {
  Tensor out, grad_out, lse, lse_tail;
  OptTensor grad_lse;
};
Results check_results(const char* op, const Call& call, Results x) {
  const DType dtype = call.problem.dtype;
  const auto heads = [&](const char* name, Tensor& t) {
    const Tensor rows = as_heads(op, name, t, scalar_type(dtype));
    require_sizes(op, name, t, call.out_sizes);
    t = rows;
  };
  const auto statistics = [&](const char* name, Tensor& t) {
    require_tensor(op, name, t, accumulator(dtype));
    require_sizes(op, name, t, call.lse_sizes);
    t = torch::stable::contiguous(t);
  };
  heads("out", x.out);
  heads("grad_out", x.grad_out);
  statistics("lse", x.lse);
  statistics("lse_tail", x.lse_tail);
  if (x.grad_lse.has_value()) statistics("grad_lse", *x.grad_lse);
  return x;
}

// Memory for the gradient of a parameter, filled with zeros if kernels add to it. `index` is the
// parameter's place in aux.
Tensor set_gradient(const char* op, const Call& call, int64_t index, const Tensor& parameter,
                    AttentionBackwardParams& b, ProgramGradients& gradients) {
  const AttentionProblem& p = call.problem;
  const Tensor grad = empty_tensor(parameter.sizes(), accumulator(p.dtype));
  void* const data = grad.mutable_data_ptr();
  bool adds = true;  // kernels add to zeros
  if (index == call.bias) {
    const auto [s, first] = bias_place(op, call, grad);
    // An element may belong to many pairs, to no pair, or to a pair whose tile is never visited.
    adds = call.has_layout || p.mask.count > 0 || grad.numel() != p.batch * p.hq * p.tq * p.tk;
    b.grad_bias = static_cast<char*>(data) + first * size_of(accumulator(p.dtype));
    b.grad_bias_stride_b = s.b;
    b.grad_bias_stride_h = s.h;
    b.grad_bias_stride_q = s.q;
    b.bias_write = adds                                                          ? BiasWrite::add
                   : grad.numel() * size_of(accumulator(p.dtype)) >= kLargeBytes ? BiasWrite::stream
                                                                                 : BiasWrite::store;
  } else if (index == call.table) {
    b.grad_table = data;
  } else if (index == call.sinks) {
    b.grad_sinks = data;
  } else if (index == call.head_scale) {
    b.grad_head_scale = data;
  } else if (index == call.relative_keys) {
    b.grad_relative_keys = data;
  } else if (index == call.relative_queries) {
    b.grad_relative_queries = data;
  } else if (has_program_table(call, index)) {
    set_program_gradient(call, index, grad, gradients);
  } else {
    fail(op, "wanted must hold indices of parameters in aux, got ", index);
  }
  if (adds) fill(grad, 0);
  return grad;
}

OMNIATTN_FIELDS(Incoming, Tensor grad_out; OptTensor grad_lse);
OMNIATTN_FIELDS(SavedSide, Tensors aux; OptTensor seed; Tensor out, lse, lse_tail);
OMNIATTN_FIELDS(SavedRules, SymInts mask; Ints score; Floats params; Ints wanted);
OMNIATTN_FIELDS(Gradients, Tensor grad_q, grad_k, grad_v; Tensors grad_aux);

Gradients attention_backward(const OpCall& given, const Incoming& grads_in, const Heads& heads,
                             const SavedSide& side, const SavedRules& rules) {
  const char* const op = given.op;
  const auto& [q, k, v] = heads;
  const Tensors& aux = side.aux;
  const Ints& wanted = rules.wanted;
  const DeviceScope scope(q);
  require(!starts_with(rules.mask, LayoutKind::paged), op, "pages must be gathered first");
  const Call call = check({op, q, k, v, aux, side.seed, rules.mask, rules.score, rules.params});
  const AttentionProblem& p = call.problem;
  const Results x = check_results(
      op, call, {side.out, grads_in.grad_out, side.lse, side.lse_tail, grads_in.grad_lse});
  AttentionBackwardParams b{};
  b.problem = p;
  b.out = view_of(x.out);
  b.grad_out = view_of(x.grad_out);
  b.lse = x.lse.const_data_ptr();
  b.lse_tail = x.lse_tail.const_data_ptr();
  b.grad_lse = data_or_null(x.grad_lse);
  if constexpr (kOnCuda) {
    const TorchBackward tensors{x.grad_out, x.out, x.lse};
    const auto found =
        has_work(p) && wanted.empty() ? run_backward_in_torch(call, b, tensors) : std::nullopt;
    if (found.has_value()) return {found->q, found->k, found->v, {}};
  }
  const Tensor grad_q = empty_tensor(q.sizes(), p.dtype);
  const Tensor grad_k = empty_tensor(k.sizes(), p.dtype), grad_v = empty_tensor(v.sizes(), p.dtype);
  b.grad_q = mutable_view_of(grad_q);
  b.grad_k = mutable_view_of(grad_k);
  b.grad_v = mutable_view_of(grad_v);

  Tensors grads;
  ProgramGradients program{};
  for (const int64_t index : wanted) {
    require(std::count(wanted.begin(), wanted.end(), index) == 1, op,
            "wanted must hold each index once, got two of ", index);
    grads.push_back(set_gradient(op, call, index, side_tensor(op, aux, index), b, program));
    if (has_program_table(call, index)) b.grad_program = &program;
  }
  // Keys past the end of a cache, and keys of a sequence without queries, have zero gradients.
  if (call.has_layout || !has_work(p)) {
    for (const Tensor* t : {&grad_q, &grad_k, &grad_v}) fill(*t, 0);
  }
  if (has_work(p)) run_backward(b, call);
  for (size_t i = 0; i < grads.size(); ++i) {
    grads[i] = torch::stable::to(grads[i], scalar_type(aux[static_cast<size_t>(wanted[i])]));
  }
  return {grad_q, grad_k, grad_v, grads};
}

// Checks a call on q and k alone; layouts are not supported.
Call check_keys(const char* op, const Keys& keys, const Side& side, const Rules& rules) {
  Call call = check({.op = op,
                     .q = keys.q,
                     .k = keys.k,
                     .v = keys.k,
                     .aux = list(side.aux),
                     .seed = {},
                     .mask = list(rules.mask),
                     .score = list(rules.score),
                     .params = rules.params});
  require(!call.has_layout, op, "packed and cached batches are not supported");
  return call;
}

OMNIATTN_FIELDS(Weighed, Tensor lse; OptTensors aux);
OMNIATTN_FIELDS(Sums, bool column_sums, group_sums);

// P (B, Hq, Tq, Tk) of attention from its lse, without dropout, or sums of it: column_sums over the
// queries, group_sums over the query heads of a kv head.
Tensor attention_weights(const OpCall& given, const Keys& keys, const Weighed& side,
                         const Rules& rules, const Sums& sums) {
  const char* const op = given.op;
  const auto& [column_sums, group_sums] = sums;
  const Tensor& lse = side.lse;
  const DeviceScope scope(keys.q);
  const Call call = check_keys(op, keys, {side.aux}, rules);
  const AttentionProblem& p = call.problem;
  require(weighs_by_key(p.score), op,
          "weights of stick_breaking and softpick are not computed from lse");
  require_tensor(op, "lse", lse, accumulator(p.dtype));
  require_sizes(op, "lse", lse, call.lse_sizes);
  const Tensor lse_rows = torch::stable::contiguous(lse);
  AttentionWeightsParams w{.problem = p,
                           .lse = lse_rows.const_data_ptr(),
                           .out = nullptr,
                           .column_sums = column_sums,
                           .group_sums = group_sums};
  const DType dtype = column_sums || group_sums ? accumulator(p.dtype) : p.dtype;
  const int64_t heads = weights_heads(w);
  const Tensor out = column_sums ? empty_tensor({p.batch, heads, p.tk}, dtype)
                                 : empty_tensor({p.batch, heads, p.tq, p.tk}, dtype);
  fill(out, 0);
  w.out = out.mutable_data_ptr();
  if (out.numel() > 0 && p.tq > 0) run_weights(w);
  return out;
}

// Score for logits that are only compared: scale q.k, which a factor of log2(e) would round.
Score in_natural_units(const Score& s, double scale) {
  return s.transform == ScoreKind::none
             ? Score{scale, 0.0, 1.0, true, s.transform, s.normalizer}
             : Score{s.pre, s.chain, s.chain, true, s.transform, s.normalizer};
}

OMNIATTN_FIELDS(Selected, Tensor index, top);

// index and logit, both (B, Hq, Tq), of the key with the largest logit; of equal ones the first; -1
// if no key is visible.
Selected attention_select(const OpCall& given, const Keys& keys, const Side& side,
                          const Rules& rules) {
  const DeviceScope scope(keys.q);
  Call call = check_keys(given.op, keys, side, rules);
  AttentionProblem& p = call.problem;
  p.score = in_natural_units(p.score, rules.params[0]);
  const Tensor index = torch::stable::new_empty(keys.q, call.lse_sizes, ScalarType::Long);
  const Tensor top = empty_tensor(call.lse_sizes, accumulator(p.dtype));
  if (index.numel() > 0) {
    run_select({p, static_cast<int64_t*>(index.mutable_data_ptr()), top.mutable_data_ptr()});
  }
  return {index, top};
}

const Registry registry([](Registry& ops) {
  ops.add<attention>("attention", saves_last);
  ops.add<attention_int8>("attention_int8");
  ops.add<attention_backward>("attention_backward");
  ops.define<decltype(attention_tangents::attention_tangents)>("attention_tangents");
  ops.add<attention_weights>("attention_weights", differentiable);
  ops.name("attention_select", {{"select_attention"}});
  ops.add<attention_select>("attention_select");
});

}  // namespace
}  // namespace omniattn::ops::attention
