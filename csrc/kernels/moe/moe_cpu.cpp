#include "kernels/moe/moe.h"

#include "kernels/moe/moe_hidden.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/dot_rows.h"
#include "runtime/gemm_tile.h"
#include "runtime/row.h"
#include "semantics/arith.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Blocks of 512 x 128 of B (256 KiB of fp32) share L2 with 96 rows of A; interleaved
// gates take twice as many columns.
constexpr int64_t kBlockK = 512;
constexpr int64_t kBlockN = 2 * kMoeFeatures;
constexpr int64_t kBlockM = 96;
// Up to this many rows, columns of B that are contiguous along k are multiplied without packing.
constexpr int64_t kMaxDotRows = kOnTiles ? 4 : 32;
// Up to this many rows (one tile), rows of B contiguous along n are read once, in place.
constexpr int64_t kMaxRowsInPlace = tile_rows(kTileVecs);

template <class T>
struct Workspace {
  T* panels;        // kBlockK x kBlockN
  compute_t<T>* c;  // kMoeBlockRows x kBlockN

  explicit Workspace(void* memory)
      : panels(static_cast<T*>(memory)),
        c(reinterpret_cast<compute_t<T>*>(panels + packed_elements<T>(kBlockK, kBlockN))) {}
  static int64_t bytes() {
    return packed_elements<T>(kBlockK, kBlockN) * static_cast<int64_t>(sizeof(T)) +
           kMoeBlockRows * kBlockN * static_cast<int64_t>(sizeof(compute_t<T>));
  }
};

// Product of a block with some columns of its expert.

// c (rows, cols) (+)= a (rows, k) B with B (k, cols) at b in the layout of `matrix`; a
// has type T or the computed type.
template <class T, class A, class S>
void multiply(const A* a, int64_t lda, int64_t rows, const S* b, const MoeMatrix& matrix, int64_t k,
              int64_t cols, T* panels, compute_t<T>* c, int64_t ldc, bool accumulate) {
  const bool along_k = matrix.k_stride == 1;
  if (along_k && rows <= kMaxDotRows && !matrix.as_many_rows) {
    return dot_rows(a, lda, rows, b, matrix.n_stride, cols, k,
                    [&](int64_t r, int64_t n, compute_t<T> sum) {
                      compute_t<T>& to = c[r * ldc + n];
                      to = accumulate ? to + sum : sum;
                    });
  }
  if constexpr (TypeTraits<T>::kDType == TypeTraits<S>::kDType && Operand<T>::kStep == 1) {
    if (!along_k && rows <= kMaxRowsInPlace && !matrix.as_many_rows) {
      return gemm_tile<T>(a, lda, row_panels<T>(b, matrix.k_stride), c, ldc, rows, cols, k,
                          accumulate);
    }
  }
  for (int64_t first = 0; first < k; first += kBlockK) {
    const int64_t depth = smaller(kBlockK, k - first);
    const S* const block = b + first * matrix.k_stride;
    if (along_k) {
      pack_bt(block, matrix.n_stride, depth, cols, panels);
    } else {
      pack_b(block, matrix.k_stride, depth, cols, panels);
    }
    for (int64_t r = 0; r < rows; r += kBlockM) {
      gemm_tile<T>(a + r * lda + first, lda, packed_panels<T>(panels, depth), c + r * ldc, ldc,
                   smaller(kBlockM, rows - r), cols, depth, accumulate || first > 0);
    }
  }
}

// multiply, starting from the bias of each column, or from 0 without a bias.
template <class T, class A, class S>
void multiply_add(const A* a, int64_t lda, int64_t rows, const S* b, const MoeMatrix& matrix,
                  const S* bias, int64_t k, int64_t cols, T* panels, compute_t<T>* c, int64_t ldc) {
  using C = compute_t<T>;
  const bool started = bias != nullptr || k == 0;
  for (int64_t r = 0; started && r < rows; ++r) {
    for_row<C>(cols, [&](int64_t i, auto part) {
      part.store(c + r * ldc + i, bias != nullptr ? part.load(bias + i) : zero<C>());
    });
  }
  multiply<T>(a, lda, rows, b, matrix, k, cols, panels, c, ldc, started);
}

