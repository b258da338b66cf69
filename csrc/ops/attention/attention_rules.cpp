// Decodes and checks the rules of masks and scores, with
// their side tensors and parameters.
#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/attention/attention.h"
#include "semantics/sequences.h"

namespace omniattn::ops::attention {
namespace {

// Parts, layouts and rules share one range of codes.
constexpr bool numbers_are_apart() {
  for (int64_t code = 0; code < 256; ++code) {
    if (is_part(code) + is_layout(code) + is_mask_kind(code) > 1) return false;
  }
  return true;
}
static_assert(numbers_are_apart(), "a mask rule has the number of a layout or a part");

const Tensor& typed_side_tensor(const char* op, const char* name, const Tensors& aux, int64_t index,
                                ScalarType type) {
  const Tensor& t = side_tensor(op, aux, index);
  require_tensor(op, name, t, type);
  return t;
}

// `t` with unit stride in its last dimension, added to the tensors kept alive.
Tensor keep_rows(Call& call, const Tensor& t) {
  call.kept.push_back(with_unit_last_stride(t));
  return call.kept.back();
}

// Sets the side tensors of a rule, aux[index] and the next.
void set_side_tensors(const char* op, Call& call, MaskRule& rule, const Tensors& aux,
                      int64_t index) {
  const AttentionProblem& p = call.problem;
  switch (mask_side_tensor(rule.kind)) {
    case SideTensor::none:
      return;
    case SideTensor::per_batch: {
      const Tensor& t = typed_side_tensor(op, "lengths", aux, index, ScalarType::Long);
      require_sizes(op, "lengths", t, {&p.batch, 1});
      rule.side = t.const_data_ptr();
      rule.stride_b = t.stride(0);
      return;
    }
    case SideTensor::per_score: {
      const Tensor t = keep_rows(call, typed_side_tensor(op, "mask", aux, index, ScalarType::Bool));
      const ScoreStrides s =
          score_strides(op, "mask", t, {p.batch, p.hq, call.whole_q, call.whole_k});
      rule.side = t.const_data_ptr();
      rule.stride_b = s.b;
      rule.stride_h = s.h;
      rule.stride_q = s.q;
      return;
    }
    case SideTensor::ids: {
      const int64_t sizes[2][2] = {{p.batch, call.whole_q}, {p.batch, call.whole_k}};
      const Tensor queries =
          keep_rows(call, typed_side_tensor(op, "document ids", aux, index, ScalarType::Long));
      require_sizes(op, "document ids of queries", queries, {sizes[0], 2});
      rule.side = queries.const_data_ptr();
      rule.stride_b = queries.stride(0);
      const Tensor keys =
          keep_rows(call, typed_side_tensor(op, "document ids", aux, index + 1, ScalarType::Long));
      require_sizes(op, "document ids of keys", keys, {sizes[1], 2});
      rule.second = keys.const_data_ptr();
      rule.second_stride_b = keys.stride(0);
      return;
    }
    case SideTensor::blocks: {
      const Tensor codes =
          keep_rows(call, typed_side_tensor(op, "blocks", aux, index, ScalarType::Int));
      const ScoreStrides s = score_strides(op, "blocks", codes,
                                           {p.batch, p.hq, ceil_div(call.whole_q, kPatternBlock),
                                            ceil_div(call.whole_k, kPatternBlock)});
      const Tensor& bits = typed_side_tensor(op, "bits", aux, index + 1, ScalarType::Long);
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

// Makes the sequences of the layout at the start of the mask the batch. Errors name the public
// functions, whose callers do not see layouts.
void decode_layout(const Arguments& given, Call& call) {
  const Ints& code = given.mask;
  AttentionProblem& p = call.problem;
  const auto kind = static_cast<LayoutKind>(code[0]);
  const char* const op = p.is_int8                    ? given.op
                         : kind == LayoutKind::packed ? "attention_varlen"
                                                      : "attention_cached";
  const auto fits = [](int64_t longest) { return longest >= 0 && longest < kMaskParamLimit; };
  require(fits(code[1]) && fits(code[2]), op, "longest sequences must be >= 0 and below 2^40, got ",
          code[1], " and ", code[2]);
  const auto side = [&](int64_t n) -> const Tensor& {
    return side_tensor(op, given.aux, code[3] + n);
  };
  switch (kind) {
    case LayoutKind::packed:
      require(p.batch == 1, op, "packed sequences must have B = 1, got B=", p.batch);
      call.sequences = packed_sequences(op, {"cu_seqlens_q", side(0), p.tq, code[1]},
                                        {"cu_seqlens_k", side(1), p.tk, code[2]});
      call.shares_boundaries = side(0).const_data_ptr() == side(1).const_data_ptr();
      break;
    case LayoutKind::cached:
      call.sequences = cached_sequences(op, side(0), p.batch, p.tq, p.tk);
      break;
    case LayoutKind::paged:
      call.sequences = paged_sequences(op, side(0), side(1), p.batch, p.tq, given.k.size(0), p.tk);
      break;
  }
  call.has_layout = true;
  call.is_packed = kind == LayoutKind::packed;
  p.batch = call.sequences.count;
  p.tq = call.sequences.longest_q;
  p.tk = call.sequences.longest_k;
  p.sequences = call.sequences.rows;
  p.pages = call.sequences.pages;
}

void set_bias(const char* op, Call& call, const Tensor& bias) {
  AttentionProblem& p = call.problem;
  require(is_here(bias), op, "bias must be on ", kDeviceName);
  const DType dtype = dtype_of(op, "bias", bias);
  require((dtype == DType::f64) <= (p.dtype == DType::f64), op,
          "a float64 bias needs float64 inputs");
  require(p.dtype != DType::f64 || dtype == DType::f64 || dtype == DType::f32, op,
          "float64 inputs need a float64 or float32 bias");
  const Tensor t = keep_rows(call, bias);
  const auto [s, first] = bias_place(op, call, t);
  p.bias = {static_cast<const char*>(t.const_data_ptr()) + first * size_of(dtype), dtype, s.b, s.h,
            s.q};
}

// `t`, checked to have these sizes, contiguous in the compute type and kept alive.
const void* keep_parameters(const char* op, const char* name, Call& call, const Tensor& t,
                            Sizes sizes) {
  require(is_here(t), op, name, " must be on ", kDeviceName);
  dtype_of(op, name, t);
  require_sizes(op, name, t, sizes);
  const Tensor wide = torch::stable::to(t, scalar_type(accumulator(call.problem.dtype)));
  call.kept.push_back(torch::stable::contiguous(wide));
  return call.kept.back().const_data_ptr();
}

// Row of distance 0; a negative `zero` counts from the end.
int64_t from_start(double zero, int64_t rows) {
  return static_cast<int64_t>(zero) + (zero < 0 ? rows : 0);
}

void set_table(const char* op, Call& call, ScoreKind kind, const Tensor& t, const double* ab) {
  AttentionProblem& p = call.problem;
  require(t.dim() == 3 && (t.size(0) == 1 || t.size(0) == p.batch), op,
          "a table must have shape (B | 1, rows, Hq), got ", t.dim(), " dimensions");
  constexpr double kLimit = 1e12;
  require(std::abs(ab[0]) < kLimit && std::abs(ab[1]) < kLimit, op,
          "parameters of a table must be finite and below 1e12");
  const int64_t sizes[] = {t.size(0), t.size(1), p.hq};
  const int64_t a =
      kind == ScoreKind::distances ? from_start(ab[0], sizes[1]) : static_cast<int64_t>(ab[0]);
  p.table = {kind,     a,       static_cast<int64_t>(ab[1]),
             sizes[1], nullptr, sizes[0] == 1 ? 0 : sizes[1] * p.hq};
  require(table_fits(p.table, call.whole_q, call.whole_k), op, "a table of ", sizes[1],
          " rows with parameters ", p.table.a, " and ", p.table.b,
          " must fit its kind and Tq=", p.tq, ", Tk=", p.tk);
  const Part& part = p.mask.part;
  require(is_relative(kind) || (part.rest_q == 0 && part.rest_k == 0), op,
          "a call with windows cannot be part of a longer one");
  p.table.data = keep_parameters(op, "table", call, t, {sizes, 3});
}

// `index` is the place of the rows `t` in aux.
void set_distance_rows(const char* op, Call& call, ScoreKind kind, const Tensor& t, int64_t index,
                       double zero) {
  const char* const name = score_name(kind);
  require(t.dim() == 3 && t.size(0) > 0, op, name, " must have shape (rows > 0, Hq, D), got ",
          t.dim(), " dimensions");
  require(std::abs(zero) < 1e12, op, "zero of ", name, " must be finite and below 1e12");
  AttentionProblem& p = call.problem;
  const bool of_keys = kind == ScoreKind::relative_keys;
  const int64_t sizes[] = {t.size(0), p.hq, p.d};
  const void* const data = keep_parameters(op, name, call, t, {sizes, 3});
  (of_keys ? call.relative_keys : call.relative_queries) = index;
  (of_keys ? p.relative_keys : p.relative_queries) = {data, sizes[0], from_start(zero, sizes[0])};
}

void check_together(const char* op, const AttentionProblem& p) {
  require(is_softmax(p.score) || p.sinks == nullptr, op,
          "sinks need weights that are normalised by softmax");
  require(is_softmax(p.score) || (p.terms & normalizers()) == term(p.score.normalizer), op,
          "a score may have one normalizer");
  require(p.relative_queries.data == nullptr || p.head_scale == nullptr, op,
          "relative_queries and head_scale cannot be combined");
}

// Sets the place of a call's rows [first, first + count) in `whole`, and the remainder of `whole`.
void decode_part(const Arguments& given, Call& call, int64_t code, int64_t first, int64_t whole) {
  AttentionProblem& p = call.problem;
  const bool of_keys = code == static_cast<int64_t>(PartKind::keys);
  const int64_t count = of_keys ? p.tk : p.tq;
  require(whole < kMaskParamLimit && first >= 0 && first <= whole - count, given.op, "a part of ",
          count, of_keys ? " keys" : " queries", " must lie in the whole, got first=", first,
          " of ", whole);
  if (of_keys) {
    require(p.dropout.threshold == 0 || first % 4 == 0, given.op,
            "a part of the keys must start at a multiple of 4 for dropout, got first=", first);
    p.mask.part.first_k = p.dropout.first_k = first;
    p.mask.part.rest_k = whole - count;
  } else {
    p.mask.part.first_q = p.dropout.first_q = first;
    p.mask.part.rest_q = whole - count;
  }
}

}  // namespace

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

BiasPlace bias_place(const char* op, const Call& call, const Tensor& bias) {
  const AttentionProblem& p = call.problem;
  const bool own_q = bias.dim() == 4 && bias.size(2) == p.tq;
  const bool own_k = bias.dim() == 4 && bias.size(3) == p.tk;
  const ScoreStrides s = score_strides(
      op, "bias", bias, {p.batch, p.hq, own_q ? p.tq : call.whole_q, own_k ? p.tk : call.whole_k});
  const Part& part = p.mask.part;
  return {s, (own_q ? 0 : part.first_q * s.q) + (own_k ? 0 : part.first_k)};
}

const Tensor& side_tensor(const char* op, const Tensors& aux, int64_t index) {
  require(index >= 0 && index < static_cast<int64_t>(aux.size()), op,
          "aux must hold the tensor a rule names, got index ", index, " of ", aux.size());
  return aux[static_cast<size_t>(index)];
}

bool starts_with(const Ints& mask, LayoutKind kind) {
  return !mask.empty() && mask[0] == static_cast<int64_t>(kind);
}

void decode_mask(const Arguments& given, Call& call) {
  const char* const op = given.op;
  const Ints& mask = given.mask;
  AttentionProblem& p = call.problem;
  require(mask.size() % kMaskRuleInts == 0, op, "mask must hold ", kMaskRuleInts,
          " integers per rule, got ", mask.size());
  size_t at = 0;
  if (!mask.empty() && is_layout(mask[0])) {
    decode_layout(given, call);
    at = kMaskRuleInts;
  }
  p.mask = {p.tq, p.tk, 0, {}, {}};
  for (; at < mask.size() && is_part(mask[at]); at += kMaskRuleInts) {
    require(!call.has_layout, op, "packed and cached batches cannot be part of a longer call");
    decode_part(given, call, mask[at], mask[at + 1], mask[at + 2]);
  }
  const Part& part = p.mask.part;
  p.relative_shift = part.first_k - part.first_q - part.rest_k + part.rest_q;
  call.whole_q = p.tq + p.mask.part.rest_q;
  call.whole_k = p.tk + p.mask.part.rest_k;
  size_t end = mask.size();
  if (end > at && mask[end - kMaskRuleInts] == kOwnKernels) {
    call.own_kernels = true;
    end -= kMaskRuleInts;
  }
  const size_t rules = end / kMaskRuleInts - (call.has_layout ? 0 : at / kMaskRuleInts);
  require(rules <= kMaxMaskRules, op, "at most ", kMaxMaskRules, " mask rules are supported, got ",
          rules);
  for (; at < end; at += kMaskRuleInts) {
    const int64_t kind = mask[at], a = mask[at + 1], b = mask[at + 2];
    require(!is_layout(kind), op, "a layout must be the first mask rule, and the only one");
    require(is_mask_kind(kind), op, "mask rule must be a kind of semantics/mask_rules.h, got ",
            kind);
    MaskRule rule{static_cast<MaskKind>(kind), a, b, nullptr, nullptr, 0, 0, 0, 0};
    require(mask_parameters_fit(rule.kind, a, b), op, "parameters of mask rule ", kind,
            " must be valid for it and below 2^40, got ", a, " and ", b);
    set_side_tensors(op, call, rule, given.aux, mask[at + 3]);
    p.mask.rules[p.mask.count++] = rule;
  }
}

void decode_score(const Arguments& given, Call& call) {
  const char* const op = given.op;
  const Ints& score = given.score;
  const Floats& params = given.params;
  AttentionProblem& p = call.problem;
  double c = 0;  // parameter of the transform
  for (size_t at = 0; at < score.size(); at += kScoreRuleInts) {
    require(at + kScoreRuleInts <= score.size(), op, "score must hold ", kScoreRuleInts,
            " integers per rule, got ", score.size());
    const int64_t code = score[at], index = score[at + 1], parameter = score[at + 2];
    require(is_score_kind(code), op, "score rule must be a kind of semantics/score_rules.h, got ",
            code);
    const auto kind = static_cast<ScoreKind>(code);
    const char* const name = score_name(kind);
    const ScoreRole role = score_role(kind);
    require((p.terms & terms_of(role)) == 0, op,
            "score rules must have different roles, got two like ", name);
    p.terms |= term(kind);
    const int64_t count = score_parameters(kind),
                  last = static_cast<int64_t>(params.size()) - count;
    require(count == 0 || (parameter >= 0 && parameter <= last), op,
            "params must hold the parameters a rule names, got index ", parameter, " of ",
            params.size());
    const double* const parameters = count == 0 ? nullptr : params.data() + parameter;
    const auto tensor = [&](int64_t& place) -> const Tensor& {
      place = index;
      return side_tensor(op, given.aux, index);
    };
    switch (role) {
      case ScoreRole::head_scale:
        p.head_scale = keep_parameters(op, name, call, tensor(call.head_scale), {&p.hq, 1});
        break;
      case ScoreRole::relative_keys:
      case ScoreRole::relative_queries:
        set_distance_rows(op, call, kind, side_tensor(op, given.aux, index), index, parameters[0]);
        break;
      case ScoreRole::transform:
        c = parameters[0];
        require(std::isfinite(c) && c > 0, op, name, " must be finite and positive, got ", name,
                "=", c);
        break;
      case ScoreRole::bias:
        set_bias(op, call, tensor(call.bias));
        break;
      case ScoreRole::table:
        set_table(op, call, kind, tensor(call.table), parameters);
        break;
      case ScoreRole::sinks:
        p.sinks = keep_parameters(op, name, call, tensor(call.sinks), {&p.hq, 1});
        break;
      case ScoreRole::program:
        decode_program(given, at, call);
        at = score.size() - kScoreRuleInts;  // the rest of the code belongs to the program
        break;
      case ScoreRole::normalizer:
      case ScoreRole::stick:
      case ScoreRole::softpick:
        break;
    }
  }
  p.table.kind = rule_of(p.terms, ScoreRole::table);
  p.score = make_score(params[0], p.terms, c);
  check_together(op, p);
}

}  // namespace omniattn::ops::attention
