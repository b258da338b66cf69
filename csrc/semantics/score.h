// From q.k to the logit (spec attention 1): s = f(s_h scale q.k) + bias + table term, f the
// identity or cap * tanh(. / cap), s_h a factor per head.
//
// The factor `pre` is folded into q when it is packed: x = pre * (q.k), then the logit is x, or
// post * tanh(x) with a softcap, plus what is added to it. Where nothing is, kernels keep logits in
// units of ln 2, s log2(e), so that the softmax is a power of two. What is added may be anywhere in
// the range of its type (a mask of finfo.min), where s log2(e) overflows: then a logit is s itself,
// and only differences of logits, which may overflow to -inf, are multiplied by log2(e).
#pragma once

#include <cstdint>

#include "semantics/macros.h"

namespace omniattn {

constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

// The rules that a call's score is made of. Tables have the shape (B | 1, rows, Hq) and the
// parameters a and b of TableTerm.
enum class ScoreKind : int32_t {
  bias = 0,        // (B | 1, Hq | 1, Tq | 1, Tk)
  softcap = 1,     // parameter: the cap
  sinks = 2,       // (Hq,)
  head_scale = 3,  // (Hq,)
  sigmoid = 4,
  relu2 = 5,
  alibi = 6,  // tables
  buckets = 7,
  distances = 8,
  window = 9,
};
constexpr int32_t kScoreKinds = 10;

// Rules as a set of bits.
OMNIATTN_FN uint32_t term(ScoreKind kind) { return uint32_t{1} << static_cast<int32_t>(kind); }
// Whether the weight of a pair is 2^(pre q.k - shift) whatever rules are in use: a sink takes part
// in the sum of a row only. A rule that is not named here is never plain.
OMNIATTN_FN bool is_plain(uint32_t terms) { return (terms & ~term(ScoreKind::sinks)) == 0; }

// What turns the logits of a row into weights of the values, see softmax.h.
enum class Normaliser : int32_t { softmax, sigmoid, relu2 };

struct Score {
  double pre;   // factor on q.k
  double post;  // cap in the unit of logits; 0: no softcap
  double
      chain;  // d(scale * q.k) / dx = scale / pre: what turns dx into the gradient of scale * q.k
  bool natural;  // logits are s, else s log2(e)
  Normaliser normaliser;
};

// `plain`: nothing is added to scale * q.k or joins it in the softmax. Weights that are not
// normalised are those of natural logits.
OMNIATTN_FN Score make_score(double scale, double softcap, bool plain,
                             Normaliser normaliser = Normaliser::softmax) {
  const bool natural = !plain || normaliser != Normaliser::softmax;
  const double unit = natural ? 1.0 : kLog2E;
  return softcap > 0 ? Score{scale / softcap, softcap * unit, softcap, natural, normaliser}
                     : Score{scale * unit, 0.0, natural ? 1.0 : kLn2, natural, normaliser};
}

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

// Derivative of cap * tanh(z / cap) by z, given t = tanh(z / cap).
template <class V>
OMNIATTN_FN V softcap_slope(V t) {
  return V(1) - t * t;
}

// ---- table terms: table[row(i, k)][h] * factor(i, k), with i = q + Tk - Tq ----------------------

enum class TableKind : int32_t {
  none,
  alibi,      // one row, the slopes: -slope * |k - i|
  buckets,    // T5: row = bucket of k - i; a: whether both directions count, b: max distance
  distances,  // row = k - i + a, kept inside the table
  window,     // Swin: row = difference of the places in a window of a rows and b columns
};

struct TableTerm {
  TableKind kind;
  int64_t a, b;
  int64_t rows;
  const void* data;  // (B | 1, rows, Hq) in the compute type, contiguous
  int64_t stride_b;
};

// The term depends on k - i alone.
OMNIATTN_FN bool is_relative(TableKind kind) { return kind != TableKind::window; }

// Bucket of T5 (spec attention 15): near distances have one each, farther ones share on a
// logarithmic scale, floor(steps * ln(far / exact) / ln(limit / exact)) as powers of integers.
OMNIATTN_FN int64_t t5_bucket(int64_t distance, bool bidirectional, int64_t buckets,
                              int64_t max_distance) {
  const int64_t count = bidirectional ? buckets / 2 : buckets;
  const int64_t side = bidirectional && distance > 0 ? count : 0;
  const int64_t far = distance < 0 ? -distance : bidirectional ? distance : 0;
  const int64_t exact = count / 2, steps = count - exact;
  if (far < exact) return side + far;
  if (far >= max_distance) return side + count - 1;
  double power = 1, bound = 1;
  for (int64_t n = 0; n < steps; ++n)
    power *= static_cast<double>(far) / static_cast<double>(exact);
  int64_t step = 0;
  for (; step < steps; ++step) {
    bound *= static_cast<double>(max_distance) / static_cast<double>(exact);
    if (power < bound) break;
  }
  return side + exact + (step < steps ? step : steps - 1);
}

OMNIATTN_FN int64_t table_row(const TableTerm& term, int64_t i, int64_t k) {
  switch (term.kind) {
    case TableKind::buckets:
      return t5_bucket(k - i, term.a != 0, term.rows, term.b);
    case TableKind::distances: {
      const int64_t row = k - i + term.a;
      return row < 0 ? 0 : row < term.rows ? row : term.rows - 1;
    }
    case TableKind::window:
      return (i / term.b - k / term.b + term.a - 1) * (2 * term.b - 1) + i % term.b - k % term.b +
             term.b - 1;
    default:
      return 0;
  }
}

OMNIATTN_FN double table_factor(const TableTerm& term, int64_t i, int64_t k) {
  return term.kind == TableKind::alibi ? -static_cast<double>(k > i ? k - i : i - k) : 1.0;
}

// Whether the parameters have a meaning and every row of a (tq, tk) problem lies in the table.
OMNIATTN_FN bool table_fits(const TableTerm& term, int64_t tq, int64_t tk) {
  constexpr int64_t kLimit = int64_t{1} << 40;
  if (term.a < 0 || term.a >= kLimit || term.b < 0 || term.b >= kLimit) return false;
  switch (term.kind) {
    case TableKind::alibi:
      return term.rows == 1;
    case TableKind::buckets: {
      const int64_t exact = (term.a != 0 ? term.rows / 2 : term.rows) / 2;
      return exact >= 1 && term.b > exact;
    }
    case TableKind::distances:
      return term.rows >= 1;
    case TableKind::window:
      return term.a >= 1 && term.b >= 1 && term.a < (1 << 16) && term.b < (1 << 16) &&
             term.rows == (2 * term.a - 1) * (2 * term.b - 1) && tq == term.a * term.b && tk == tq;
    default:
      return false;
  }
}

}  // namespace omniattn
