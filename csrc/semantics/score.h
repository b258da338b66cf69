// The logit: f(s_h scale q.k) + bias + table term, by the rules of score_rules.h. Distance terms,
// q.r and k.w, count as part of q.k here. s_h is the factor of a head; f(s) is the
// transform c g(s / c), or s without a transform.
//
// The factor `pre` is folded into q when q is packed: x = pre * (q.k). The logit is x, or
// post * g(x), plus the terms. Without terms, kernels keep logits in units of ln 2, as s log2(e),
// so that the softmax uses powers of two. A term can be as large as its type allows (a mask of
// finfo.min), where s log2(e) overflows. With terms the logits are therefore s itself, and only
// differences of logits, which may overflow to -inf, are multiplied by log2(e).
#pragma once

#include <cstdint>

#include "semantics/macros.h"
#include "semantics/score_rules.h"

namespace omniattn {

// Encoded form: kind, index of the tensor in aux, index of the first parameter in params; -1: none.
constexpr int32_t kScoreRuleInts = 3;

OMNIATTN_FN bool is_score_kind(int64_t number) {
#define OMNIATTN_RULE(name, code, Rule) || number == code
  return false OMNIATTN_SCORE_RULES(OMNIATTN_RULE);
#undef OMNIATTN_RULE
}

// Calls f(Rule{}) with the struct of a kind.
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
  OMNIATTN_UNREACHABLE();
}

// Last rule of a role in the list.
OMNIATTN_FN ScoreKind last_of(ScoreRole role) {
  ScoreKind last = ScoreKind::none;
#define OMNIATTN_RULE(name, number, Rule) \
  if (score_rules::Rule::kRole == role) last = ScoreKind::name;
  OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
  return last;
}

// Calls f(Rule{}) with the struct of a kind that has this role. The last rule of the role is taken
// without a comparison: a switch cost kernels of attention_backward_mma_cuda.cu 5 registers.
template <ScoreRole kRole, class F>
OMNIATTN_FN auto with_score_rule(ScoreKind kind, const F& f) {
#define OMNIATTN_RULE(name, number, Rule)                             \
  if constexpr (score_rules::Rule::kRole == kRole) {                  \
    if (ScoreKind::name == last_of(kRole) || kind == ScoreKind::name) \
      return f(score_rules::Rule{});                                  \
  }
  OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
  OMNIATTN_UNREACHABLE();
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
  OMNIATTN_UNREACHABLE();
}

// The rules of a call as a bit set.

#define OMNIATTN_RULE(name, number, Rule) static_assert((number) < 32);
OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE

OMNIATTN_FN uint32_t term(ScoreKind kind) { return uint32_t{1} << static_cast<int32_t>(kind); }

// Set of all rules of a role.
OMNIATTN_FN uint32_t terms_of(ScoreRole role) {
  uint32_t found = 0;
#define OMNIATTN_RULE(name, number, Rule) \
  if (score_rules::Rule::kRole == role) found |= term(ScoreKind::name);
  OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
  return found;
}

// The rule of a set that is in another set, or has a role.
OMNIATTN_FN ScoreKind rule_of(uint32_t terms, uint32_t sought) {
#define OMNIATTN_RULE(name, number, Rule) \
  if ((terms & sought & term(ScoreKind::name)) != 0) return ScoreKind::name;
  OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
  return ScoreKind::none;
}
OMNIATTN_FN ScoreKind rule_of(uint32_t terms, ScoreRole role) {
  return rule_of(terms, terms_of(role));
}

// The rules that replace the softmax.
OMNIATTN_FN uint32_t normalizers() {
  return terms_of(ScoreRole::normalizer) | terms_of(ScoreRole::stick) |
         terms_of(ScoreRole::softpick);
}

// True if the weight of a pair is 2^(pre q.k - shift). A sink only adds to the sum of a row. Any
// other rule, including a new one, is not plain.
OMNIATTN_FN bool is_plain(uint32_t terms) { return (terms & ~term(ScoreKind::sinks)) == 0; }

// The rules that change the argument of the transform.
OMNIATTN_FN uint32_t product_terms() {
  return terms_of(ScoreRole::head_scale) | terms_of(ScoreRole::relative_keys) |
         terms_of(ScoreRole::relative_queries);
}

