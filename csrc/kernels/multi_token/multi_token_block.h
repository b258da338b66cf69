// Shared by forward and backward of multi-token attention, see multi_token.h: the parameters of a
// group of heads, the packed keys of a head, and blocks of queries from logits to weights.
#pragma once

#include "kernels/multi_token/multi_token.h"
#include "kernels/multi_token/multi_token_taps.h"
#include "kernels/recurrence/recurrence_rows.h"
#include "semantics/score_rules.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Packed keys of a kv head of a batch entry, as `packed_head` counts them.
template <class C>
struct PackedKeys {
  C *k_columns, *v_columns;  // panels; v_columns without the columns of the side
  Matrix<C> v, k;            // (Tk, Dv) and (Tk, D)

  PackedKeys(const MultiToken& p, int64_t b, int64_t kv_head) {
    C* next = static_cast<C*>(p.packed) + (b * p.kv_heads + kv_head) * p.packed_head();
    const auto take = [&](int64_t count) {
      C* const result = next;
      next += count;
      return result;
    };
    const int64_t columns = p.panels() * p.kPanel;
    k_columns = take(columns * p.width);
    v = {take(p.keys * p.row_of_width(p.value_width)), p.row_of_width(p.value_width)};
    k = {take(p.packs_gradients ? p.keys * p.row_of_width(p.width) : 0), p.row_of_width(p.width)};
    v_columns = take(0);
  }
};

// Queries [first, first + rows) of a group of heads, and the halo before them: row r of its logits
// is query first - halo + r, and rows before `missing` are before the first query. Its queries see
// keys before `keys`.
struct MultiTokenBlock {
  int64_t first, rows, missing, keys;
};

template <class C>
struct BlockPass {
  static constexpr int kWidth = Vec<C>::kWidth;

  const MultiToken& p;
  Room<C> room;
  const int64_t halo, side, count;  // count: heads of a group
  const int64_t most_rows, height;  // rows of the largest block, and with its halo
  int64_t batch = 0, group = 0, part = 0;
  MultiTokenBlock at{};
  Matrix<C> taps, mixing;  // (C, cq ck) and (C, C)
  Matrix<C> q;             // (C, height) rows of queries times scale
  Matrix<C> weights;       // (C, most_rows) rows of X, then of P
  C* inverse;              // factor that turns a row of weights into P

  BlockPass(const MultiToken& problem, void* memory)
      : p(problem),
        room(memory),
        halo(p.halo()),
        side(p.side()),
        count(p.mixed_heads),
        most_rows(smaller(p.kRows, p.rows())),
        height(most_rows + halo) {
    taps = room.rows(count, p.query_taps * p.key_taps), mixing = room.rows(count, count);
    q = room.rows(count * height, p.width);
    weights = room.rows(count * most_rows, correlated_columns<C>(p.keys));
    inverse = room.take(count * most_rows);
  }

  // Memory of a tile of logits.
  Matrix<C> tile_of_logits() {
    return room.rows(height, correlated_columns<C>(p.kKeys) + 2 * side);
  }
  int64_t head(int64_t c) const { return group * count + c; }
  PackedKeys<C> keys_of(int64_t c) const { return {p, batch, p.kv_head_of(head(c))}; }
  Taps<const C> taps_of(Input<C> all, int64_t c) const {
    return {all.row(c), p.query_taps, p.key_taps};
  }
  Matrix<C> weights_of(int64_t c) const { return weights.at(c * most_rows); }

