// Forward over selected keys (see selected_attention.h). An item keeps O and the
// softmax state of its rows in L2 and walks its keys once. Products read operands M,
// see attention_forward_cpu.cpp.
#include "kernels/attention/attention_softmax.h"
#include "kernels/selected_attention/selected_attention_tile.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Per-item row state and per-tile scratch.
template <class T>
struct ForwardRows {
  using A = compute_t<T>;
  using M = operand_t<T>;
  int64_t count, dq, width;
  M* q;
  A *o, *m, *l;
  M* tile_q;
  A *tile_s, *tile_o;

  ForwardRows(const SelectedForwardParams& params, const SelectedItem& item, Arena<A>& arena)
      : count(item_rows(item)),
        dq(operand_row<M>(params.attention.problem.d)),
        width(padded_row(params.attention.problem.dv)) {
    const AttentionProblem& p = params.attention.problem;
    const int64_t rows = selected_rows(params.lists, p), tile = selected_tile_rows(params.lists, p);
    q = reinterpret_cast<M*>(arena.take(rows * padded_row(p.d)));
    o = arena.take(rows * width);
    l = arena.take(rows * Vec<A>::kWidth);
    tile_q = reinterpret_cast<M*>(arena.take(tile * padded_row(p.d)));
    tile_s = arena.take(tile * kKeyBlock);
    tile_o = arena.take(tile * width);
    m = arena.take(rows);
  }
  // Row r of the item, which is row n of a tile.
  SoftmaxRow<A> row(int64_t n, int64_t r) const {
    return {tile_s + n * kKeyBlock, A(1), o + r * width, width, m + r, l + r * Vec<A>::kWidth};
  }
};

template <class T>
void start_rows(const AttentionProblem& p, const SelectedItem& item, const ForwardRows<T>& rows) {
  using A = compute_t<T>;
  pack_item_rows<T>(p.q, item, p.d, kKeepsQueries<T> ? A(1) : static_cast<A>(p.score.pre), rows.q);
  fill_zero(rows.o, rows.count * rows.width);
  fill_zero(rows.l, rows.count * Vec<A>::kWidth);
  for_item_rows(item, [&](int64_t r, int64_t, int64_t h) {
    rows.m[r] = initial_maximum<A>(p, h);
    rows.l[r * Vec<A>::kWidth] = softmax_initial_sum(rows.m[r]);
  });
}

// Logits, softmax and dropout of the rows of a tile; s holds q.k / factor, then computed_t<M>.
template <class T>
void softmax_rows(const SelectedForwardParams& params, const SelectedItem& item,
                  const KeyTile& keys, const RowTile& tile, const ForwardRows<T>& rows) {
  using A = compute_t<T>;
  using M = operand_t<T>;
  const AttentionProblem& p = params.attention.problem;
  const Range columns = keys.padded_columns();
  const A factor = kKeepsQueries<T> ? static_cast<A>(p.score.pre) : A(1);
  Visibility visible(params.lists, p, keys, item.queries.begin + tile[0] / item.heads);
  for_tile_rows(item, tile, [&](int64_t n, int64_t r, int64_t q, int64_t h) {
    const SoftmaxRow<A> row = rows.row(n, r);
    const RowScore<A> score{p, item.b, h, q, 0, visible.of(q), nullptr};
    score.to_logits(row.s, columns, factor);
    raise_maximum(p.score, row, reduce_max(lane_maxima(row.s, columns)));
    weigh<M, A>(p.score, row, columns);
    drop_row(p, item.b, h, q, keys, row.s);
    narrow_row<computed_t<M>>(row.s, columns);
  });
}

// Operands of a tile: packed keys and values, or copies of the tile's keys and values.
template <class T>
struct ForwardKeys {
  using A = compute_t<T>;
  using M = operand_t<T>;
  const M *k, *v;
  T* rows;
  M *own_k, *own_v;
  int32_t* lists;  // memory of ListsOfBlocks

  ForwardKeys(const SelectedForwardParams& params, const SelectedItem& item, Arena<A>& arena) {
    const AttentionProblem& p = params.attention.problem;
    if (params.lists.gathered) {
      own_k = reinterpret_cast<M*>(arena.take(kKeyBlock * p.d));
      own_v = reinterpret_cast<M*>(arena.take(kKeyBlock * padded_row(p.dv)));
      rows = reinterpret_cast<T*>(arena.take(kKeyBlock * larger(p.d, p.dv)));
      k = own_k;
      v = own_v;
    } else {
      lists = reinterpret_cast<int32_t*>(arena.take(tile_key_elements(params.lists, p)));
      const PackedHead<T> packed(p, params.attention.workspace, item.b * p.hkv + item.kv_head);
      k = packed.k;
      v = packed.v;
    }
  }
  void gather(const AttentionProblem& p, const SelectedItem& item, KeyTile& tile) const {
    gather_rows(p.k, item, tile, p.d, rows);
    pack_keys_as_columns(rows, p.d, p.d, tile.columns, tile.columns, own_k);
    gather_rows(p.v, item, tile, p.dv, rows);
    pack_operand_rows(rows, p.dv, tile.columns, p.dv, own_v);
    number_rows(tile);
  }
};

