// Terms and gradients of parameters, see attention_terms.h. Sums are in fp64 and in a fixed order.
#include "kernels/attention/attention_terms.h"

#include <cstddef>

#include "runtime/dispatch.h"
#include "runtime/vec_int8.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// An element of a plane and a pair that reads it: key k and query i = q + Tk - Tq of the whole
// problem. A relative term has one element per distance.
struct Pair {
  int64_t element, i, k;
};

// Calls f(Pair) for items [begin, end) of expand_items.
template <class F>
OMNIATTN_INLINE void for_pairs(const AttentionProblem& p, int64_t begin, int64_t end, const F& f) {
  if (is_relative(p.table.kind)) {
    const int64_t distances = p.tq + p.tk - 1, last = end * kExpandedDistances;
    for (int64_t e = begin * kExpandedDistances; e < (last < distances ? last : distances); ++e) {
      f(Pair{e, -p.relative_shift, e - (p.tk - 1)});
    }
  } else {
    for (int64_t q = begin; q < end; ++q) {
      for (int64_t k = 0; k < p.tk; ++k) {
        f(Pair{p.relative.origin + q * p.relative.stride_q + k, q, k});
      }
    }
  }
}

void expand_table(const AttentionProblem& p, void* to, int64_t begin, int64_t end) {
  dispatch_compute(p.dtype, [&]<class A>(A) {
    const int64_t plane = plane_elements(p);
    const auto* const table = static_cast<const A*>(p.table.data);
    auto* const out = static_cast<A*>(to);
    for_pairs(p, begin, end, [&](const Pair& x) {
      const int64_t row = table_row(p.table, x.i, x.k) * p.hq;
      const double factor = table_factor(p.table, x.i, x.k);
      for (int64_t n = 0; n < table_heads(p); ++n) {
        const A value = table[n / p.hq * p.table.stride_b + row + n % p.hq];
        out[n * plane + x.element] = static_cast<A>(value * factor);
      }
    });
  });
}

// Sums the planes (splits, table_parts, Hq) of head `item` over all problems, then their
// elements by rows of the table.
template <class A>
void gather_head(const AttentionTableGradient& g, double* plane, int64_t item) {
  const AttentionProblem& p = g.whole->problem;
  const int64_t batch = item / p.hq, h = item % p.hq, elements = plane_elements(p);
  for (int64_t e = 0; e < elements; ++e) plane[e] = 0;
  for (const AttentionBackwardParams* b = g.problems; b != g.problems + g.count; ++b) {
    for (int64_t n = 0; n < b->splits * table_parts(*b); ++n) {
      const int64_t entry = b->problem.first_batch + n % table_parts(*b);
      if (table_batches(p) > 1 && entry != batch) continue;
      const A* const part =
          static_cast<const A*>(b->part_relative) + (n * p.hq + h) * b->part_relative_plane;
      for (int64_t e = 0; e < elements; ++e) plane[e] += part[e];
    }
  }
  const auto for_all_pairs = [&](const auto& f) { for_pairs(p, 0, expand_items(p), f); };
  // A separate pass: some instruction sets would round a product and a sum only once.
  for_all_pairs([&](const Pair& x) { plane[x.element] *= table_factor(p.table, x.i, x.k); });
  double* const sums = plane + elements;
  for (int64_t row = 0; row < p.table.rows; ++row) sums[row] = 0;
  for_all_pairs([&](const Pair& x) { sums[table_row(p.table, x.i, x.k)] += plane[x.element]; });
  A* const grad = static_cast<A*>(g.whole->grad_table) + batch * p.table.stride_b + h;
  for (int64_t row = 0; row < p.table.rows; ++row) grad[row * p.hq] = static_cast<A>(sums[row]);
}

void gather_table(const AttentionTableGradient& g, void* scratch, int64_t begin, int64_t end) {
  dispatch_compute(g.whole->problem.dtype, [&]<class A>(A) {
    for (int64_t i = begin; i < end; ++i) gather_head<A>(g, static_cast<double*>(scratch), i);
  });
}

// Sums row `row` of head h.
template <class A>
void gather_distance(const AttentionDistanceGradient& g, int64_t row, int64_t h) {
  const AttentionProblem& whole = g.whole->problem;
  const int64_t d = whole.d;
  A* const grad = static_cast<A*>(g.whole->*g.grad) + (row * whole.hq + h) * d;
  constexpr int64_t kSums = 64;
  for (int64_t first = 0; first < d; first += kSums) {
    const int64_t count = d - first < kSums ? d - first : kSums;
    double sums[kSums] = {};
    for (const AttentionBackwardParams* b = g.problems; b != g.problems + g.count; ++b) {
      const Range range = distance_range(b->problem, b->problem.*g.rows);
      if (row < range.begin || row >= range.end) continue;
      const int64_t size = distance_part_elements(b->problem, b->problem.*g.rows);
      const A* part = static_cast<const A*>(b->*g.parts) + h * (size / whole.hq) +
                      (row - range.begin) * d + first;
      for (int64_t n = 0; n < b->splits * distance_parts(*b); ++n, part += size) {
        for (int64_t c = 0; c < count; ++c) sums[c] += part[c];
      }
    }
    for (int64_t c = 0; c < count; ++c) {
      grad[first + c] = static_cast<A>(whole.score.chain * sums[c]);
    }
  }
}

