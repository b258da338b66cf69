// Sums of powers on the CPU, see vandermonde.h. Each row has one table of the powers within a block
// and one of those at the starts of a chunk of blocks; their product is computed in registers.
#include "kernels/structured/vandermonde.h"

#include "runtime/assert.h"
#include "runtime/denormals.h"
#include "runtime/dispatch.h"
#include "runtime/vec.h"
#include "semantics/arith.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int64_t kBlock = 64;       // B
constexpr int64_t kBlocks = 64;      // in a chunk
constexpr int kRows = 4, kVecs = 2;  // blocks and vectors of a product in registers

// Sizes of the tables of one term: its powers, its block starts (also times l), and its sums.
constexpr int64_t kPowers = 2 * kBlock, kStarts = 4 * kBlocks, kSums = 4 * kBlock;

// Calls f(k, re, im) with e^((first + k step) x) for k < count.
template <class C, class F>
OMNIATTN_INLINE void for_powers(double re, double im, int64_t first, int64_t step, int64_t count,
                                const F& f) {
  // Products of doubles are exact enough for floats; for doubles there must be few in a row.
  constexpr int64_t kExact = sizeof(C) == 4 ? 64 : 8;
  const auto exact = [&](double l, double& pr, double& pi) {
    const double size = __builtin_exp(l * re);
    pr = size * __builtin_cos(l * im);
    pi = size * __builtin_sin(l * im);
  };
  double sr, si, pr = 1, pi = 0;
  exact(static_cast<double>(step), sr, si);
  for (int64_t k = 0; k < count; ++k) {
    if (k % kExact == 0) exact(static_cast<double>(first + k * step), pr, pi);
    f(k, pr, pi);
    const double next = pr * sr - pi * si;
    pi = pr * si + pi * sr;
    pr = next;
  }
}

// A row with the tables of its terms.
template <class C>
struct Row {
  const Vandermonde& p;
  const C *c, *x;
  C *powers, *starts, *sums;

  Row(const Vandermonde& v, C* memory, int64_t row)
      : p(v),
        c(static_cast<const C*>(v.c) + row * 2 * v.terms),
        x(static_cast<const C*>(v.x) + row * 2 * v.terms),
        powers(memory),
        starts(powers + kPowers * v.terms),
        sums(starts + kStarts * v.terms) {
    for (int64_t n = 0; n < p.terms; ++n) {
      C* const to = powers + n * kPowers;
      // Powers past the end may be infinite, and 0 times infinity is not 0: they stay 0.
      for (int64_t j = 0; j < kPowers; ++j) to[j] = 0;
      for_powers<C>(x[2 * n], x[2 * n + 1], 0, 1, smaller(kBlock, p.length),
                    [&](int64_t j, double re, double im) {
                      to[j] = static_cast<C>(re);
                      to[kBlock + j] = static_cast<C>(im);
                    });
    }
  }
  int64_t blocks_from(int64_t l) const { return smaller(kBlocks, ceil_div(p.length - l, kBlock)); }
};

// Computes y of kRows blocks from `block` on, kVecs vectors of each.
template <class C>
OMNIATTN_INLINE void forward_tile(const Row<C>& row, C* y, int64_t l, int64_t block, int64_t j) {
  using V = Vec<C>;
  V sum[kRows][kVecs];
#pragma GCC unroll 4
  for (auto& of_block : sum) {
#pragma GCC unroll 2
    for (V& s : of_block) s = V(C(0));
  }
  for (int64_t n = 0; n < row.p.terms; ++n) {
    const C* const power = row.powers + n * kPowers + j;
    const C* const start = row.starts + n * kStarts + block;
    V re[kVecs], im[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      re[v] = load(power + v * V::kWidth);
      im[v] = load(power + kBlock + v * V::kWidth);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const V a(start[r]), b(start[kBlocks + r]);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sum[r][v] = fma(b, im[v], fma(a, re[v], sum[r][v]));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      const int64_t at = l + (block + r) * kBlock + j + v * V::kWidth;
      if (at < row.p.length) store_n(y + at, sum[r][v], row.p.length - at);
    }
  }
}

template <class C>
void forward_row(const VandermondeParams& params, C* memory, int64_t h) {
  const Row<C> row(params.sums, memory, h);
  C* const y = static_cast<C*>(params.y) + h * row.p.length;
  for (int64_t l = 0; l < row.p.length; l += kBlocks * kBlock) {
    const int64_t blocks = row.blocks_from(l);
    for (int64_t n = 0; n < row.p.terms; ++n) {
      const double cr = 2 * static_cast<double>(row.c[2 * n]),
                   ci = 2 * static_cast<double>(row.c[2 * n + 1]);
      C* const to = row.starts + n * kStarts;
      for_powers<C>(row.x[2 * n], row.x[2 * n + 1], l, kBlock, round_up(blocks, kRows),
                    [&](int64_t b, double re, double im) {
                      to[b] = static_cast<C>(cr * re - ci * im);
                      to[kBlocks + b] = static_cast<C>(-(cr * im + ci * re));
                    });
    }
    for (int64_t b = 0; b < blocks; b += kRows) {
      for (int64_t j = 0; j < kBlock; j += kVecs * Vec<C>::kWidth) {
        forward_tile(row, y, l, b, j);
      }
    }
  }
}

