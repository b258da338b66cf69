// A block of queries of a head and its way through the keys, see parallax.h.
#pragma once

#include "kernels/parallax/parallax.h"
#include "kernels/recurrence/item_pass.h"
#include "semantics/seqlen.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Rows of queries and keys of a sequence in its batch entry.
struct ParallaxSequence {
  int64_t batch, query, queries, key, keys;
};
OMNIATTN_INLINE ParallaxSequence sequence_of(const Parallax& p, int64_t n) {
  if (p.boundaries == nullptr) return {n, 0, p.queries, 0, p.keys};
  const int64_t begin = p.boundaries[n], count = p.boundaries[n + 1] - begin;
  return {0, begin, count, begin, count};
}

template <class C>
struct ParallaxBlock {
  static constexpr int kWidth = Vec<C>::kWidth;
  static constexpr int64_t kRows = Parallax::kRows, kKeys = 64;

  const Parallax& p;
  const int64_t D, V;
  ParallaxSequence x{};
  int64_t head = 0, first = 0, rows = 0;  // of queries in the sequence
  Range keys{};                           // that some of them see
  Matrix<C> queries;                      // scaled q, then r
  Matrix<C> k, v;                         // of a tile
  Matrix<C> scores;                       // logits, then s; p, then p s
  Matrix<C> sums;                         // A, then B
  C *most, *total, *mean;                 // largest logit, sum of weights, m
  C* packed;

  ParallaxBlock(const Parallax& problem, Room<C>& room) : p(problem), D(p.width), V(p.value_width) {
    queries = room.rows(2 * kRows, D), scores = room.rows(2 * kRows, kKeys);
    k = room.rows(kKeys, D), v = room.rows(kKeys, V), sums = room.rows(2 * kRows, V);
    most = room.take(kRows), total = room.take(kRows), mean = room.take(kRows);
    packed = room.take(packed_elements<C>(larger(D, V), kKeys));
  }

  // Loads the block of queries of a head that starts at a query of the sequence.
  [[gnu::noinline]] void begin(const ParallaxSequence& sequence, int64_t of_head, int64_t query) {
    x = sequence, head = of_head, first = query;
    rows = smaller(kRows, x.queries - first);
    load_rows(p.dtype, row(p.q), p.q.step, rows, D, queries, static_cast<C>(p.scale));
    load_rows(p.dtype, row(p.r), p.r.step, rows, D, queries.at(rows));
    keys = {seen(0).begin, seen(rows - 1).end};
  }
  // First row of the block in a tensor of queries.
  const char* row(const StepView& from) const {
    return row_of(p.dtype, from, x.batch, x.query + first, head);
  }
  // Keys that query i of the block sees.
  OMNIATTN_INLINE Range seen(int64_t i) const {
    const int64_t own = first + i + x.keys - x.queries;
    const int64_t low = p.left < 0 ? 0 : own - p.left,
                  high = p.right < 0 ? x.keys : own + p.right + 1;
    return {larger(low, int64_t{0}), smaller(high, x.keys)};
  }
  template <class F>
  OMNIATTN_INLINE void for_tiles(const F& f) {
    for (int64_t key = keys.begin; key < keys.end; key += kKeys) {
      f(key, smaller(kKeys, keys.end - key));
    }
  }

  // Computes logits and s of a tile.
  [[gnu::noinline]] void score(int64_t key, int64_t count) {
    const int64_t group = p.heads / p.key_heads;
    const auto load = [&](const StepView& from, int64_t width, Matrix<C> to) {
      const char* const data = row_of(p.dtype, from, x.batch, x.key + key, head / group);
      load_rows(p.dtype, data, from.step, count, width, to);
    };
    load(p.k, D, k), load(p.v, V, v);
    pack_columns(k, count, D, packed);
    multiply(queries, packed_panels(packed, D), scores, 2 * rows, count, D, Into::set);
  }
  // Calls f(j, seen) for vectors of the keys of a tile, with the lanes that query i sees.
  template <class F>
  OMNIATTN_INLINE void for_keys(int64_t i, int64_t key, int64_t count, const F& f) const {
    const Range range = seen(i);
    const int64_t low = range.begin - key, high = smaller(range.end - key, count);
    for (int64_t j = 0; j < count; j += kWidth) {
      f(j, lanes_below<C>(high - j), lanes_below<C>(low - j));
    }
  }
  OMNIATTN_INLINE static Vec<C> shown(Mask<C> below, Mask<C> before, Vec<C> x, Vec<C> hidden) {
    return select(before, hidden, select(below, x, hidden));
  }

  // Finds A, B, m, the largest logits and the sums of weights.
  [[gnu::noinline]] void attend() {
    constexpr C kNone = -__builtin_huge_val();
    zero_rows(sums, 2 * rows, V);
    for (int64_t i = 0; i < rows; ++i) most[i] = kNone, total[i] = mean[i] = 0;
    for_tiles([&](int64_t key, int64_t count) {
      score(key, count);
      for (int64_t i = 0; i < rows; ++i) weigh(i, key, count);
      multiply(scores, Matrix<const C>(v), sums, 2 * rows, V, count, Into::add);
    });
    for (int64_t i = 0; i < rows; ++i) {
      const C share = total[i] > 0 || total[i] != total[i] ? 1 / total[i] : C{0};
      mean[i] *= share;
      scale(sums.row(i), share), scale(sums.row(rows + i), share);
    }
  }

 private:
  void scale(C* row, C factor) const { convert_rows(row, 0, 1, V, row, 0, factor); }

  // Replaces the logits and s of a query by its weights p and p s.
  OMNIATTN_INLINE void weigh(int64_t i, int64_t key, int64_t count) {
    const Vec<C> none(-static_cast<C>(__builtin_huge_val()));
    C *const logits = scores.row(i), *const s = scores.row(rows + i);
    Vec<C> largest = none;
    for_keys(i, key, count, [&](int64_t j, auto below, auto before) {
      largest = max(shown(below, before, load(logits + j), none), largest);
    });
    const C now = larger(most[i], reduce_max(largest));
    // Without visible keys all weights are 0.
    const C origin = now == -static_cast<C>(__builtin_huge_val()) ? C{0} : now;
    const C kept = static_cast<C>(__builtin_exp(most[i] - origin));
    Vec<C> sum(C{0}), weighted(C{0});
    for_keys(i, key, count, [&](int64_t j, auto below, auto before) {
      const Vec<C> weight =
          shown(below, before, exp(load(logits + j) - Vec<C>(origin)), Vec<C>(C{0}));
      const Vec<C> times = shown(below, before, weight * load(s + j), Vec<C>(C{0}));
      sum += weight, weighted += times;
      store(logits + j, weight), store(s + j, times);
    });
    if (now != most[i] && most[i] == most[i]) {
      scale(sums.row(i), kept), scale(sums.row(rows + i), kept);
    }
    most[i] = now;
    total[i] = total[i] * kept + reduce_add(sum);
    mean[i] = mean[i] * kept + reduce_add(weighted);
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