// Copies columns of a finished product to the memory of an item.
template <class C>
void copy_rows(const C* made, int64_t stride, int64_t rows, int64_t cols, C* c) {
  for (int64_t r = 0; r < rows; ++r) {
    for_row<C>(cols, [&](int64_t i, auto part) {
      part.store(c + r * kBlockN + i, part.load(made + r * stride + i));
    });
  }
}

// Calls f(block, first column of the group, its columns) for each item of the range.
template <class F>
OMNIATTN_INLINE void for_groups(const MoeBlock* blocks, [[maybe_unused]] int64_t block_count,
                                int64_t columns, int64_t width, int64_t begin, int64_t end,
                                const F& f) {
  const int64_t groups = columns > width ? ceil_div(columns, width) : 1;
  OMNIATTN_ASSERT_ITEMS(begin, end, block_count * groups);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item % groups * width;
    f(blocks[item / groups], first, smaller(width, columns - first));
  }
}

template <class T, class S>
void project(const MoeProjectParams& p, void* memory, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const Workspace<T> work(memory);
  for_groups(p.blocks, p.block_count, p.n, kMoeFeatures, begin, end,
             [&](const MoeBlock& block, int64_t first, int64_t cols) {
               const auto* const b = static_cast<const S*>(p.b.data) + block.expert * p.b.expert +
                                     first * p.b.n_stride;
               const auto* const bias = static_cast<const S*>(p.bias);
               const auto* const a = static_cast<const computed_t<T>*>(p.a) + block.row * p.k;
               multiply_add<T>(a, p.k, block.rows, b, p.b,
                               bias != nullptr ? bias + block.expert * p.n + first : nullptr, p.k,
                               cols, work.panels, static_cast<C*>(p.out) + block.row * p.n + first,
                               p.n);
             });
}

// Products with an activation.

template <class T, class S>
void up(const MoeUpParams& p, void* memory, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const Workspace<T> work(memory);
  const int64_t features = p.hidden_of.features, columns = p.hidden_of.columns();
  for_groups(
      p.blocks, p.block_count, features, kMoeFeatures, begin, end,
      [&](const MoeBlock& block, int64_t first, int64_t n) {
        const auto* const x = static_cast<const T*>(p.x) + block.row * p.k;
        const auto* const matrix = static_cast<const S*>(p.up.data) + block.expert * p.up.expert;
        const auto* const bias = static_cast<const S*>(p.bias);
        for_runs(p.hidden_of, first, n, [&](int64_t column, int64_t place, int64_t cols) {
          if (p.made != nullptr) {
            copy_rows(static_cast<const C*>(p.made) + block.row * columns + column, columns,
                      block.rows, cols, work.c + place);
            return;
          }
          multiply_add<T>(x, p.k, block.rows, matrix + column * p.up.n_stride, p.up,
                          bias != nullptr ? bias + block.expert * columns + column : nullptr, p.k,
                          cols, work.panels, work.c + place, kBlockN);
        });
        HiddenRow<C> row;
        for (int64_t r = 0; r < block.rows; ++r) {
          const C* const c = work.c + r * kBlockN;
          if (p.pre != nullptr) {
            S* const pre = static_cast<S*>(p.pre) + (block.row + r) * columns;
            for_runs(p.hidden_of, first, n, [&](int64_t column, int64_t place, int64_t cols) {
              for_row<C>(cols, [&](int64_t i, auto part) {
                part.store(pre + column + i, part.load(c + place + i));
              });
            });
          }
          if (p.hidden != nullptr) {
            split_row(p.hidden_of.gate, c, n, row);
            hidden_row(p.hidden_of, row, n,
                       static_cast<computed_t<T>*>(p.hidden) + (block.row + r) * features + first);
          }
        }
      });
}

