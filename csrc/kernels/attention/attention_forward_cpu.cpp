// Tiled forward (see attention.h). A work item is one query block of one head: it walks the visible
// key blocks, keeps S (96 x 128), O and the softmax state in L2 and writes O and lse once.
#include "kernels/attention/attention_tile.h"
#include "runtime/dispatch.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// K^T and V of 64 keys of one kv head.
template <class T>
void pack_keys(const AttentionForwardParams& params, int64_t item) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t panels = ceil_div(p.tk, kKeyPanel);
  const int64_t head = item / panels, b = head / p.hkv, h = head % p.hkv;
  const Range keys = block(item % panels, kKeyPanel, p.tk);
  const int64_t count = keys.end - keys.begin;
  A* const packed_k = static_cast<A*>(params.workspace) + head * packed_head_elements(p);
  A* const packed_v = packed_k + packed_keys(p) * p.d + keys.begin * padded_row(p.dv);
  pack_keys_as_columns(row_of<T>(p.k, b, keys.begin, h), p.k.stride_t, p.d, count, kKeyPanel,
                       packed_k + keys.begin * p.d);
  pack_rows<T>(row_of<T>(p.v, b, keys.begin, h), p.v.stride_t, count, p.dv, A(1), packed_v);
}

template <class A>
struct SoftmaxRow {
  A* s;           // logits in, probabilities out
  A* o;           // unnormalised output
  int64_t width;  // of o, padded
  A* m;           // running maximum, log2 units
  A* l;           // running sum
};

// Raises the running maximum to `top`, rescaling what was summed under the old one.
template <class A>
OMNIATTN_INLINE void raise_maximum(const SoftmaxRow<A>& row, A top) {
  using V = Vec<A>;
  if (!(top > *row.m)) return;
  const V alpha = exp2(V(*row.m - top));
  *row.l *= alpha.v[0];
  for (int64_t c = 0; c < row.width; c += V::kWidth) store(row.o + c, load(row.o + c) * alpha);
  *row.m = top;
}

// Online softmax of one row over columns [begin, end).
template <class A>
OMNIATTN_INLINE void softmax_row(const SoftmaxRow<A>& row, Range columns) {
  using V = Vec<A>;
  V top = load(row.s + columns.begin);
  for (int64_t n = columns.begin + V::kWidth; n < columns.end; n += V::kWidth) {
    top = max(top, load(row.s + n));
  }
  raise_maximum(row, reduce_max(top));
  const V shift(softmax_shift(*row.m));
  V sum = zero<A>();
  for (int64_t n = columns.begin; n < columns.end; n += V::kWidth) {
    const V e = exp2(load(row.s + n) - shift);
    store(row.s + n, e);
    sum += e;
  }
  *row.l += reduce_add(sum);
}

// Logits, softmax and dropout of the rows of a tile.
template <class A>
void softmax_tile(const AttentionProblem& p, int64_t b, int64_t h, const TilePlan& plan, A* s, A* o,
                  A* m, A* l) {
  using V = Vec<A>;
  const int64_t width = padded_row(p.dv);
  for (int64_t g = 0; g < plan.groups(); ++g) {
    const Range columns = plan.columns[g], rows = plan.group_rows(g);
    if (is_empty(columns)) continue;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const SoftmaxRow<A> row{s + r * kKeyBlock, o + r * width, width, m + r, l + r};
      const int64_t q = plan.queries.begin + r, key = plan.keys.begin;
      const RowScore<A> score{p, b, h, q, key, plan.masked[g] ? plan.visible[r] : nullptr};
      if (!score.plain()) {
        V unused;
        for (int64_t n = columns.begin; n < columns.end; n += V::kWidth) {
          store(row.s + n, score.logit(load(row.s + n), n, unused));
        }
      }
      softmax_row(row, columns);
      if (p.dropout.threshold != 0) {
        const RowDropout<A> dropout(p, b, h, q, key);
        for (int64_t n = columns.begin; n < columns.end; n += V::kWidth) {
          store(row.s + n, load(row.s + n) * dropout.factor(n));
        }
      }
    }
  }
}

template <class T>
void forward_block(const AttentionForwardParams& params, int64_t item) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  // Later query blocks see more keys under a causal mask: longest first.
  const int64_t heads = p.batch * p.hq, n = query_block_count(p) - 1 - item / heads;
  const int64_t b = item % heads / p.hq, h = item % p.hq;
  const Range queries = block(n, kQueryBlock, p.tq);
  const int64_t rows = queries.end - queries.begin;
  const int64_t dq = padded_row(p.d), width = padded_row(p.dv);

  Carver<A> carve{static_cast<A*>(params.scratch)};
  A* const q = carve.take(kQueryBlock * dq);
  A* const s = carve.take(kQueryBlock * kKeyBlock);
  A* const o = carve.take(kQueryBlock * width);
  A* const m = carve.take(kQueryBlock);
  A* const l = carve.take(kQueryBlock);
  pack_rows<T>(row_of<T>(p.q, b, queries.begin, h), p.q.stride_t, rows, p.d,
               static_cast<A>(p.score.pre), q);
  fill_zero(o, rows * width);
  for (int64_t r = 0; r < rows; ++r) {
    m[r] = negative_infinity<A>();
    l[r] = A(0);
  }

  const A* const packed_k = static_cast<const A*>(params.workspace) +
                            (b * p.hkv + kv_head(h, p.hq, p.hkv)) * packed_head_elements(p);
  const A* const packed_v = packed_k + packed_keys(p) * p.d;
  const Range blocks = key_blocks(p.mask, b, queries, kKeyBlock);
  TilePlan plan;
  for (int64_t kb = blocks.begin; kb < blocks.end; ++kb) {
    const Range keys = block(kb, kKeyBlock, p.tk);
    if (!plan_tile(p, b, h, queries, keys, plan)) continue;
    multiply_by_keys(plan, q, dq, p.d, packed_k + keys.begin * p.d, s);
    softmax_tile(p, b, h, plan, s, o, m, l);
    accumulate_keys(plan, s, packed_v + keys.begin * width, width, round_up(p.dv, 16), o, width);
  }

  A* const lse = static_cast<A*>(params.lse) + (b * p.hq + h) * p.tq + queries.begin;
  for (int64_t r = 0; r < rows; ++r) {
    store_row(o + r * width, softmax_normaliser(l[r]), p.dv,
              row_of<T>(params.out, b, queries.begin + r, h));
    lse[r] = softmax_lse(m[r], l[r], log(Vec<A>(l[r])).v[0]);
  }
}

void pack(const AttentionForwardParams& p, int64_t begin, int64_t end) {
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) pack_keys<decltype(type)>(p, i);
  });
}

void forward(const AttentionForwardParams& p, int64_t begin, int64_t end) {
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) forward_block<decltype(type)>(p, i);
  });
}

}  // namespace

extern const AttentionForwardKernels attention_forward_kernels_table = {pack, forward};

}  // namespace omniattn::OMNIATTN_ISA
