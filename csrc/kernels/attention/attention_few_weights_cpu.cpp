// The attention weights of few query rows, or their sums (see attention_weights_cpu.cpp). A work
// item is a few key blocks of one kv head, whose keys it reads once, in place.
#include "kernels/attention/attention_decode_tile.h"
#include "runtime/dispatch.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Weights of one query for the first `count` of 64 keys, from its products x; added to `sums`.
template <class T>
void weigh_few(const AttentionWeightsParams& params, const RowScore<compute_t<T>>& score,
               int64_t count, compute_t<T>* x, compute_t<T>* sums) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t row = (score.b * p.hq + score.h) * p.tq + score.q;
  const A shift = lse_in_logits(p.score, static_cast<const A*>(params.lse)[row]);
  weigh_row(score, x, {0, count}, shift, sums);
  if (params.weights == nullptr) return;
  store_row(x, A(1), count, static_cast<T*>(params.weights) + row * p.tk + score.key);
}

template <class T>
void few_rows_item(const AttentionWeightsParams& params, void* scratch, int64_t item) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
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
      const int64_t h = head_of(r), query = r % p.tq;
      if (query == 0) fill_zero(sums, kKeyPanel);
      const bool masked = !sees_all(p.mask, b, h, {query, query + 1}, keys);
      uint64_t visible[kMaskWords] = {};
      if (masked) visible[0] = seen_bits(p.mask, b, h, query, key);
      const RowScore<A> score{p, b, h, query, key, masked ? visible : nullptr, registers};
      weigh_few<T>(params, score, x.count, s + r * kKeyPanel, sums);
      if (params.sums == nullptr || query + 1 < p.tq) continue;
      A* const row = static_cast<A*>(params.sums) + (b * p.hq + h) * p.tk + key;
      for (int64_t n = 0; n < x.count; ++n) row[n] = sums[n];
    }
  }
}

void weights(const AttentionWeightsParams& p, void* scratch, int64_t begin, int64_t end) {
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) few_rows_item<decltype(type)>(p, scratch, i);
  });
}

}  // namespace

extern const AttentionFewWeightsKernels attention_few_weights_kernels_table = {weights};

}  // namespace omniattn::OMNIATTN_ISA