template <class T, class S>
void up_backward(const MoeUpBackwardParams& p, void* memory, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const Workspace<T> work(memory);
  const int64_t features = p.hidden_of.features, columns = p.hidden_of.columns();
  const int64_t groups = features > kMoeFeatures ? ceil_div(features, kMoeFeatures) : 1;
  for_groups(p.blocks, p.block_count, features, kMoeFeatures, begin, end,
             [&](const MoeBlock& block, int64_t first, int64_t n) {
               const auto* const grad_y = static_cast<const T*>(p.grad_y) + block.row * p.k;
               const auto* const down = static_cast<const S*>(p.down.data) +
                                        block.expert * p.down.expert + first * p.down.n_stride;
               if (p.made != nullptr) {
                 copy_rows(static_cast<const C*>(p.made) + block.row * features + first, features,
                           block.rows, n, work.c);
               } else {
                 multiply_add<T>(grad_y, p.k, block.rows, down, p.down,
                                 static_cast<const S*>(nullptr), p.k, n, work.panels, work.c,
                                 kBlockN);
               }
               HiddenRow<C> row;
               C joined[kBlockN];
               for (int64_t r = 0; r < block.rows; ++r) {
                 const int64_t at = block.row + r;
                 const S* const pre = static_cast<const S*>(p.pre) + at * columns;
                 for_runs(p.hidden_of, first, n, [&](int64_t column, int64_t place, int64_t cols) {
                   for_row<C>(cols, [&](int64_t i, auto part) {
                     part.store(joined + place + i, part.load(pre + column + i));
                   });
                 });
                 split_row(p.hidden_of.gate, joined, n, row);
                 C dot_h = hidden_row_backward(
                     p.hidden_of, row, work.c + r * kBlockN, static_cast<const C*>(p.weight)[at], n,
                     static_cast<computed_t<T>*>(p.weighted_hidden) + at * features + first);
                 if (first == 0 && p.down_bias != nullptr) {
                   const S* const bias = static_cast<const S*>(p.down_bias) + block.expert * p.k;
                   dot_h += row_sum<C>(p.k, [&](int64_t i, auto part) {
                     return part.load(grad_y + r * p.k + i) * part.load(bias + i);
                   });
                 }
                 static_cast<C*>(p.grad_weight)[at * groups + first / kMoeFeatures] = dot_h;
                 join_row(p.hidden_of.gate, row, n, joined);
                 auto* const grad_pre = static_cast<computed_t<T>*>(p.grad_pre) + at * columns;
                 for_runs(p.hidden_of, first, n, [&](int64_t column, int64_t place, int64_t cols) {
                   for_row<C>(cols, [&](int64_t i, auto part) {
                     part.store(grad_pre + column + i, part.load(joined + place + i));
                   });
                 });
               }
             });
}

// Rows.

template <class T, class S>
void gather(const MoeGatherParams& p, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const S* const x = static_cast<const S*>(p.x) + p.tokens[r] * p.x_stride;
    T* const out = static_cast<T*>(p.out) + r * p.cols;
    for_row<S>(p.cols, [&](int64_t i, auto part) { part.store(out + i, part.load(x + i)); });
  }
}

template <class S>
void combine(const MoeCombineParams& p, int64_t begin, int64_t end) {
  using C = compute_t<S>;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t* const rows = p.row_of_slot + token * p.slots;
    S* const y = static_cast<S*>(p.y) + token * p.cols;
    for_row<C>(p.cols, [&](int64_t i, auto part) {
      Vec<C> sum = zero<C>();
      for (int64_t s = 0; s < p.slots; ++s) {
        if (rows[s] < 0) continue;
        const C weight =
            p.weight != nullptr ? static_cast<const C*>(p.weight)[token * p.slots + s] : C(1);
        sum = fma(Vec<C>(weight), part.load(static_cast<const C*>(p.rows) + rows[s] * p.cols + i),
                  sum);
      }
      part.store(y + i, sum);
    });
  }
}

