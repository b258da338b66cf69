// attention, attention_backward, attention_weights, attention_select: decoding of masks and scores,
// checks and results for either device. Included by attention_cpu.cpp and attention_cuda.cpp, each
// of which defines decode_layout and the run functions.
#pragma once

#include "kernels/attention/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/seed.h"
#include "semantics/sequences.h"

namespace {

using namespace omniattn;
using namespace omniattn::ops;

// One sequence of a packed, cached or paged batch: rows [q_begin, q_begin + tq) and [k_begin,
// k_begin
// + tk) of batch entry `row`, or the first tk of its pages; side tensors and the bias have its
// number b.
struct Sequence {
  int64_t b, row, q_begin, tq, k_begin, tk;
};
using Sequences = std::vector<Sequence>;

// The problem is the whole batch, or with `sequences` what they select of it (then problem.batch is
// their number, and problem.tq and problem.tk bound their lengths). Neither is called without
// queries, nor without keys unless there are sinks. The second one has
// `splits` and the parts to set, and adds to zeros behind grad_bias, grad_table, grad_sinks and
// grad_head_scale.
void run_forward(AttentionForwardParams f, const Sequences& sequences);
void run_backward(AttentionBackwardParams b, const Sequences& sequences);
void run_weights(AttentionWeightsParams w);
void run_select(AttentionSelectParams x);

using Ints = std::vector<int64_t>;
using Floats = std::vector<double>;
using Tensors = std::vector<Tensor>;
using OptInts = std::optional<Ints>;
using OptTensors = std::optional<Tensors>;

// Score rules: ScoreKind, index of the side tensor in aux or -1, index of the first parameter in
// params or -1.
constexpr size_t kScoreRuleInts = 3;
// params: scale, dropout_p, then the parameters of score rules.
constexpr size_t kFixedParams = 2;

// ---- arguments ---------------------------------------------------------------------------------

// A tensor (B, T, H, D) whose last dimension has unit stride; a copy where it has not.
Tensor as_heads(const char* op, const char* name, const Tensor& t, DType dtype) {
  require_tensor(op, name, t, dtype);
  require(t.dim() == 4, op, name, " must have 4 dimensions (B, T, H, D), got ", t.dim());
  return t.size(3) <= 1 || t.stride(3) == 1 ? t : torch::stable::contiguous(t);
}

HeadView view_of(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}
MutableHeadView mutable_view_of(const Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

// Strides of a tensor seen as (B, Hq, Tq, Tk) or the like, 0 where it is broadcast.
struct ScoreStrides {
  int64_t b, h, q;
};
ScoreStrides score_strides(const char* op, const char* name, const Tensor& t,
                           std::array<int64_t, 4> want) {
  require(t.dim() == 4, op, name, " must have 4 dimensions (B, Hq, Tq, Tk), got ", t.dim());
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t size = want[static_cast<size_t>(i)];
    require(t.size(i) == size || (i < 3 && t.size(i) == 1), op, name, " must be broadcastable to ",
            Shape{want.data(), 4}, ", got size ", t.size(i), " in dimension ", i);
  }
  const auto stride = [&](int64_t i) { return t.size(i) == 1 ? int64_t{0} : t.stride(i); };
  return {stride(0), stride(1), stride(2)};
}

// The problem, what keeps its memory alive, and where in aux its parameters are (-1: none).
struct Call {
  AttentionProblem p;
  Tensors kept;
  int64_t bias = -1, table = -1, sinks = -1, head_scale = -1;
  bool has_layout = false, is_packed = false;
  Sequences sequences;  // of a layout, on the CPU
  Ints block_table;     // (B, N), checked
};

const Tensor& side_tensor(const char* op, const Tensors& aux, int64_t index) {
  require(index >= 0 && index < static_cast<int64_t>(aux.size()), op,
          "aux must hold the tensor a rule names, got index ", index, " of ", aux.size());
  return aux[static_cast<size_t>(index)];
}

const Tensor& side_tensor(const char* op, const char* name, const Tensors& aux, int64_t index,
                          ScalarType type) {
  const Tensor& t = side_tensor(op, aux, index);
  require(is_here(t) && t.scalar_type() == type, op, name, " must have scalar type ",
          static_cast<int>(type), " on ", kDeviceName, ", got ", static_cast<int>(t.scalar_type()));
  return t;
}

// `t` with unit stride in its last dimension, kept alive.
Tensor keep_rows(Call& call, const Tensor& t) {
  const int64_t last = t.dim() - 1;
  const bool fits = last < 0 || t.size(last) <= 1 || t.stride(last) == 1;
  call.kept.push_back(fits ? t : torch::stable::contiguous(t));
  return call.kept.back();
}

// Side tensors of a rule, aux[index] and the next.
void set_side_tensors(const char* op, Call& call, MaskRule& rule, const Tensors& aux,
                      int64_t index) {
  const AttentionProblem& p = call.p;
  switch (mask_side_tensor(rule.kind)) {
    case SideTensor::none:
      return;
    case SideTensor::per_batch: {
      const Tensor& t = side_tensor(op, "lengths", aux, index, ScalarType::Long);
      require_sizes(op, "lengths", t, {&p.batch, 1});
      rule.side = t.const_data_ptr();
      rule.stride_b = t.stride(0);
      return;
    }
    case SideTensor::per_score: {
      const Tensor t = keep_rows(call, side_tensor(op, "mask", aux, index, ScalarType::Bool));
      const ScoreStrides s = score_strides(op, "mask", t, {p.batch, p.hq, p.tq, p.tk});
      rule.side = t.const_data_ptr();
      rule.stride_b = s.b;
      rule.stride_h = s.h;
      rule.stride_q = s.q;
      return;
    }
    case SideTensor::ids: {
      const int64_t sizes[2][2] = {{p.batch, p.tq}, {p.batch, p.tk}};
      const Tensor queries =
          keep_rows(call, side_tensor(op, "document ids", aux, index, ScalarType::Long));
      require_sizes(op, "document ids of queries", queries, {sizes[0], 2});
      rule.side = queries.const_data_ptr();
      rule.stride_b = queries.stride(0);
      const Tensor keys =
          keep_rows(call, side_tensor(op, "document ids", aux, index + 1, ScalarType::Long));
      require_sizes(op, "document ids of keys", keys, {sizes[1], 2});
      rule.second = keys.const_data_ptr();
      rule.second_stride_b = keys.stride(0);
      return;
    }
    case SideTensor::blocks: {
      const Tensor codes = keep_rows(call, side_tensor(op, "blocks", aux, index, ScalarType::Int));
      const ScoreStrides s = score_strides(
          op, "blocks", codes,
          {p.batch, p.hq, ceil_div(p.tq, kPatternBlock), ceil_div(p.tk, kPatternBlock)});
      const Tensor& bits = side_tensor(op, "bits", aux, index + 1, ScalarType::Long);
      require(bits.dim() == 2 && bits.size(1) == kPatternBlock, op, "bits must have shape (N, ",
              kPatternBlock, ")");
      call.kept.push_back(torch::stable::contiguous(bits));
      rule.side = codes.const_data_ptr();
      rule.stride_b = s.b;
      rule.stride_h = s.h;
      rule.stride_q = s.q;
      rule.second = call.kept.back().const_data_ptr();
      rule.b = bits.size(0);
      return;
    }
  }
}

void require_integers(const char* op, const char* name, const Tensor& t) {
  const bool fits = t.scalar_type() == ScalarType::Long || t.scalar_type() == ScalarType::Int;
  require(is_here(t) && fits, op, name, " must be int32 or int64 on ", kDeviceName);
}

// Takes [seed, offset] of dropout.
void decode_seed(Call& call, const Tensor& seed);
void read_seed(Dropout& dropout, const Tensor& seed) {
  const ElementStream stream = ops::read_seed(seed);
  dropout.key = stream.key;
  dropout.offset = stream.offset;
}

// Takes the layout that `code` starts with: the problem gets a batch of sequences.
void decode_layout(const char* op, Call& call, LayoutKind kind, const Ints& code,
                   const Tensors& aux);

bool starts_with(const Ints& mask, LayoutKind kind) {
  return !mask.empty() && mask[0] == static_cast<int64_t>(kind);
}

void decode_mask(const char* op, Call& call, const Ints& mask, const Tensors& aux) {
  AttentionProblem& p = call.p;
  require(mask.size() % kMaskRuleInts == 0, op, "mask must hold ", kMaskRuleInts,
          " integers per rule, got ", mask.size());
  require(mask.size() <= kMaskRuleInts * kMaxMaskRules, op, "at most ", kMaxMaskRules,
          " mask rules are supported, got ", mask.size() / kMaskRuleInts);
  size_t at = 0;
  if (!mask.empty() && is_layout(mask[0])) {
    const auto fits = [](int64_t longest) { return longest >= 0 && longest < kMaskParamLimit; };
    require(fits(mask[1]) && fits(mask[2]), op,
            "longest sequences must be >= 0 and below 2^40, got ", mask[1], " and ", mask[2]);
    call.has_layout = true;
    call.is_packed = starts_with(mask, LayoutKind::packed);
    require(!call.is_packed || p.batch == 1, op,
            "packed sequences must have B = 1, got B=", p.batch);
    decode_layout(op, call, static_cast<LayoutKind>(mask[0]), mask, aux);
    at = kMaskRuleInts;
  }
  p.mask = {p.tq, p.tk, 0, {}};
  for (; at < mask.size(); at += kMaskRuleInts) {
    const int64_t kind = mask[at], a = mask[at + 1], b = mask[at + 2];
    require(!is_layout(kind), op, "a layout must be the first mask rule, and the only one");
    require(is_mask_kind(kind), op, "mask rule must be a kind of semantics/mask_rules.h, got ",
            kind);
    MaskRule rule{static_cast<MaskKind>(kind), a, b, nullptr, nullptr, 0, 0, 0, 0};
    require(mask_parameters_fit(rule.kind, a, b), op, "parameters of mask rule ", kind,
            " must have a meaning and be below 2^40, got ", a, " and ", b);
    set_side_tensors(op, call, rule, aux, mask[at + 3]);
    p.mask.rules[p.mask.count++] = rule;
  }
}

void set_bias(const char* op, Call& call, const Tensor& bias) {
  AttentionProblem& p = call.p;
  require(is_here(bias), op, "bias must be on ", kDeviceName);
  const DType dtype = dtype_of(op, "bias", bias);
  require((dtype == DType::f64) <= (p.dtype == DType::f64), op,
          "a float64 bias needs float64 inputs");
  require(p.dtype != DType::f64 || dtype == DType::f64 || dtype == DType::f32, op,
          "float64 inputs need a float64 or float32 bias");
  const Tensor t = keep_rows(call, bias);
  const ScoreStrides s = score_strides(op, "bias", t, {p.batch, p.hq, p.tq, p.tk});
  p.bias = {t.const_data_ptr(), dtype, s.b, s.h, s.q};
}

// `t` of these sizes in the compute type, contiguous, kept alive.
const void* keep_parameters(const char* op, const char* name, Call& call, const Tensor& t,
                            Sizes sizes) {
  require(is_here(t), op, name, " must be on ", kDeviceName);
  dtype_of(op, name, t);
  require_sizes(op, name, t, sizes);
  const Tensor wide = torch::stable::to(t, scalar_type(accumulator(call.p.dtype)));
  call.kept.push_back(torch::stable::contiguous(wide));
  return call.kept.back().const_data_ptr();
}

void set_table(const char* op, Call& call, TableKind kind, const Tensor& t, const double* ab) {
  AttentionProblem& p = call.p;
  require(t.dim() == 3 && (t.size(0) == 1 || t.size(0) == p.batch), op,
          "a table must have shape (B | 1, rows, Hq), got ", t.dim(), " dimensions");
  constexpr double kLimit = 1e12;
  require(std::abs(ab[0]) < kLimit && std::abs(ab[1]) < kLimit, op,
          "parameters of a table must be finite and below 1e12");
  const int64_t sizes[] = {t.size(0), t.size(1), p.hq};
  p.table = {kind,    static_cast<int64_t>(ab[0]),        static_cast<int64_t>(ab[1]), sizes[1],
             nullptr, sizes[0] == 1 ? 0 : sizes[1] * p.hq};
  require(table_fits(p.table, p.tq, p.tk), op, "a table of ", sizes[1], " rows with parameters ",
          p.table.a, " and ", p.table.b, " must fit its kind and Tq=", p.tq, ", Tk=", p.tk);
  p.table.data = keep_parameters(op, "table", call, t, {sizes, 3});
}

void decode_score(const char* op, Call& call, const Ints& score, const Floats& params,
                  const Tensors& aux) {
  AttentionProblem& p = call.p;
  require(score.size() % kScoreRuleInts == 0, op, "score must hold ", kScoreRuleInts,
          " integers per rule, got ", score.size());
  double softcap = 0;
  Normaliser normaliser = Normaliser::softmax;
  for (size_t at = 0; at < score.size(); at += kScoreRuleInts) {
    const int64_t code = score[at], index = score[at + 1], parameter = score[at + 2];
    require(code >= 0 && code < kScoreKinds, op, "score rule must be 0 to ", kScoreKinds - 1,
            ", got ", code);
    const auto kind = static_cast<ScoreKind>(code);
    require((p.terms & term(kind)) == 0, op,
            "one score rule of a kind at most is supported, got two of ", code);
    p.terms |= term(kind);
    const auto parameters = [&](int64_t count) {
      require(parameter >= 0 && parameter <= static_cast<int64_t>(params.size()) - count, op,
              "params must hold the parameters a rule names, got index ", parameter, " of ",
              params.size());
      return params.data() + parameter;
    };
    const auto parameter_tensor = [&](int64_t& place) -> const Tensor& {
      place = index;
      return side_tensor(op, aux, index);
    };
    const auto table = [&](TableKind table_kind) {
      require(call.table < 0, op, "one table term at most is supported");
      set_table(op, call, table_kind, parameter_tensor(call.table), parameters(2));
    };
    const auto weights = [&](Normaliser other) {
      require(normaliser == Normaliser::softmax, op, "one normaliser at most is supported");
      normaliser = other;
    };
    switch (kind) {
      case ScoreKind::bias:
        set_bias(op, call, parameter_tensor(call.bias));
        break;
      case ScoreKind::softcap:
        softcap = *parameters(1);
        require(std::isfinite(softcap) && softcap > 0, op,
                "softcap must be finite and positive, got softcap=", softcap);
        break;
      case ScoreKind::sinks:
        p.sinks = keep_parameters(op, "sinks", call, parameter_tensor(call.sinks), {&p.hq, 1});
        break;
      case ScoreKind::head_scale:
        p.head_scale =
            keep_parameters(op, "head_scale", call, parameter_tensor(call.head_scale), {&p.hq, 1});
        break;
      case ScoreKind::sigmoid:
        weights(Normaliser::sigmoid);
        break;
      case ScoreKind::relu2:
        weights(Normaliser::relu2);
        break;
      case ScoreKind::alibi:
        table(TableKind::alibi);
        break;
      case ScoreKind::buckets:
        table(TableKind::buckets);
        break;
      case ScoreKind::distances:
        table(TableKind::distances);
        break;
      case ScoreKind::window:
        table(TableKind::window);
        break;
    }
  }
  require(normaliser == Normaliser::softmax || p.sinks == nullptr, op,
          "sinks need weights normalised by softmax");
  const bool plain = call.bias < 0 && call.table < 0 && call.sinks < 0;
  p.score = make_score(params[0], softcap, plain, normaliser);
}

Call decode_call(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Tensors& aux, const OptTensor& seed, const Ints& mask, const Ints& score,
                 const Floats& params) {
  Call call{};
  AttentionProblem& p = call.p;
  p.dtype = dtype_of(op, "q", q);
  call.kept = {as_heads(op, "q", q, p.dtype), as_heads(op, "k", k, p.dtype),
               as_heads(op, "v", v, p.dtype)};
  p.batch = q.size(0), p.tq = q.size(1), p.hq = q.size(2), p.d = q.size(3);
  p.tk = k.size(1), p.hkv = k.size(2), p.dv = v.size(3);
  p.lse_stride = p.tq;
  const int64_t rows = starts_with(mask, LayoutKind::paged) ? k.size(0) : p.batch;
  const int64_t k_sizes[] = {rows, p.tk, p.hkv, p.d}, v_sizes[] = {rows, p.tk, p.hkv, p.dv};
  require_sizes(op, "k", k, {k_sizes, 4});
  require_sizes(op, "v", v, {v_sizes, 4});
  require(p.hq == 0 || (p.hkv > 0 && p.hq % p.hkv == 0), op,
          "Hq must be a multiple of Hkv, got Hq=", p.hq, ", Hkv=", p.hkv);
  p.q = view_of(call.kept[0]);
  p.k = view_of(call.kept[1]);
  p.v = view_of(call.kept[2]);

  require(params.size() >= kFixedParams, op, "params must hold scale and dropout_p, got ",
          params.size(), " values");
  require(std::isfinite(params[0]), op, "scale must be finite, got scale=", params[0]);
  const double dropout_p = params[1];
  require(dropout_p >= 0 && dropout_p <= 1, op,
          "dropout_p must be in [0, 1], got dropout_p=", dropout_p);
  p.dropout = make_dropout(0, 0, 0);
  if (dropout_p > 0) {
    require(seed.has_value(), op, "dropout_p > 0 needs a seed");
    require_seed(op, *seed);
    p.dropout = make_dropout(dropout_p, 0, 0);
    decode_seed(call, *seed);
  }
  decode_mask(op, call, mask, aux);
  decode_score(op, call, score, params, aux);
  return call;
}

// ---- ops ----------------------------------------------------------------------------------------

// None is an empty list, see schema.cpp.
template <class T>
std::vector<T> list(std::optional<std::vector<T>> given) {
  return given.has_value() ? *std::move(given) : std::vector<T>();
}

void fill(const Tensor& t, double value) { torch::stable::fill_(t, value); }

// Without queries, or without keys to see.
bool has_queries(const AttentionProblem& p) { return p.batch > 0 && p.tq > 0 && p.hq > 0; }
bool has_work(const AttentionProblem& p) {
  return has_queries(p) && (p.tk > 0 || p.sinks != nullptr);
}

std::tuple<Tensor, Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, OptTensors aux,
                                  const OptTensor& seed, OptInts mask, OptInts score, Floats params,
                                  Tensor* lse_tail) {
  const DeviceScope scope(q);
  const Call call =
      decode_call("attention", q, k, v, list(aux), seed, list(mask), list(score), params);
  const AttentionProblem& p = call.p;
  const int64_t out_sizes[] = {q.size(0), q.size(1), p.hq, p.dv};
  const int64_t lse_sizes[] = {q.size(0), p.hq, q.size(1)};
  const Tensor out = empty_tensor({out_sizes, 4}, p.dtype);
  const Tensor lse = empty_tensor({lse_sizes, 3}, accumulator(p.dtype));
  if (lse_tail != nullptr) *lse_tail = empty_tensor({lse_sizes, 3}, accumulator(p.dtype));
  if (lse.numel() == 0) return {out, lse};
  // Rows of no sequence, and all rows where there are no keys, see nothing.
  if (call.is_packed || !has_work(p)) {
    fill(out, 0);
    fill(lse, p.score.normaliser == Normaliser::softmax ? -INFINITY : 0);
    if (lse_tail != nullptr) fill(*lse_tail, 0);
  }
  if (has_work(p)) {
    run_forward({p, mutable_view_of(out), lse.mutable_data_ptr(),
                 lse_tail == nullptr ? nullptr : lse_tail->mutable_data_ptr(), nullptr, nullptr},
                call.sequences);
  }
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                             OptTensors aux, const OptTensor& seed, OptInts mask,
                                             OptInts score, Floats params) {
  Tensor lse_tail;
  auto [out, lse] = attend(q, k, v, aux, seed, mask, score, params, &lse_tail);
  return {out, lse, lse_tail};
}