// Adds g e^(b B x) and b B g e^(b B x) to the sums over blocks, for kVecs vectors.
template <class C>
OMNIATTN_INLINE void add_blocks(const Row<C>& row, const C* g, int64_t l, int64_t n, int64_t j) {
  using V = Vec<C>;
  C* const sums = row.sums + n * kSums + j;
  const C* const start = row.starts + n * kStarts;
  V sum[4][kVecs];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) sum[i][v] = load(sums + i * kBlock + v * V::kWidth);
  }
  for (int64_t b = 0; b < row.blocks_from(l); ++b) {
    V gradient[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      const int64_t at = l + b * kBlock + j + v * V::kWidth;
      gradient[v] = at < row.p.length ? load_n(g + at, row.p.length - at) : V(C(0));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const V factor(start[i * kBlocks + b]);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sum[i][v] = fma(factor, gradient[v], sum[i][v]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) store(sums + i * kBlock + v * V::kWidth, sum[i][v]);
  }
}

// Computes the gradients of a term from its sums over blocks.
template <class C>
OMNIATTN_INLINE void finish_term(const Row<C>& row, int64_t n, C* dc, C* dx) {
  using V = Vec<C>;
  const C *const sums = row.sums + n * kSums, *const power = row.powers + n * kPowers;
  V re(C(0)), im(C(0)), l_re(C(0)), l_im(C(0));
  for (int64_t j = 0; j < kBlock; j += V::kWidth) {
    const V index = lane_index<C>() + V(static_cast<C>(j));
    const V pr = load(power + j), pi = load(power + kBlock + j);
    const V ur = load(sums + j), ui = load(sums + kBlock + j);
    const V vr = fma(index, ur, load(sums + 2 * kBlock + j));
    const V vi = fma(index, ui, load(sums + 3 * kBlock + j));
    re = fma(ur, pr, re) - ui * pi;
    im = fma(ur, pi, fma(ui, pr, im));
    l_re = fma(vr, pr, l_re) - vi * pi;
    l_im = fma(vr, pi, fma(vi, pr, l_im));
  }
  const C cr = row.c[2 * n], ci = row.c[2 * n + 1], lr = reduce_add(l_re), li = reduce_add(l_im);
  dc[2 * n] = 2 * reduce_add(re);
  dc[2 * n + 1] = -2 * reduce_add(im);
  dx[2 * n] = 2 * (cr * lr - ci * li);
  dx[2 * n + 1] = -2 * (cr * li + ci * lr);
}

template <class C>
void backward_row(const VandermondeBackwardParams& params, C* memory, int64_t h) {
  const Row<C> row(params.sums, memory, h);
  const C* const g = static_cast<const C*>(params.grad_y) + h * row.p.length;
  const int64_t terms = row.p.terms;
  for (int64_t i = 0; i < terms * kSums; ++i) row.sums[i] = 0;
  for (int64_t l = 0; l < row.p.length; l += kBlocks * kBlock) {
    for (int64_t n = 0; n < terms; ++n) {
      C* const to = row.starts + n * kStarts;
      for_powers<C>(row.x[2 * n], row.x[2 * n + 1], l, kBlock, row.blocks_from(l),
                    [&](int64_t b, double re, double im) {
                      const auto first = static_cast<double>(l + b * kBlock);
                      to[b] = static_cast<C>(re);
                      to[kBlocks + b] = static_cast<C>(im);
                      to[2 * kBlocks + b] = static_cast<C>(first * re);
                      to[3 * kBlocks + b] = static_cast<C>(first * im);
                    });
      for (int64_t j = 0; j < kBlock; j += kVecs * Vec<C>::kWidth) add_blocks(row, g, l, n, j);
    }
  }
  C *const dc = static_cast<C*>(params.dc) + h * 2 * terms, *const dx = static_cast<C*>(params.dx) +
                                                                        h * 2 * terms;
  for (int64_t n = 0; n < terms; ++n) finish_term(row, n, dc, dx);
}

int64_t bytes(const Vandermonde& p) {
  return (kPowers + kStarts + kSums) * p.terms * size_of(p.dtype);
}

void forward(const VandermondeParams& p, void* memory, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.sums.rows);
  OMNIATTN_ASSERT_HAS(memory, bytes(p.sums));
  const FlushDenormals flush;
  dispatch_compute(p.sums.dtype, [&]<class C>(C) {
    for (int64_t h = begin; h < end; ++h) forward_row(p, static_cast<C*>(memory), h);
  });
}
void backward(const VandermondeBackwardParams& p, void* memory, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.sums.rows);
  OMNIATTN_ASSERT_HAS(memory, bytes(p.sums));
  const FlushDenormals flush;
  dispatch_compute(p.sums.dtype, [&]<class C>(C) {
    for (int64_t h = begin; h < end; ++h) backward_row(p, static_cast<C*>(memory), h);
  });
}

}  // namespace

extern const VandermondeKernels vandermonde_kernels_table;
const VandermondeKernels vandermonde_kernels_table{bytes, forward, backward};

}  // namespace omniattn::OMNIATTN_ISA