// Adds sums of 64 rows to the total, so that the rounding error grows with rows / 64.
template <class T, class S>
void bias_grad(const MoeBiasGradParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const C* const weight = static_cast<const C*>(p.weight);
  for (int64_t expert = begin; expert < end; ++expert) {
    const int64_t last = p.offsets[expert + 1];
    for_row<C>(p.cols, [&](int64_t i, auto part) {
      Vec<C> total = zero<C>();
      for (int64_t first = p.offsets[expert]; first < last; first += 64) {
        Vec<C> sum = zero<C>();
        for (int64_t r = first; r < smaller(first + 64, last); ++r) {
          const Vec<C> x = part.load(static_cast<const T*>(p.x) + r * p.cols + i);
          sum = fma(Vec<C>(weight != nullptr ? weight[r] : C(1)), x, sum);
        }
        total += sum;
      }
      part.store(static_cast<S*>(p.out) + expert * p.cols + i, total);
    });
  }
}

template <class C>
void slot_sum(const MoeSlotSumParams& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    C sum = 0;
    if (const int64_t row = p.row_of_slot[i]; row >= 0) {
      const C* const parts = static_cast<const C*>(p.rows) + row * p.parts;
      for (int64_t part = 0; part < p.parts; ++part) sum += parts[part];
    }
    static_cast<C*>(p.out)[i] = sum;
  }
}

// Entries.

MoeOperands operands(DType dtype) {
  MoeOperands found{};
  dispatch(dtype, [&]<class S>(S) {
    using T = operand_t<S>;
    found = {TypeTraits<T>::kDType, TypeTraits<computed_t<T>>::kDType};
  });
  return found;
}

int64_t workspace_bytes(DType dtype) {
  int64_t bytes = 0;
  dispatch(dtype, [&]<class S>(S) { bytes = Workspace<operand_t<S>>::bytes(); });
  return bytes;
}

void gather_any(const MoeGatherParams& p, int64_t begin, int64_t end) {
  dispatch(p.dtype, [&]<class S>(S) { gather<operand_t<S>, S>(p, begin, end); });
}
void up_any(const MoeUpParams& p, void* workspace, int64_t begin, int64_t end) {
  const TileScope tiles;
  dispatch(p.dtype, [&]<class S>(S) { up<operand_t<S>, S>(p, workspace, begin, end); });
}
void up_backward_any(const MoeUpBackwardParams& p, void* workspace, int64_t begin, int64_t end) {
  const TileScope tiles;
  dispatch(p.dtype, [&]<class S>(S) { up_backward<operand_t<S>, S>(p, workspace, begin, end); });
}
void project_any(const MoeProjectParams& p, void* workspace, int64_t begin, int64_t end) {
  const TileScope tiles;
  dispatch(p.dtype, [&]<class S>(S) { project<operand_t<S>, S>(p, workspace, begin, end); });
}
void combine_any(const MoeCombineParams& p, int64_t begin, int64_t end) {
  dispatch(p.dtype, [&]<class S>(S) { combine<S>(p, begin, end); });
}
void bias_grad_any(const MoeBiasGradParams& p, int64_t begin, int64_t end) {
  dispatch(p.dtype, [&]<class S>(S) {
    using T = operand_t<S>;
    p.computed ? bias_grad<computed_t<T>, S>(p, begin, end) : bias_grad<T, S>(p, begin, end);
  });
}

void slot_sum_any(const MoeSlotSumParams& p, int64_t begin, int64_t end) {
  dispatch_compute(p.dtype, [&]<class C>(C) { slot_sum<C>(p, begin, end); });
}

}  // namespace

extern const MoeKernels moe_kernels_table;
const MoeKernels moe_kernels_table{.operands = operands,
                                   .workspace_bytes = workspace_bytes,
                                   .gather = gather_any,
                                   .up = up_any,
                                   .up_backward = up_backward_any,
                                   .project = project_any,
                                   .combine = combine_any,
                                   .bias_grad = bias_grad_any,
                                   .slot_sum = slot_sum_any};

}  // namespace omniattn::OMNIATTN_ISA
