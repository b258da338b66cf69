// Keys that a query may attend to: those that every rule of a mask allows (mask_rules.h).
#pragma once

#include <cstdint>

#include "semantics/macros.h"
#include "semantics/mask_rules.h"
#include "semantics/seqlen.h"

namespace omniattn {

constexpr int32_t kMaxMaskRules = 8;
// Encoded form: kind, a, b, index of the first side tensor in aux or -1.
constexpr int32_t kMaskRuleInts = 4;

// Place of a problem in a larger one, whose positions the rules refer to. Query 0 of the problem is
// query first_q of the larger one, which has rest_q more queries; likewise for keys. All fields are
// 0 if the problem is the whole.
struct Part {
  int64_t first_q, first_k, rest_q, rest_k;
};

struct AttentionMask {
  int64_t tq, tk;
  int32_t count;
  MaskRule rules[kMaxMaskRules];
  Part part;
};

// A mask applied to a problem of these lengths, by default the lengths of the mask. Callers use
// positions of the problem; rules and their side tensors use positions of the whole.
struct MaskView {
  int64_t tq, tk;
  const AttentionMask* mask;

  OMNIATTN_FN MaskView(int64_t tq_, int64_t tk_, const AttentionMask& of)
      : tq(tq_), tk(tk_), mask(&of) {}
  OMNIATTN_FN MaskView(const AttentionMask& of) : MaskView(of.tq, of.tk, of) {}