std::tuple<Tensor, Tensor> attention_only(const Tensor& q, const Tensor& k, const Tensor& v,
                                          OptTensors aux, const OptTensor& seed, OptInts mask,
                                          OptInts score, Floats params) {
  return attend(q, k, v, aux, seed, mask, score, params, nullptr);
}

std::tuple<Tensor, Tensor, Tensor, Tensors> attention_backward(
    const Tensor& grad_out, const OptTensor& grad_lse, const Tensor& q, const Tensor& k,
    const Tensor& v, Tensors aux, const OptTensor& seed, const Tensor& out, const Tensor& lse,
    const Tensor& lse_tail, Ints mask, Ints score, Floats params, Ints wanted) {
  constexpr const char* op = "attention_backward";
  const DeviceScope scope(q);
  require(!starts_with(mask, LayoutKind::paged), op, "pages must be gathered first");
  const Call call = decode_call(op, q, k, v, aux, seed, mask, score, params);
  const AttentionProblem& p = call.p;
  const int64_t out_sizes[] = {q.size(0), q.size(1), p.hq, p.dv};
  const int64_t lse_sizes[] = {q.size(0), p.hq, q.size(1)};
  const Tensor out_rows = as_heads(op, "out", out, p.dtype);
  const Tensor grad_rows = as_heads(op, "grad_out", grad_out, p.dtype);
  require_sizes(op, "out", out, {out_sizes, 4});
  require_sizes(op, "grad_out", grad_out, {out_sizes, 4});
  require_tensor(op, "lse", lse, accumulator(p.dtype));
  require_sizes(op, "lse", lse, {lse_sizes, 3});
  require_tensor(op, "lse_tail", lse_tail, accumulator(p.dtype));
  require_sizes(op, "lse_tail", lse_tail, {lse_sizes, 3});
  const Tensor lse_rows = torch::stable::contiguous(lse);
  const Tensor tail_rows = torch::stable::contiguous(lse_tail);
  OptTensor grad_lse_rows;
  if (grad_lse.has_value()) {
    require_tensor(op, "grad_lse", *grad_lse, accumulator(p.dtype));
    require_sizes(op, "grad_lse", *grad_lse, {lse_sizes, 3});
    grad_lse_rows = torch::stable::contiguous(*grad_lse);
  }
  const Tensor grad_q = empty_tensor(q.sizes(), p.dtype);
  const Tensor grad_k = empty_tensor(k.sizes(), p.dtype), grad_v = empty_tensor(v.sizes(), p.dtype);
  AttentionBackwardParams b{};
  b.problem = p;
  b.out = view_of(out_rows);
  b.grad_out = view_of(grad_rows);
  b.lse = lse_rows.const_data_ptr();
  b.lse_tail = tail_rows.const_data_ptr();
  b.grad_lse = data_or_null(grad_lse_rows);
  b.grad_q = mutable_view_of(grad_q);
  b.grad_k = mutable_view_of(grad_k);
  b.grad_v = mutable_view_of(grad_v);

  Tensors grads;
  for (const int64_t index : wanted) {
    require(std::count(wanted.begin(), wanted.end(), index) == 1, op,
            "wanted must hold each index once, got two of ", index);
    const Tensor& parameter = side_tensor(op, aux, index);
    const Tensor grad = empty_tensor(parameter.sizes(), accumulator(p.dtype));
    void* const data = grad.mutable_data_ptr();
    bool adds = true;  // to zeros
    if (index == call.bias) {
      const ScoreStrides s = score_strides(op, "bias", grad, {p.batch, p.hq, p.tq, p.tk});
      // Some element belongs to many pairs or to none, or to one that no tile may visit.
      adds = call.has_layout || p.mask.count > 0 || grad.numel() != p.batch * p.hq * p.tq * p.tk;
      b.grad_bias = data;
      b.grad_bias_stride_b = s.b;
      b.grad_bias_stride_h = s.h;
      b.grad_bias_stride_q = s.q;
      b.bias_write = adds ? BiasWrite::add
                     : grad.numel() * size_of(accumulator(p.dtype)) >= kLargeBytes
                         ? BiasWrite::stream
                         : BiasWrite::store;
    } else if (index == call.table) {
      b.grad_table = data;
    } else if (index == call.sinks) {
      b.grad_sinks = data;
    } else if (index == call.head_scale) {
      b.grad_head_scale = data;
    } else {
      fail(op, "wanted must hold indices of parameters in aux, got ", index);
    }
    if (adds) fill(grad, 0);
    grads.push_back(grad);
  }
  // Rows of no sequence get no gradient.
  if (call.has_layout || !has_work(p)) {
    for (const Tensor* t : {&grad_q, &grad_k, &grad_v}) fill(*t, 0);
  }
  if (has_work(p)) run_backward(b, call.sequences);
  for (size_t i = 0; i < grads.size(); ++i) {
    grads[i] = torch::stable::to(grads[i], aux[static_cast<size_t>(wanted[i])].scalar_type());
  }
  return {grad_q, grad_k, grad_v, grads};
}

