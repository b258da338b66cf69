// The rules that a score consists of, one struct each. A call has at most one rule of each role:
//
//   head_scale  (Hq,)                        a factor of s = scale q.k for each head
//   relative_keys     (rows, Hq, D), zero    a term scale q.r of s; r is row k - i + zero, clamped
//   relative_queries  (rows, Hq, D), zero    a term scale k.r of s, read likewise
//   transform   a parameter c > 0            f(s) = c g(s / c)
//   bias        (B | 1, Hq | 1, Tq | 1, Tk)  a term
//   table       (B | 1, rows, Hq), a, b      a term table[row(i, k)][h] * factor(i, k)
//   program                                  a function of the score and of b, h, q and k, see
//                                            score_program.h
//   sinks       (Hq,)                        the logit of one more key, whose value is 0
//   normalizer                               the weight of each logit, instead of a softmax
//   stick                                    weights that break a stick, see stick_breaking.h
//   softpick                                 weights of rectified powers, see attention_softpick.h
//
// with i = q + Tk - Tq. The struct of a transform or normalizer gives its value and derivative at x
// (at), written once for vectors and scalars on the CPU and for CUDA. The struct of a table gives
// the row that a pair of positions reads (row) and the factor of that row (factor). It also says
// whether both depend on k - i alone (kRelative), and whether the table and its parameters are
// valid (fits).
//
// To add a rule, write its struct here and a line in OMNIATTN_SCORE_RULES. A struct that lacks a
// member does not compile.
#pragma once

#include <math.h>  // with the float overloads in the global namespace

#include <cstdint>

#include "semantics/macros.h"
#include "semantics/value_and_slope.h"

