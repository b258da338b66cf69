// Attention weights of few query rows, or sums of them (see attention_weights_cpu.cpp). A work item
// is a few key blocks of one kv head, whose keys it reads once, in place.
#include "kernels/attention/attention_decode_tile.h"
#include "kernels/attention/attention_kernels_cpu.h"
#include "kernels/attention_weights/attention_weights.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class T>
void few_rows_item(const AttentionWeightsParams& w, void* scratch, int64_t item) {
  using A = compute_t<T>;
  const AttentionProblem& p = w.problem;
  const int64_t splits = decode_splits(p), head = item / splits, ldq = padded_row(p.d);
  const int64_t b = head / p.hkv, kv = head % p.hkv, group = group_size(p), rows = group * p.tq;
  const auto head_of = [&](int64_t r) { return kv * group + r / p.tq; };

  Arena<A> arena{static_cast<A*>(scratch), few_rows_scratch_elements(p)};
  A* const q = arena.take(rows * ldq);
  A* const s = arena.take(rows * kKeyPanel);
  A* const sums = arena.take(kKeyPanel);
  A* const registers = arena.take(program_elements(p));
  for (int64_t r = 0; r < rows; ++r) {
    pack_rows<T>(row_of<T>(p.q, b, r % p.tq, head_of(r)), 0, 1, p.d, query_factor<A>(p, head_of(r)),
                 q + r * ldq);
  }
  int64_t at[kKeyPanel];
  for (int64_t n = 0; n < kKeyPanel; ++n) at[n] = n * p.k.stride_t;
  const Range split = block(item % splits, split_keys(p), p.tk);
  for (int64_t key = split.begin; key < split.end; key += kKeyPanel) {
    const Range keys = intersect(split, {key, key + kKeyPanel});
    KeyTile<T> x{};
    x.k = row_of<T>(p.k, b, key, kv);
    x.at_k = at;
    x.count = keys.end - keys.begin;
    x.q = q;
    x.s = s;
    dot_rows(p, rows, x, [](int64_t) {});
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t h = head_of(r), query = r % p.tq, row = (b * p.hq + h) * p.tq + query;
      const int64_t summed = heads_summed(w) * p.tq;  // rows of q in a row of column sums
      const int64_t result = (b * p.hq + h) / heads_summed(w);
      if (r % summed == 0) fill_zero(sums, kKeyPanel);
      const bool masked = !sees_all(p.mask, b, h, {query, query + 1}, keys);
      uint64_t visible[kMaskWords] = {};
      if (masked) visible[0] = seen_bits(p.mask, b, h, query, key);
      const RowScore<A> score{p, b, h, query, key, masked ? visible : nullptr, registers};
      const A shift = lse_in_logits(p.score, static_cast<const A*>(w.lse)[row]);
      weigh_row(score, s + r * kKeyPanel, {0, x.count}, A(1), shift, sums);
      store_weights<T>(w, result, query, key, x.count, s + r * kKeyPanel);
      if ((r + 1) % summed == 0) store_column_sums(w, result, key, x.count, sums);
    }
  }
}

void weights(const AttentionWeightsParams& p, void* scratch, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, few_rows_items(p.problem));
  OMNIATTN_ASSERT_HAS(scratch, few_rows_scratch_elements(p.problem));
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) few_rows_item<decltype(type)>(p, scratch, i);
  });
}

}  // namespace

extern const AttentionFewWeightsKernels attention_few_weights_kernels_table = {weights};

}  // namespace omniattn::OMNIATTN_ISA
