// From q.k to the logit (spec attention 1): f(s_h scale q.k) + bias + table term, by the rules of
// score_rules.h: s_h is the factor of a head, and f(s) = c g(s / c) the transform, or s itself.
//
// The factor `pre` is folded into q when it is packed: x = pre * (q.k). The logit is x, or
// post * g(x), plus what is added to it. Where nothing is added, kernels keep logits in units of
// ln 2, s log2(e), so that the softmax is a power of two. What is added may be anywhere in the
// range of its type (a mask of finfo.min), where s log2(e) overflows: then a logit is s itself, and
// only differences of logits, which may overflow to -inf, are multiplied by log2(e).
#pragma once

#include <cstdint>

#include "semantics/macros.h"
#include "semantics/score_rules.h"

namespace omniattn {

// Encoded form: kind, index of the tensor in aux or -1, index of the first parameter in params or
// -1.
constexpr int32_t kScoreRuleInts = 3;

OMNIATTN_FN bool is_score_kind(int64_t number) {
#define OMNIATTN_RULE(name, code, Rule) || number == code
  return false OMNIATTN_SCORE_RULES(OMNIATTN_RULE);
#undef OMNIATTN_RULE
}

// f(Rule{}) with the struct of a kind.
template <class F>
OMNIATTN_FN auto with_score_rule(ScoreKind kind, const F& f) {
  switch (kind) {
#define OMNIATTN_RULE(name, number, Rule) \
  case ScoreKind::name:                   \
    return f(score_rules::Rule{});
    OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
    case ScoreKind::none:
      break;
  }
  __builtin_unreachable();
}

// The rule of this role that comes last in the list.
OMNIATTN_FN ScoreKind last_of(ScoreRole role) {
  ScoreKind last = ScoreKind::none;
#define OMNIATTN_RULE(name, number, Rule) \
  if (score_rules::Rule::kRole == role) last = ScoreKind::name;
  OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
  return last;
}

// f(Rule{}) with the struct of a kind that is known to have this role. (No comparison leads to the
// last one: as a case of a switch it took kernels of attention_backward_mma_cuda.cu 5 registers.)
template <ScoreRole kRole, class F>
OMNIATTN_FN auto with_score_rule(ScoreKind kind, const F& f) {
#define OMNIATTN_RULE(name, number, Rule)                             \
  if constexpr (score_rules::Rule::kRole == kRole) {                  \
    if (ScoreKind::name == last_of(kRole) || kind == ScoreKind::name) \
      return f(score_rules::Rule{});                                  \
  }
  OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
  __builtin_unreachable();
}

OMNIATTN_FN ScoreRole score_role(ScoreKind kind) {
  return with_score_rule(kind, [](auto rule) OMNIATTN_LAMBDA { return rule.kRole; });
}
OMNIATTN_FN int32_t score_parameters(ScoreKind kind) {
  return with_score_rule(kind, [](auto rule) OMNIATTN_LAMBDA { return rule.kParameters; });
}
inline const char* score_name(ScoreKind kind) {
  switch (kind) {
#define OMNIATTN_RULE(name, number, Rule) \
  case ScoreKind::name:                   \
    return #name;
    OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
    case ScoreKind::none:
      break;
  }
  __builtin_unreachable();
}

// ---- the rules of a call as a set of bits -------------------------------------------------------

#define OMNIATTN_RULE(name, number, Rule) static_assert((number) < 32);
OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE

OMNIATTN_FN uint32_t term(ScoreKind kind) { return uint32_t{1} << static_cast<int32_t>(kind); }

// All rules of a role.
OMNIATTN_FN uint32_t terms_of(ScoreRole role) {
  uint32_t found = 0;
#define OMNIATTN_RULE(name, number, Rule) \
  if (score_rules::Rule::kRole == role) found |= term(ScoreKind::name);
  OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
  return found;
}

// The rule of a set that has this role.
OMNIATTN_FN ScoreKind rule_of(uint32_t terms, ScoreRole role) {
#define OMNIATTN_RULE(name, number, Rule) \
  if ((terms & terms_of(role) & term(ScoreKind::name)) != 0) return ScoreKind::name;
  OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
  return ScoreKind::none;
}

// Whether the weight of a pair is 2^(pre q.k - shift) whatever rules are in use: a sink takes part
// in the sum of a row only. A rule that is not named here is never plain.
OMNIATTN_FN bool is_plain(uint32_t terms) { return (terms & ~term(ScoreKind::sinks)) == 0; }

// Whether logits must be natural: something is added to them or joins them in the softmax, or their
// weights are no powers. A rule that is not named here needs them.
OMNIATTN_FN bool is_natural(uint32_t terms) {
  return (terms & ~(terms_of(ScoreRole::transform) | terms_of(ScoreRole::head_scale))) != 0;
}

// ---- the score of a call ------------------------------------------------------------------------

struct Score {
  double pre;    // factor on q.k
  double post;   // c of the transform in the unit of logits
  double chain;  // d(scale * q.k) / dx = scale / pre: dx times it is the gradient of scale * q.k
  bool natural;  // logits are s, else s log2(e)
  ScoreKind transform;   // none: x is the logit
  ScoreKind normaliser;  // none: softmax
};

// `c`: the parameter of the transform, if there is one.
OMNIATTN_FN Score make_score(double scale, uint32_t terms, double c) {
  const bool natural = is_natural(terms);
  const double unit = natural ? 1.0 : kLog2E;
  const ScoreKind transform = rule_of(terms, ScoreRole::transform);
  const ScoreKind normaliser = rule_of(terms, ScoreRole::normaliser);
  return transform == ScoreKind::none
             ? Score{scale * unit, 0.0, natural ? 1.0 : kLn2, natural, transform, normaliser}
             : Score{scale / c, c * unit, c, natural, transform, normaliser};
}

// Whether rows are normalised, and not each weight by itself.
OMNIATTN_FN bool is_softmax(const Score& score) { return score.normaliser == ScoreKind::none; }

// e^(a - b) = 2^(factor * (a - b)) of logits a and b.
template <class T>
OMNIATTN_FN T exponent_factor(const Score& score) {
  return score.natural ? T(kLog2E) : T(1);
}

template <class T>
OMNIATTN_FN T from_logit(const Score& score, T logit) {
  return score.natural ? logit : logit * T(kLn2);
}
template <class T>
OMNIATTN_FN T to_logit(const Score& score, T s) {
  return score.natural ? s : s * T(kLog2E);
}

// The transform's g(x) and g'(x), of a vector or a scalar.
template <class V>
OMNIATTN_FN score_rules::ValueAndSlope<V> transform_at(const Score& score, V x) {
  return with_score_rule<ScoreRole::transform>(
      score.transform, [&](auto rule) OMNIATTN_LAMBDA { return rule.at(x); });
}

// The weight of a logit and its derivative, where a normaliser gives it.
template <class V>
OMNIATTN_FN score_rules::ValueAndSlope<V> weight_at(const Score& score, V logit) {
  return with_score_rule<ScoreRole::normaliser>(
      score.normaliser, [&](auto rule) OMNIATTN_LAMBDA { return rule.at(logit); });
}

// ---- the table's term ---------------------------------------------------------------------------

template <class Rule>
OMNIATTN_FN bool needs_both_positions() {
  if constexpr (Rule::kRole == ScoreRole::table) return !Rule{}.kRelative;
  return false;
}

// Whether the term, if there is one, depends on k - i alone.
OMNIATTN_FN bool is_relative(ScoreKind kind) {
#define OMNIATTN_RULE(name, number, Rule) \
  if (needs_both_positions<score_rules::Rule>() && kind == ScoreKind::name) return false;
  OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
  return true;
}

OMNIATTN_FN int64_t table_row(const TableTerm& term, int64_t i, int64_t k) {
  return with_score_rule<ScoreRole::table>(
      term.kind, [&](auto rule) OMNIATTN_LAMBDA { return rule.row(term, i, k); });
}

OMNIATTN_FN double table_factor(const TableTerm& term, int64_t i, int64_t k) {
  return with_score_rule<ScoreRole::table>(
      term.kind, [&](auto rule) OMNIATTN_LAMBDA { return rule.factor(i, k); });
}

// Whether the parameters have a meaning and every row of a (tq, tk) problem lies in the table.
OMNIATTN_FN bool table_fits(const TableTerm& term, int64_t tq, int64_t tk) {
  constexpr int64_t kLimit = int64_t{1} << 40;
  if (term.a < 0 || term.a >= kLimit || term.b < 0 || term.b >= kLimit) return false;
  return with_score_rule<ScoreRole::table>(
      term.kind, [&](auto rule) OMNIATTN_LAMBDA { return rule.fits(term, tq, tk); });
}

}  // namespace omniattn