template <class T>
void walk_in_place(const SelectedForwardParams& params, const SelectedItem& item,
                   const RowTile& all, const ForwardRows<T>& rows) {
  const AttentionProblem& p = params.attention.problem;
  KeysInPlace<T> placed(p, item);
  KeyTile keys;
  for (KeyTiles next(params.lists, p, item); next.next(keys);) {
    placed.set(p, keys);
    placed.dot(p, rows.q, rows.dq, rows.count, rows.tile_s);
    softmax_rows(params, item, keys, all, rows);
    weigh_rows_at(rows.tile_s, kKeyBlock, rows.count, placed.v, placed.at_v, placed.count, p.dv,
                  rows.o, rows.width);
  }
}

template <class T>
void forward_tile(const SelectedForwardParams& params, const SelectedItem& item,
                  const KeyTile& keys, const RowTile& tile, const ForwardKeys<T>& operands,
                  const ForwardRows<T>& rows) {
  using A = compute_t<T>;
  using M = operand_t<T>;
  const AttentionProblem& p = params.attention.problem;
  const M* const q = rows_of_tile(tile, rows.q, rows.dq, padded_row(p.d), rows.tile_q);
  multiply_by_tile(keys, q, rows.dq, tile.count, p.d, operands.k, rows.tile_s);
  softmax_rows(params, item, keys, tile, rows);
  add_to_rows(tile, rows.o, rows.width, rows.tile_o, [&](A* o) {
    accumulate_tile(keys, reinterpret_cast<const computed_t<M>*>(rows.tile_s),
                    kKeyBlock * static_cast<int64_t>(sizeof(A) / sizeof(computed_t<M>)), tile.count,
                    operands.v, rows.width, round_up(p.dv, 16), o);
  });
}

template <class T>
void forward_item(const SelectedForwardParams& params, void* scratch, int64_t n) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.attention.problem;
  const SelectedLists& lists = params.lists;
  const int64_t heads = item_heads(lists, p), groups = p.hq / heads;
  const int64_t unit = n / items_per_head(lists, p);
  const SelectedItem item =
      selected_item(lists, p, unit / groups, unit % groups * heads, n % items_per_head(lists, p));
  if (is_empty(item.queries)) return;

  Arena<A> arena{static_cast<A*>(scratch), selected_forward_scratch(params)};
  const ForwardRows<T> rows(params, item, arena);
  const ForwardKeys<T> operands(params, item, arena);
  start_rows(p, item, rows);
  const RowTile all(rows.count);
  const auto visit = [&](const KeyTile& keys, const RowTile& tile) {
    forward_tile(params, item, keys, tile, operands, rows);
  };
  if (lists.shared) {
    SharedTiles(lists, p, item, operands.lists, visit).walk();
  } else if (reads_in_place<T>(lists, rows.count)) {
    if constexpr (!kKeepsQueries<T>) walk_in_place(params, item, all, rows);
  } else {
    KeyTile keys;
    for (KeyTiles next(lists, p, item); next.next(keys);) {
      if (params.lists.gathered) operands.gather(p, item, keys);
      visit(keys, all);
    }
  }
  for_item_rows(item, [&](int64_t r, int64_t q, int64_t h) {
    const A sum = reduce_add(load(rows.l + r * Vec<A>::kWidth));
    store_row(rows.o + r * rows.width, row_factor(p.score, sum), p.dv,
              row_of<T>(params.attention.out, item.b, q, h));
    store_lse(params.attention, (item.b * p.hq + h) * p.lse_stride + q,
              row_lse(p.score, rows.m[r], sum, log(Vec<A>(sum)).v[0]));
  });
}

void forward(const SelectedForwardParams& params, void* scratch, int64_t begin, int64_t end) {
  const TileScope scope;
  OMNIATTN_ASSERT_ITEMS(begin, end, selected_items(params.lists, params.attention.problem));
  dispatch(params.attention.problem.dtype, [&](auto type) {
    for (int64_t n = begin; n < end; ++n) forward_item<decltype(type)>(params, scratch, n);
  });
}

}  // namespace

extern const SelectedForwardKernels selected_forward_kernels_table = {forward};

}  // namespace omniattn::OMNIATTN_ISA
