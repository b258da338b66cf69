#include "kernels/loss/divergence.h"

#include "kernels/loss/softmax_row.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Terms of a class: its share of the loss, a_v, and Q_v.
template <class V>
struct Terms {
  V loss, a, q;
};

// e^x - 1 for x <= 0, from x and e^x: a series near 0, where the difference loses digits.
template <class C>
OMNIATTN_INLINE Vec<C> exp_minus_one(Vec<C> x, Vec<C> exp_x) {
  constexpr int kTerms = sizeof(C) == 4 ? 7 : 12;  // an error of 2e-9 or 4e-17 at -1/4
  Vec<C> series = C(1);
#pragma GCC unroll 12
  for (int k = kTerms; k > 1; --k) series = fma(x * C(1.0 / k), series, Vec<C>(C(1)));
  return select(x > Vec<C>(C(-0.25)), x * series, exp_x - C(1));
}

template <Divergence kKind, class C>
OMNIATTN_INLINE Terms<Vec<C>> terms(Vec<C> x, Vec<C> y, Vec<C> beta) {
  using V = Vec<C>;
  const V zero = C(0);
  if constexpr (kKind == Divergence::teacher_to_student) {
    const V p = exp(y);
    return {select(p == zero, zero, p * (y - x)), -p, exp(x)};
  } else if constexpr (kKind == Divergence::student_to_teacher) {
    const V q = exp(x), loss = select(q == zero, zero, q * (x - y));
    return {loss, loss, q};
  } else {
    // Divides by the larger of the two, so that no logarithm takes 0, and small divergences keep
    // their digits.
    const auto student_leads = x >= y;  // not max and min, which would drop NaN
    const V most = select(student_leads, x, y), least = select(student_leads, y, x);
    const V larger = exp(most), rest = C(1) - beta;
    const V gap = select(x == y, zero, least - most);
    const V ratio = exp(gap), smaller = larger * ratio;
    const V q = select(student_leads, larger, smaller), p = select(student_leads, smaller, larger);
    const V less = select(student_leads, beta, rest) * exp_minus_one<C>(gap, ratio);
    const V mixed = less + C(1);
    const V lost = less - (mixed - C(1));  // digits
    const V ln_mixed = fma(lost, reciprocal(mixed), log(mixed));
    const V of_student = select(student_leads, zero, gap) - ln_mixed;
    const V of_teacher = select(student_leads, gap, zero) - ln_mixed;
    const V a = select(q == zero, zero, rest * q * of_student);
    return {a + select(p == zero, zero, beta * p * of_teacher), a, q};
  }
}

// Log-probabilities of a row, computed from logits or given.
template <class C>
struct LogProbs {
  Logits<C, false> logits;
  Vec<C> most, log_sum;

  OMNIATTN_INLINE Vec<C> operator()(Vec<C> logit) const { return (logits(logit) - most) - log_sum; }
};

template <class T>
const T* row_of(const void* rows, int64_t stride, int64_t row) {
  return static_cast<const T*>(rows) + row * stride;
}

bool is_ignored(const LossRows& rows, int64_t row) {
  return rows.target != nullptr && rows.target[row] == rows.ignore_index;
}

template <class T, Divergence kKind>
void forward(const DivergenceParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const Logits<C, false> logits(p.temperature, 0);
  const Vec<C> beta = static_cast<C>(p.beta);
  const auto statistics_of = [&](const T* row) -> RowStatistics<C> {
    if (p.log_probs) return {0, 0};
    return statistics(row, p.cols, logits, [](int64_t, int64_t) {});
  };
  for (int64_t row = begin; row < end; ++row) {
    C& loss = static_cast<C*>(p.rows.loss)[row];
    auto& kept = static_cast<DivergenceRow<C>*>(p.statistics)[row];
    loss = 0;
    kept = {};
    if (is_ignored(p.rows, row)) continue;
    const T* const student = row_of<T>(p.student, p.student_stride, row);
    const T* const teacher = row_of<T>(p.teacher, p.teacher_stride, row);
    const RowStatistics<C> s = statistics_of(student), t = statistics_of(teacher);
    const LogProbs<C> x{logits, s.most, s.log_sum}, y{logits, t.most, t.log_sum};
    C share = 0;
    for (int64_t first = 0; first < p.cols; first += kBlock) {  // longer sums lose digits
      const int64_t count = p.cols - first < kBlock ? p.cols - first : kBlock;
      RowSum<C> losses, shares;
      for_row_by_four<T>(count, [&](int64_t i, auto part, int k) {
        const auto found = terms<kKind, C>(x(part.load(student + first + i)),
                                           y(part.load(teacher + first + i)), beta);
        losses.add(k, part.zero_beyond(found.loss));
        shares.add(k, part.zero_beyond(found.a));
      });
      loss += losses.total();
      share += shares.total();
    }
    kept = {s.most, s.log_sum, t.most, t.log_sum, share};
    if (p.log_probs) kept.share = kKind == Divergence::student_to_teacher ? C(-1) : C(0);
  }
}

template <class T, Divergence kKind>
void backward(const DivergenceBackwardParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const DivergenceParams& f = p.forward;
  const Logits<C, false> logits(f.temperature, 0);
  const Vec<C> beta = static_cast<C>(f.beta);
  for (int64_t row = begin; row < end; ++row) {
    T* const out = static_cast<T*>(p.dstudent) + row * f.cols;
    if (is_ignored(f.rows, row)) {
      for_row<T>(f.cols, [&](int64_t i, auto part) { part.store(out + i, Vec<C>(C(0))); });
      continue;
    }
    const T* const student = row_of<T>(f.student, f.student_stride, row);
    const T* const teacher = row_of<T>(f.teacher, f.teacher_stride, row);
    const auto& kept = static_cast<const DivergenceRow<C>*>(f.statistics)[row];
    const LogProbs<C> x{logits, kept.student_max, kept.student_log_sum};
    const LogProbs<C> y{logits, kept.teacher_max, kept.teacher_log_sum};
    const Vec<C> weight = static_cast<const C*>(p.row_weight)[row] * logits.scale();
    const Vec<C> share = kept.share;
    write_row(out, f.cols, p.stream, [&](int64_t i, auto part) {
      const auto found =
          terms<kKind, C>(x(part.load(student + i)), y(part.load(teacher + i)), beta);
      return weight * fma(-share, found.q, found.a);
    });
  }
  if (p.stream) stream_fence();
}

void check(const DivergenceParams& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.rows.count);
  OMNIATTN_ASSERT_ROWS(p.student, p.student_stride, p.rows.count, p.cols);
  OMNIATTN_ASSERT_ROWS(p.teacher, p.teacher_stride, p.rows.count, p.cols);
}

void forward_any(const DivergenceParams& p, int64_t begin, int64_t end) {
  check(p, begin, end);
  dispatch(p.rows.dtype, [&]<class T>(T) {
    dispatch_divergence(p.beta, [&]<Divergence kKind>() { forward<T, kKind>(p, begin, end); });
  });
}
void backward_any(const DivergenceBackwardParams& p, int64_t begin, int64_t end) {
  check(p.forward, begin, end);
  dispatch(p.forward.rows.dtype, [&]<class T>(T) {
    dispatch_divergence(p.forward.beta,
                        [&]<Divergence kKind>() { backward<T, kKind>(p, begin, end); });
  });
}

}  // namespace

extern const DivergenceKernels divergence_kernels_table;
const DivergenceKernels divergence_kernels_table{.forward = forward_any, .backward = backward_any};

}  // namespace omniattn::OMNIATTN_ISA