// True if the logit of a visible pair is pre q.k. The factor of a head is folded into q, a sink
// joins the row later, and a normalizer weighs logits. Any other rule, including a new one, changes
// the logits.
OMNIATTN_FN bool leaves_logits(uint32_t terms) {
  return (terms & ~(product_terms() | terms_of(ScoreRole::sinks) | normalizers())) == 0;
}

// True if logits must be in natural units: a term is added to them, a sink joins them in the
// softmax, or a non-exponential normalizer weighs them. A rule that is not named here needs
// natural units.
OMNIATTN_FN bool is_natural(uint32_t terms) {
  return (terms & ~(terms_of(ScoreRole::transform) | product_terms())) != 0;
}

// The score of a call.

struct Score {
  double pre;            // factor of q.k
  double post;           // c of the transform in the unit of logits
  double chain;          // scale / pre: ds/dx is chain, multiplied by g'(x) if there is a transform
  bool natural;          // true: logits are s; false: s log2(e)
  ScoreKind transform;   // none: x is the logit
  ScoreKind normalizer;  // of any of its roles, none: softmax
};

// `c` is the parameter of the transform, if any.
OMNIATTN_FN Score make_score(double scale, uint32_t terms, double c) {
  const bool natural = is_natural(terms);
  const double unit = natural ? 1.0 : kLog2E;
  const ScoreKind transform = rule_of(terms, ScoreRole::transform);
  const ScoreKind normalizer = rule_of(terms, normalizers());
  return transform == ScoreKind::none
             ? Score{scale * unit, 0.0, natural ? 1.0 : kLn2, natural, transform, normalizer}
             : Score{scale / c, c * unit, c, natural, transform, normalizer};
}

// True if the weights of a row are normalised jointly, by a softmax.
OMNIATTN_FN bool is_softmax(const Score& score) { return score.normalizer == ScoreKind::none; }
// True if the weights of a row break a stick, see stick_breaking.h.
OMNIATTN_FN bool is_stick(const Score& score) {
  return score.normalizer == ScoreKind::stick_breaking;
}

// True if the weights of a row are softpick's, see attention_softpick.h.
OMNIATTN_FN bool is_softpick(const Score& score) { return score.normalizer == ScoreKind::softpick; }
// True if a row keeps a maximum and a sum, by which its output is divided.
OMNIATTN_FN bool divides_rows(const Score& score) {
  return is_softmax(score) || is_softpick(score);
}
// True if the weight of a key depends on its logit and the row's statistics alone, so that no other
// pass over the row is needed.
OMNIATTN_FN bool weighs_by_key(const Score& score) {
  return !is_stick(score) && !is_softpick(score);
}

// For logits a and b: e^(a - b) = 2^(factor * (a - b)).
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

// g(x) and g'(x) of the transform, for vectors and scalars.
template <class V>
OMNIATTN_FN ValueAndSlope<V> transform_at(const Score& score, V x) {
  return with_score_rule<ScoreRole::transform>(
      score.transform, [&](auto rule) OMNIATTN_LAMBDA { return rule.at(x); });
}

// Weight that a normalizer gives to a logit, and its derivative.
template <class V>
OMNIATTN_FN ValueAndSlope<V> weight_at(const Score& score, V logit) {
  return with_score_rule<ScoreRole::normalizer>(
      score.normalizer, [&](auto rule) OMNIATTN_LAMBDA { return rule.at(logit); });
}

// The table term.

template <class Rule>
OMNIATTN_FN bool needs_both_positions() {
  if constexpr (Rule::kRole == ScoreRole::table) return !Rule{}.kRelative;
  return false;
}

// True if the term, if any, depends on k - i alone.
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

// True if the parameters are valid and every row that a (tq, tk) problem reads lies in the table.
OMNIATTN_FN bool table_fits(const TableTerm& term, int64_t tq, int64_t tk) {
  constexpr int64_t kLimit = int64_t{1} << 40;
  if (term.a < 0 || term.a >= kLimit || term.b < 0 || term.b >= kLimit) return false;
  return with_score_rule<ScoreRole::table>(
      term.kind, [&](auto rule) OMNIATTN_LAMBDA { return rule.fits(term, tq, tk); });
}

}  // namespace omniattn
