// Sums of weights, which divide the outputs of a chunk. They are outputs q_in z + P b of values 1;
// the update is b (beta or 1) and the state z a separate column. Among the values they would be one
// column more than whole vectors.
#pragma once

#include "kernels/recurrence/recurrence_decay.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// sum += factor_i x_i, over all rows i.
template <class C>
[[gnu::noinline]] void add_rows(const C* factors, Input<C> x, int64_t rows, int64_t width, C* sum) {
  for_row<C>(width, [&](int64_t j, auto part) {
    Vec<C> all = part.load(sum + j);
    for (int64_t i = 0; i < rows; ++i) all = fma(Vec<C>(factors[i]), part.load(x.row(i) + j), all);
    part.store(sum + j, all);
  });
}
// rows_i += factor_i x, for the first width(i) elements.
template <class C, class F>
OMNIATTN_INLINE void add_to_rows(const C* factors, const C* x, Matrix<C> rows, int64_t count,
                                 const F& width) {
  for (int64_t i = 0; i < count; ++i) {
    const Vec<C> factor(factors[i]);
    C* const row = rows.row(i);
    for_row<C>(width(i), [=](int64_t j, auto part) {
      part.store(row + j, fma(factor, part.load(x + j), part.load(row + j)));
    });
  }
}

template <class C>
struct Sums {
  const Recurrence& p;
  C *divisors, *by_sum, *by_min_denominator;  // per token: divisor, and its slopes
  C* of_sum;                                  // gradient of the sum

  Sums(const Recurrence& params, Room<C>& room) : p(params) {
    if (!p.normalize) return;
    const int64_t size = recurrence_chunk(p);
    divisors = room.take(size), by_sum = room.take(size), by_min_denominator = room.take(size);
    of_sum = room.take(size);
  }

  // Computes a chunk's divisors from z at its start.
  [[gnu::noinline]] void find(const Chunk<C>& c, const C* z, int64_t batch, int64_t t,
                              int64_t head) {
    for (int64_t i = 0; i < c.rows; ++i) {
      const C sum = dot(c.q_in.row(i), z, c.K) + dot(c.P.row(i), c.beta, i + 1);
      const C* const min_denominator = p.min_denominator.data == nullptr
                                           ? nullptr
                                           : row_of<C>(p.min_denominator, batch, t + i, head);
      const Divisor<C> found = divisor(sum, min_denominator, static_cast<C>(p.eps));
      divisors[i] = found.value, by_sum[i] = found.by_sum,
      by_min_denominator[i] = found.by_min_denominator;
    }
  }
  void divide(const Chunk<C>& c, Matrix<C> x) const {
    for (int64_t i = 0; i < c.rows; ++i) divide_row(x.row(i), divisors[i], c.V);
  }
  // Advances z, already decayed over the chunk, to the end of the chunk.
  void advance(const Chunk<C>& c, C* z) const { add_rows<C>(c.beta, c.k_out, c.rows, c.K, z); }

  // d holds the gradients of undivided outputs. The gradient of a divisor is minus their product
  // with these outputs (sums over P and met) divided by the divisor. Its share through the sum is
  // added to d, whose rows of q come second. dmin_denominator and dbeta, rows of T, may be null.
  // `dz` is the gradient of z at the end of the chunk.
  [[gnu::noinline]] void gradient(const Chunk<C>& c, const ChunkGradient<C>& d, const C* z,
                                  const C* dz, C* dmin_denominator, C* dbeta, int64_t stride) {
    const int64_t n = c.rows;
    const Matrix<C> of_p = d.scores.at(n), met = d.met.at(n);
    for (int64_t i = 0; i < n; ++i) {
      const C all = dot(c.P.row(i), of_p.row(i), i + 1) + dot(c.q_in.row(i), met.row(i), c.K);
      const C of_divisor = -all / divisors[i];
      of_sum[i] = of_divisor * by_sum[i];
      if (dmin_denominator != nullptr)
        dmin_denominator[i * stride] = of_divisor * by_min_denominator[i];
    }
    add_to_rows(of_sum, c.beta, of_p, n, [](int64_t i) { return i + 1; });
    add_to_rows(of_sum, z, met, n, [&](int64_t) { return c.K; });
    add_to_rows(c.beta, dz, d.made, n, [&](int64_t) { return c.K; });
    for (int64_t j = 0; dbeta != nullptr && j < n; ++j) {
      C sum = dot(c.k_out.row(j), dz, c.K);
      for (int64_t i = j; i < n; ++i) sum += c.P.row(i)[j] * of_sum[i];
      dbeta[j * stride] += sum;
    }
  }
  // Moves dz, already decayed over the chunk, back to the start of the chunk.
  void retreat(const Chunk<C>& c, C* dz) const { add_rows<C>(of_sum, c.q_in, c.rows, c.K, dz); }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