  OMNIATTN_FN const Part& part() const { return mask->part; }
  OMNIATTN_FN Range to_whole_q(Range q) const {
    return {q.begin + part().first_q, q.end + part().first_q};
  }
  OMNIATTN_FN Range to_whole_k(Range k) const {
    return {k.begin + part().first_k, k.end + part().first_k};
  }
  OMNIATTN_FN Range to_part_q(Range q) const {
    return {q.begin - part().first_q, q.end - part().first_q};
  }
  OMNIATTN_FN Range to_part_k(Range k) const {
    return {k.begin - part().first_k, k.end - part().first_k};
  }
};

enum class TileClass : int32_t { skip, full, partial };

// Calls f(Rule{}) with the struct of a kind.
template <class F>
OMNIATTN_FN auto with_mask_rule(MaskKind kind, const F& f) {
  switch (kind) {
#define OMNIATTN_RULE(name, number, Rule) \
  case MaskKind::name:                    \
    return f(mask_rules::Rule{});
    OMNIATTN_MASK_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
  }
  OMNIATTN_UNREACHABLE();
}

OMNIATTN_FN bool is_mask_kind(int64_t number) {
#define OMNIATTN_RULE(name, code, Rule) || number == code
  return false OMNIATTN_MASK_RULES(OMNIATTN_RULE);
#undef OMNIATTN_RULE
}

OMNIATTN_FN SideTensor mask_side_tensor(MaskKind kind) {
  return with_mask_rule(kind, [](auto rule) OMNIATTN_LAMBDA { return rule.kSide; });
}

// True if a rule's parameters are valid.
OMNIATTN_FN bool mask_parameters_fit(MaskKind kind, int64_t a, int64_t b) {
  if (a <= -kMaskParamLimit || a >= kMaskParamLimit) return false;
  if (b <= -kMaskParamLimit || b >= kMaskParamLimit) return false;
  return with_mask_rule(kind, [&](auto rule) OMNIATTN_LAMBDA { return rule.parameters_fit(a, b); });
}

// Calls f(Rule{}, place) for each rule of a mask until f returns false.
template <class F>
OMNIATTN_FN void for_rules(const MaskView& mask, int64_t b, int64_t h, const F& f) {
  for (int32_t n = 0; n < mask.mask->count; ++n) {
    const mask_rules::Place x{mask.mask->rules[n], mask.tq + mask.part().rest_q,
                              mask.tk + mask.part().rest_k, b, h};
    const bool goes_on =
        with_mask_rule(x.rule.kind, [&](auto rule) OMNIATTN_LAMBDA { return f(rule, x); });
    if (!goes_on) return;
  }
}

// A range that holds every key that some query of q sees in any head.
OMNIATTN_FN Range visible_keys(const MaskView& mask, int64_t b, Range q) {
  Range keys = mask.to_whole_k({0, mask.tk});
  for_rules(mask, b, 0, [&](auto rule, const auto& x) OMNIATTN_LAMBDA {
    keys = intersect(keys, rule.keys_any(x, mask.to_whole_q(q)));
    return !is_empty(keys);
  });
  return mask.to_part_k(keys);
}

// A range that holds every query that sees some key of k in any head.
OMNIATTN_FN Range visible_queries(const MaskView& mask, int64_t b, Range k) {
  Range queries = mask.to_whole_q({0, k.begin < mask.tk ? mask.tq : 0});
  for_rules(mask, b, 0, [&](auto rule, const auto& x) OMNIATTN_LAMBDA {
    queries = intersect(queries, rule.queries_any(x, mask.to_whole_k(k)));
    return !is_empty(queries);
  });
  return mask.to_part_q(queries);
}

// First key from `key` on that some query of q may see in head h; at least Tk if there is none.
OMNIATTN_FN int64_t next_visible_key(const MaskView& mask, int64_t b, int64_t h, Range q,
                                     int64_t key) {
  for (int64_t before = -1; before < key && key < mask.tk;) {  // until no rule skips a key
    before = key;
    for_rules(mask, b, h, [&](auto rule, const auto& x) OMNIATTN_LAMBDA {
      key = rule.next_key(x, mask.to_whole_q(q), key + mask.part().first_k) - mask.part().first_k;
      return key < mask.tk;
    });
  }
  return key;
}

// First query from `query` on that may see some key of k in head h; at least Tq if there is
// none.
OMNIATTN_FN int64_t next_visible_query(const MaskView& mask, int64_t b, int64_t h, Range k,
                                       int64_t query) {
  for (int64_t before = -1; before < query && query < mask.tq;) {
    before = query;
    for_rules(mask, b, h, [&](auto rule, const auto& x) OMNIATTN_LAMBDA {
      query =
          rule.next_query(x, mask.to_whole_k(k), query + mask.part().first_q) - mask.part().first_q;
      return query < mask.tq;
    });
  }
  return query;
}

// A range that holds every key of k that some query of q sees in head h.
OMNIATTN_FN Range visible_keys_in(const MaskView& mask, int64_t b, int64_t h, Range q, Range k) {
  Range keys = intersect(k, {0, mask.tk});
  if (is_empty(keys)) return keys;
  keys = mask.to_whole_k(keys);
  for_rules(mask, b, h, [&](auto rule, const auto& x) OMNIATTN_LAMBDA {
    keys = rule.keys_in(x, mask.to_whole_q(q), keys);
    return !is_empty(keys);
  });
  return mask.to_part_k(keys);
}

// True only if every query of q sees every key of k; keys from Tk on count as hidden.
OMNIATTN_FN bool all_visible(const MaskView& mask, int64_t b, int64_t h, Range q, Range k) {
  bool all = contains({0, mask.tk}, k);
  if (!all) return false;
  for_rules(mask, b, h, [&](auto rule, const auto& x) OMNIATTN_LAMBDA {
    all = rule.all(x, mask.to_whole_q(q), mask.to_whole_k(k));
    return all;
  });
  return all;
}

// Class of a tile q x k, which must not be empty.
OMNIATTN_FN TileClass classify(const MaskView& mask, int64_t b, int64_t h, Range q, Range k) {
  if (is_empty(visible_keys_in(mask, b, h, q, k))) return TileClass::skip;
  return all_visible(mask, b, h, q, k) ? TileClass::full : TileClass::partial;
}

// Bit n: query q sees key + n, for 0 <= n < 64. This is what kernels apply to partial tiles.
OMNIATTN_FN uint64_t visible_bits(const MaskView& mask, int64_t b, int64_t h, int64_t q,
                                  int64_t key) {
  uint64_t bits = mask_rules::range_bits({0, mask.tk}, key);
  if (bits == 0) return 0;
  for_rules(mask, b, h, [&](auto rule, const auto& x) OMNIATTN_LAMBDA {
    bits &= rule.bits(x, q + mask.part().first_q, key + mask.part().first_k);
    return bits != 0;
  });
  return bits;
}

OMNIATTN_FN bool visible(const MaskView& mask, int64_t b, int64_t h, int64_t q, int64_t k) {
  return (visible_bits(mask, b, h, q, k) & 1) != 0;
}

}  // namespace omniattn