Tensor attention_weights(const Tensor& q, const Tensor& k, const Tensor& lse, OptTensors aux,
                         OptInts mask, OptInts score, Floats params, bool sums) {
  constexpr const char* op = "attention_weights";
  const DeviceScope scope(q);
  Call call = decode_call(op, q, k, k, list(aux), {}, list(mask), list(score), params);
  AttentionProblem& p = call.p;
  require(!call.has_layout, op, "packed and cached batches are not supported");
  const int64_t lse_sizes[] = {p.batch, p.hq, p.tq};
  require_tensor(op, "lse", lse, accumulator(p.dtype));
  require_sizes(op, "lse", lse, {lse_sizes, 3});
  const Tensor lse_rows = torch::stable::contiguous(lse);
  const int64_t sizes[] = {p.batch, p.hq, p.tq, p.tk}, sum_sizes[] = {p.batch, p.hq, p.tk};
  const Tensor out =
      sums ? empty_tensor({sum_sizes, 3}, accumulator(p.dtype)) : empty_tensor({sizes, 4}, p.dtype);
  fill(out, 0);
  AttentionWeightsParams w{.problem = p,
                           .lse = lse_rows.const_data_ptr(),
                           .weights = nullptr,
                           .sums = nullptr,
                           .scratch = nullptr};
  (sums ? w.sums : w.weights) = out.mutable_data_ptr();
  if (out.numel() > 0 && p.tq > 0) run_weights(w);
  return out;
}

std::tuple<Tensor, Tensor> attention_select(const Tensor& q, const Tensor& k, OptTensors aux,
                                            OptInts mask, OptInts score, Floats params) {
  constexpr const char* op = "attention_select";
  const DeviceScope scope(q);
  Call call = decode_call(op, q, k, k, list(aux), {}, list(mask), list(score), params);
  AttentionProblem& p = call.p;
  require(!call.has_layout, op, "packed and cached batches are not supported");
  const int64_t sizes[] = {p.batch, p.hq, p.tq};
  const Tensor index = torch::stable::new_empty(q, {sizes, 3}, ScalarType::Long);
  const Tensor top = empty_tensor({sizes, 3}, accumulator(p.dtype));
  if (index.numel() > 0) {
    run_select(
        {p, static_cast<int64_t*>(index.mutable_data_ptr()), top.mutable_data_ptr(), nullptr});
  }
  return {index, top};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, OMNIATTN_DISPATCH_KEY, m) {
  OMNIATTN_IMPL(m, "attention", attention);
  m.impl("attention_only", TORCH_BOX(&attention_only));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  OMNIATTN_IMPL(m, "attention_weights", attention_weights);
  m.impl("attention_select", TORCH_BOX(&attention_select));
}