void gather_distances(const AttentionDistanceGradient& g, int64_t begin, int64_t end) {
  const AttentionProblem& p = g.whole->problem;
  dispatch_compute(p.dtype, [&]<class A>(A) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t h = 0; h < p.hq; ++h) gather_distance<A>(g, row, h);
    }
  });
}

void gather_heads(const AttentionProblem& p, const void* parts, void* grad, int64_t begin,
                  int64_t end) {
  const int64_t blocks = query_block_count(p);
  dispatch_compute(p.dtype, [&]<class A>(A) {
    for (int64_t h = begin; h < end; ++h) {
      double sum = 0;
      for (int64_t n = 0; n < p.batch * blocks; ++n) {
        sum += static_cast<const A*>(parts)[(n / blocks * p.hq + h) * blocks + n % blocks];
      }
      static_cast<A*>(grad)[h] += static_cast<A>(sum);
    }
  });
}

// to[c] = factor * from[c], narrowed to T.
template <class T>
void widen_row(const Int8<compute_t<T>>* from, compute_t<T> factor, int64_t width, T* to) {
  using V = Vec<compute_t<T>>;
  for (int64_t c = 0; c < width; c += V::kWidth) {
    store_n(to + c, load_n(from + c, width - c) * V(factor), width - c);
  }
}

void gather_rows(const AttentionProblem& p, const HeadView& from, const HeadView& factors,
                 int64_t width, void* to, int64_t begin, int64_t end) {
  if (width == 0) return;  // `to` may be null
  dispatch(p.dtype, [&]<class T>(T) {
    using A = compute_t<T>;
    T* row = static_cast<T*>(to) + begin * p.hkv * width;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t at = key_offset(p, from, 0, t);
      for (int64_t h = 0; h < p.hkv; ++h, row += width) {
        if (p.is_int8) {
          const A* const factor =
              static_cast<const A*>(factors.data) + key_offset(p, factors, 0, t);
          widen_row(static_cast<const Int8<A>*>(from.data) + at + h * from.stride_h,
                    factor[h * factors.stride_h], width, row);
        } else {
          __builtin_memcpy(row, static_cast<const T*>(from.data) + at + h * from.stride_h,
                           static_cast<size_t>(width) * sizeof(T));
        }
      }
    }
  });
}

// Calls f(n) with the index of each row in lse.
template <class F>
void for_rows_of_lse(const AttentionProblem& p, const F& f) {
  for (int64_t head = 0; head < p.batch * p.hq; ++head) {
    for (int64_t q = 0; q < p.tq; ++q) f(head * p.lse_stride + q);
  }
}

bool has_large_lse(const AttentionForwardParams& x) {
  constexpr double kLarge = 32;  // times eps: acceptable relative error of a gradient
  bool found = false;
  dispatch_compute(x.problem.dtype, [&]<class A>(A) {
    const auto* const lse = static_cast<const A*>(x.lse);
    for_rows_of_lse(x.problem, [&](int64_t n) {
      found |= lse[n] != negative_infinity<A>() && (lse[n] > A(kLarge) || lse[n] < A(-kLarge));
    });
  });
  return found;
}

void fit_tails(const AttentionForwardParams& rows, const AttentionForwardParams& blocks) {
  const Score& score = rows.problem.score;
  dispatch_compute(rows.problem.dtype, [&]<class A>(A) {
    const auto *const lse = static_cast<const A*>(rows.lse), *const lse_of_blocks =
                                                                 static_cast<const A*>(blocks.lse);
    const auto* const tail_of_blocks = static_cast<const A*>(blocks.lse_tail);
    for_rows_of_lse(rows.problem, [&](int64_t n) {
      if (lse[n] == negative_infinity<A>()) return;
      const A more = lse_in_logits(score, lse_of_blocks[n]) - lse_in_logits(score, lse[n]);
      static_cast<A*>(rows.lse_tail)[n] = more + tail_of_blocks[n];
    });
  });
}

}  // namespace

extern const AttentionTermsKernels attention_terms_kernels_table = {
    expand_table, gather_table,  gather_distances, gather_heads,
    gather_rows,  has_large_lse, fit_tails};

}  // namespace omniattn::OMNIATTN_ISA