namespace omniattn {

// name, number in the encoded form, struct
#define OMNIATTN_SCORE_RULES(rule)                                                         \
  rule(bias, 0, Bias) rule(softcap, 1, Softcap) rule(sinks, 2, Sinks)                      \
      rule(head_scale, 3, HeadScale) rule(sigmoid, 4, Sigmoid) rule(relu2, 5, SquaredRelu) \
          rule(alibi, 6, Alibi) rule(buckets, 7, Buckets) rule(distances, 8, Distances)    \
              rule(window, 9, Window) rule(program, 10, Program)                           \
                  rule(relative_keys, 11, RelativeKeys)                                    \
                      rule(relative_queries, 12, RelativeQueries)                          \
                          rule(stick_breaking, 13, StickBreaking) rule(softpick, 14, Softpick)

enum class ScoreKind : int32_t {
  none = -1,
#define OMNIATTN_RULE(name, number, Rule) name = number,
  OMNIATTN_SCORE_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
};

enum class ScoreRole : int32_t {
  head_scale,
  relative_keys,
  relative_queries,
  transform,
  bias,
  table,
  program,
  sinks,
  normalizer,
  stick,
  softpick
};

constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

struct TableTerm {
  ScoreKind kind;
  int64_t a, b;
  int64_t rows;
  const void* data;  // (B | 1, rows, Hq) in the compute type, contiguous; null: no term
  int64_t stride_b;
};

namespace score_rules {

// Scalar functions under the names that runtime/vec.h uses.

#if defined(__CUDACC__)
using ::max;
using ::min;
#else
OMNIATTN_FN float max(float a, float b) { return a > b ? a : b; }
OMNIATTN_FN double max(double a, double b) { return a > b ? a : b; }
OMNIATTN_FN float min(float a, float b) { return a < b ? a : b; }
OMNIATTN_FN double min(double a, double b) { return a < b ? a : b; }
#endif
OMNIATTN_FN float reciprocal(float x) { return 1.0f / x; }
OMNIATTN_FN double reciprocal(double x) { return 1.0 / x; }

// Roles.

// kParameters: number of parameters in the encoded form.
struct HeadScale {
  static constexpr ScoreRole kRole = ScoreRole::head_scale;
  static constexpr int32_t kParameters = 0;
};
struct RelativeKeys {
  static constexpr ScoreRole kRole = ScoreRole::relative_keys;
  static constexpr int32_t kParameters = 1;
};
struct RelativeQueries {
  static constexpr ScoreRole kRole = ScoreRole::relative_queries;
  static constexpr int32_t kParameters = 1;
};
struct Transform {
  static constexpr ScoreRole kRole = ScoreRole::transform;
  static constexpr int32_t kParameters = 1;
};
struct Bias {
  static constexpr ScoreRole kRole = ScoreRole::bias;
  static constexpr int32_t kParameters = 0;
};
struct Table {
  static constexpr ScoreRole kRole = ScoreRole::table;
  static constexpr int32_t kParameters = 2;
  OMNIATTN_FN static double factor(int64_t, int64_t) { return 1.0; }
};
struct Program {
  static constexpr ScoreRole kRole = ScoreRole::program;
  static constexpr int32_t kParameters = 0;
};
struct Sinks {
  static constexpr ScoreRole kRole = ScoreRole::sinks;
  static constexpr int32_t kParameters = 0;
};
struct Normalizer {
  static constexpr ScoreRole kRole = ScoreRole::normalizer;
  static constexpr int32_t kParameters = 0;
};
struct StickBreaking {
  static constexpr ScoreRole kRole = ScoreRole::stick;
  static constexpr int32_t kParameters = 0;
};
struct Softpick {
  static constexpr ScoreRole kRole = ScoreRole::softpick;
  static constexpr int32_t kParameters = 0;
};

// Transforms: g(x).

struct Softcap : Transform {
  template <class V>
  OMNIATTN_FN static ValueAndSlope<V> at(V x) {
    const V t = tanh(x);
    return {t, V(1) - t * t};
  }
};

// Normalizers: the weight of a logit x, which is 0 at x = -inf.

struct Sigmoid : Normalizer {
  template <class V>
  OMNIATTN_FN static ValueAndSlope<V> at(V x) {
    const V e = exp2(min(V(126), x * V(kLog2E)));
    const V weight = e * reciprocal(V(1) + e);
    return {weight, weight * (V(1) - weight)};
  }
};

// relu(x)^2
struct SquaredRelu : Normalizer {
  template <class V>
  OMNIATTN_FN static ValueAndSlope<V> at(V x) {
    const V root = max(x, V(0));
    return {root * root, root + root};
  }
};

// Tables.

// ALiBi: the single row holds the slopes; the term is -slope * |k - i|.
struct Alibi : Table {
  static constexpr bool kRelative = true;
  OMNIATTN_FN static int64_t row(const TableTerm&, int64_t, int64_t) { return 0; }
  OMNIATTN_FN static double factor(int64_t i, int64_t k) {
    return -static_cast<double>(k > i ? k - i : i - k);
  }
  OMNIATTN_FN static bool fits(const TableTerm& term, int64_t, int64_t) { return term.rows == 1; }
};

// T5 bucket: each near distance has its own bucket, farther ones share buckets on a log scale,
// floor(steps * ln(far / exact) / ln(max_distance / exact)), found by powers instead of logarithms.
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

// T5: row = bucket of k - i; a: true if both directions count; b: maximum distance.
struct Buckets : Table {
  static constexpr bool kRelative = true;
  OMNIATTN_FN static int64_t row(const TableTerm& term, int64_t i, int64_t k) {
    return t5_bucket(k - i, term.a != 0, term.rows, term.b);
  }
  OMNIATTN_FN static bool fits(const TableTerm& term, int64_t, int64_t) {
    const int64_t exact = (term.a != 0 ? term.rows / 2 : term.rows) / 2;
    return exact >= 1 && term.b > exact;
  }
};

// row = k - i + a, clamped to the table.
struct Distances : Table {
  static constexpr bool kRelative = true;
  OMNIATTN_FN static int64_t row(const TableTerm& term, int64_t i, int64_t k) {
    const int64_t row = k - i + term.a;
    return row < 0 ? 0 : row < term.rows ? row : term.rows - 1;
  }
  OMNIATTN_FN static bool fits(const TableTerm& term, int64_t, int64_t) { return term.rows >= 1; }
};

// Swin: the row is the offset between two places in a window of a rows and b columns.
struct Window : Table {
  static constexpr bool kRelative = false;
  OMNIATTN_FN static int64_t row(const TableTerm& term, int64_t i, int64_t k) {
    return (i / term.b - k / term.b + term.a - 1) * (2 * term.b - 1) + i % term.b - k % term.b +
           term.b - 1;
  }
  OMNIATTN_FN static bool fits(const TableTerm& term, int64_t tq, int64_t tk) {
    return term.a >= 1 && term.b >= 1 && term.a < (1 << 16) && term.b < (1 << 16) &&
           term.rows == (2 * term.a - 1) * (2 * term.b - 1) && tq == term.a * term.b && tk == tq;
  }
};

}  // namespace score_rules
}  // namespace omniattn