  // Calls run() with `at` set to each block of an item, the longest first.
  template <class F>
  void for_blocks_of(int64_t index, const F& run) {
    part = index % p.items_per_group, group = index / p.items_per_group % p.groups();
    batch = index / p.items_per_group / p.groups();
    const int64_t size = p.query_taps * p.key_taps, element = size_of(p.dtype);
    load_rows(p.dtype, static_cast<const char*>(p.weight) + head(0) * size * element, size, count,
              size, taps);
    load_rows(p.dtype, static_cast<const char*>(p.head_weight) + head(0) * count * element, count,
              count, count, mixing);
    for (int64_t n = p.blocks() - 1 - part; n >= 0; n -= p.items_per_group) {
      at.first = p.lead + n * p.kRows, at.rows = smaller(p.kRows, p.queries - at.first);
      at.missing = larger(0, halo - at.first);
      at.keys = p.seen_by(at.first + at.rows - 1);
      run();
    }
  }
  // Calls f(key, columns) for the tiles of keys that the block sees.
  template <class F>
  OMNIATTN_INLINE void for_tiles(const F& f) const {
    for (int64_t key = 0; key < at.keys; key += p.kKeys) f(key, smaller(p.kKeys, at.keys - key));
  }
  int64_t query_of(int64_t row) const { return at.first - halo + row; }

  void load_queries() const {
    const int64_t row = at.missing;
    for (int64_t c = 0; c < count; ++c) {
      load_rows(p.dtype, row_of(p.dtype, p.q, batch, query_of(row), head(c)), p.q.step,
                at.rows + halo - row, p.width, q.at(c * height + row), static_cast<C>(p.scale));
    }
  }
  // S of a tile: its column side + n is the key key + n.
  [[gnu::noinline]] void logits(int64_t c, int64_t key, int64_t columns, Matrix<C> s) const {
    const Panels<C> k = packed_panels<C>(keys_of(c).k_columns, p.width);
    multiply(q.at(c * height + at.missing), k.at(0, key), s.at(at.missing),
             at.rows + halo - at.missing, columns + 2 * side, p.width, Into::set);
    hide(s, key - side, round_up(columns, kWidth) + 2 * side);
  }
  // Sets the columns of hidden and missing keys and of missing queries to 0.
  [[gnu::noinline]] void hide(Matrix<C> tile, int64_t first_key, int64_t columns) const {
    for (int64_t r = 0; r < at.rows + halo; ++r) {
      const int64_t begin = smaller(columns, larger(0, -first_key));
      const int64_t end = smaller(columns, larger(begin, p.seen_by(query_of(r)) - first_key));
      zero_rows(tile.at(r), 1, begin);
      zero_rows(tile.at(r, end), 1, columns - end);
    }
  }
  // X of a tile, into its columns of the rows of weights.
  void convolve(int64_t c, int64_t key, int64_t columns, Input<C> s) const {
    correlate(taps_of(taps, c), s, weights_of(c).at(0, key), at.rows, columns);
  }
  // Turns X into P / inverse, 0 up to a whole vector of keys.
  [[gnu::noinline]] void exponentiate(int64_t c) const {
    const int64_t end = round_up(at.keys, kWidth);
    for (int64_t i = 0; i < at.rows; ++i) {
      C* const x = weights_of(c).row(i);
      inverse[c * most_rows + i] = exponentiate_row(x, p.seen_by(at.first + i), end);
    }
  }

 private:
  static C exponentiate_row(C* x, int64_t seen, int64_t end) {
    using V = Vec<C>;
    if (seen == 0) {
      zero_rows(Matrix<C>{x, end}, 1, end);
      return 0;
    }
    for (int64_t j = seen; j < end; ++j) x[j] = negative_infinity<C>();
    V top(negative_infinity<C>()), sum = zero<C>();
    for (int64_t j = 0; j < end; j += kWidth) top = max(top, load(x + j));
    const V shift(softmax_shift(reduce_max(top)));
    constexpr auto kFactor = static_cast<C>(kLog2E);
    for (int64_t j = 0; j < end; j += kWidth) {
      const V power = exp2((load(x + j) - shift) * kFactor);
      store(x + j, power);
      sum += power;
    }
    zero_rows(Matrix<C>{x + seen, end - seen}, 1, end - seen);  // also where the shift is NaN
    return 1 / reduce_add(sum);
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
