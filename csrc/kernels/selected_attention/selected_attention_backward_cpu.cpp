// Backward over selected keys (see selected_attention.h), five products per tile:
//
//   dV += (Z P)^T dO     dP = dO V^T     dS = P (Z dP - Delta)     dK += dx^T x_q     dQ += dx K
//
// with the names of attention_backward_cpu.cpp. dQ stays in L2 while an item walks its list; dK and
// dV are added to the owner's buffer.
#include "kernels/attention/attention_backward_tile.h"
#include "kernels/selected_attention/selected_attention_tile.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// K^T and V^T in panels, and K as rows, of one kv head; 16-bit operands in pairs.
template <class T>
struct PackedKeys {
  using A = compute_t<T>;
  using M = operand_t<T>;
  M *kt, *vt, *k;

  PackedKeys(const AttentionProblem& p, void* memory, int64_t head) {
    A* const first = static_cast<A*>(memory) + head * selected_packed_head(p);
    kt = reinterpret_cast<M*>(first);
    vt = reinterpret_cast<M*>(first + packed_keys(p) * p.d);
    k = reinterpret_cast<M*>(first + packed_keys(p) * (p.d + p.dv));
  }
};

template <class T>
void pack_item(const SelectedBackwardParams& params, int64_t item) {
  using M = operand_t<T>;
  const AttentionProblem& p = params.attention.problem;
  const int64_t panels = ceil_div(p.tk, kKeyPanel), head = item / panels;
  const PackedKeys<T> to(p, params.packed, head);
  const Range keys = block(item % panels, kKeyPanel, p.tk);
  const int64_t count = keys.end - keys.begin, b = head / p.hkv, h = head % p.hkv;
  const T* const k = row_of<T>(p.k, b, keys.begin, h);
  const T* const v = row_of<T>(p.v, b, keys.begin, h);
  pack_keys_as_columns(k, p.k.stride_t, p.d, count, kKeyPanel,
                       to.kt + keys.begin * packed_depth<M>(p.d));
  pack_keys_as_columns(v, p.v.stride_t, p.dv, count, kKeyPanel,
                       to.vt + keys.begin * packed_depth<M>(p.dv));
  pack_operand_rows(k, p.k.stride_t, count, p.d, to.k + keys.begin * padded_row(p.d));
}

// dK and dV of one kv head and split, one row per key.
template <class A>
struct KeySums {
  int64_t ldk, ldv;
  A *k, *v;

  KeySums(const AttentionBackwardParams& params, int64_t head, int64_t split) {
    const AttentionProblem& p = params.problem;
    ldk = padded_row(p.d);
    ldv = padded_row(p.dv);
    k = static_cast<A*>(params.workspace) + split * selected_sums_elements(p) +
        head * p.tk * (ldk + ldv);
    v = k + p.tk * ldk;
  }
};

// Operands of a tile: packed keys and values, or copies of the tile's keys and values. In the
// latter case, its dK or dV is added to the kv head's sums row by row.
template <class T>
struct BackwardKeys {
  using A = compute_t<T>;
  using M = operand_t<T>;
  M *kt, *vt, *k;
  T* rows = nullptr;
  A* sums = nullptr;
  int32_t* lists = nullptr;  // memory of ListsOfBlocks

  BackwardKeys(const SelectedBackwardParams& params, int64_t head, Arena<A>& arena) {
    const AttentionProblem& p = params.attention.problem;
    if (params.lists.gathered) {
      kt = reinterpret_cast<M*>(arena.take(kKeyBlock * p.d));
      vt = reinterpret_cast<M*>(arena.take(kKeyBlock * p.dv));
      k = reinterpret_cast<M*>(arena.take(kKeyBlock * padded_row(p.d)));
      rows = reinterpret_cast<T*>(arena.take(kKeyBlock * larger(p.d, p.dv)));
      sums = arena.take(kKeyBlock * padded_row(larger(p.d, p.dv)));
    } else {
      lists = reinterpret_cast<int32_t*>(arena.take(tile_key_elements(params.lists, p)));
      const PackedKeys<T> packed(p, params.packed, head);
      kt = packed.kt;
      vt = packed.vt;
      k = packed.k;
    }
  }
  void gather(const AttentionProblem& p, const SelectedItem& item, KeyTile& tile) const {
    gather_rows(p.k, item, tile, p.d, rows);
    pack_keys_as_columns(rows, p.d, p.d, tile.columns, tile.columns, kt);
    pack_operand_rows(rows, p.d, tile.columns, p.d, k);
    gather_rows(p.v, item, tile, p.dv, rows);
    pack_keys_as_columns(rows, p.dv, p.dv, tile.columns, tile.columns, vt);
    number_rows(tile);
  }
};

// x_q and dO times the factor of its row of P (see QueryRows), both also as right operands; dQ.
template <class T>
struct GradientRows {
  using A = compute_t<T>;
  using M = operand_t<T>;
  M *q, *grad_out, *q_pairs, *grad_pairs;
  A* grad_q;

  GradientRows(const AttentionProblem& p, int64_t rows, Arena<A>& arena) {
    const auto take = [&](int64_t cols) {
      return reinterpret_cast<M*>(arena.take(rows * padded_row(cols)));
    };
    q = q_pairs = take(p.d);
    grad_out = grad_pairs = take(p.dv);
    if constexpr (kKeepsQueries<T>) {
      q_pairs = take(p.d);
      grad_pairs = take(p.dv);
    }
    grad_q = arena.take(rows * padded_row(p.d));
  }
};

// Per-item row state and per-tile scratch.
template <class T>
struct BackwardRows {
  using A = compute_t<T>;
  using M = operand_t<T>;
  int64_t count, tile_capacity, ldq, ldo;
  int64_t row_q, row_o;  // strides of q and grad_out
  GradientRows<T> item, tile;
  A *delta, *shift, *factor;
  A *weights, *ds;

  BackwardRows(const SelectedBackwardParams& params, const AttentionProblem& p, Arena<A>& arena)
      : count(0),
        tile_capacity(selected_tile_rows(params.lists, p)),
        ldq(padded_row(p.d)),
        ldo(padded_row(p.dv)),
        row_q(operand_row<M>(p.d)),
        row_o(operand_row<M>(p.dv)),
        item(p, selected_rows(params.lists, p), arena),
        tile(p, tile_capacity, arena) {
    weights = arena.take(tile_capacity * kKeyBlock);
    ds = arena.take(tile_capacity * kKeyBlock);
    delta = arena.take(selected_rows(params.lists, p));
    shift = arena.take(selected_rows(params.lists, p));
    factor = arena.take(selected_rows(params.lists, p));
  }

  // Operands of the rows of a tile: in place, or copies.
  GradientRows<T> of(const RowTile& picked) const {
    GradientRows<T> own = tile;
    own.q = rows_of_tile(picked, item.q, row_q, ldq, tile.q);
    own.grad_out = rows_of_tile(picked, item.grad_out, row_o, ldo, tile.grad_out);
    if constexpr (kKeepsQueries<T>) {
      // The second row of a pair could be NaN if it is not in the tile.
      if (picked.consecutive && picked.first % 2 == 0 &&
          (picked.count % 2 == 0 || picked.first + picked.count == count)) {
        own.q_pairs = item.q_pairs + picked.first * ldq;
        own.grad_pairs = item.grad_pairs + picked.first * ldo;
      } else {
        pack_pairs(own, picked.count);
      }
    } else {
      own.q_pairs = own.q;
      own.grad_pairs = own.grad_out;
    }
    return own;
  }
  void pack_pairs(const GradientRows<T>& rows, int64_t number) const {
    pack_rows(rows.q, row_q, number, ldq, rows.q_pairs, ldq, ldq);
    pack_rows(rows.grad_out, row_o, number, ldo, rows.grad_pairs, ldo, ldo);
  }
};

template <class T>
void start_rows(const AttentionBackwardParams& params, const SelectedItem& item,
                BackwardRows<T>& rows) {
  using A = compute_t<T>;
  using V = Vec<A>;
  const AttentionProblem& p = params.problem;
  rows.count = item_rows(item);
  pack_item_rows<T>(p.q, item, p.d, kKeepsQueries<T> ? A(1) : static_cast<A>(p.score.pre),
                    rows.item.q);
  fill_zero(rows.item.grad_q, rows.count * rows.ldq);
  for_item_rows(item, [&](int64_t r, int64_t query, int64_t h) {
    const int64_t stat = (item.b * p.hq + h) * p.lse_stride + query;
    const Lse<A> lse{static_cast<const A*>(params.lse)[stat],
                     static_cast<const A*>(params.lse_tail)[stat]};
    const auto [shift, exponent] = softmax_backward_shift(p.score, lse);
    const A factor = exp2(V(exponent)).v[0];
    const A kept = kSplits<operand_t<T>> ? factor : A(1);  // folding it into dO would round
    auto* const grad = rows.item.grad_out + r * rows.row_o;
    pack_rows<T>(row_of<T>(params.grad_out, item.b, query, h), 0, 1, p.dv,
                 kSplits<operand_t<T>> ? A(1) : factor, grad);
    const T* const out = row_of<T>(params.out, item.b, query, h);
    V sum = zero<A>();
    for (int64_t c = 0; c < p.dv; c += V::kWidth) {
      sum = fma(load_n(out + c, p.dv - c), load(grad + c), sum);
    }
    const auto* const grad_lse = static_cast<const A*>(params.grad_lse);
    rows.delta[r] = kept * reduce_add(sum) - (grad_lse != nullptr ? factor * grad_lse[stat] : A(0));
    rows.shift[r] = shift;
    rows.factor[r] = kept;
    if (params.part_sinks != nullptr) {
      const A distance = (initial_maximum<A>(p, h) - rows.shift[r]) * exponent_factor<A>(p.score);
      static_cast<A*>(params.part_sinks)[stat] = -exp2(V(distance)).v[0] * rows.delta[r];
    }
  });
  if constexpr (kKeepsQueries<T>) rows.pack_pairs(rows.item, rows.count);
}

// Turns q.k and dP of row r, row n of a tile, into the weights after dropout and dx.
template <class T>
void gradient_row(const AttentionProblem& p, const KeyTile& tile,
                  const RowScore<compute_t<T>>& score, const BackwardRows<T>& rows, int64_t n,
                  int64_t r) {
  using A = compute_t<T>;
  using V = Vec<A>;
  const Range columns = tile.padded_columns();
  A *const weights = rows.weights + n * kKeyBlock, *const ds = rows.ds + n * kKeyBlock;
  A slope[kKeyBlock];  // slope of the transform
  const A factor = kKeepsQueries<T> ? static_cast<A>(p.score.pre) : A(1);
  score.to_logits(weights, columns, factor, slope);
  if constexpr (kSplits<operand_t<T>>) scale_row(ds, columns, rows.factor[r]);
  drop_row(p, score.b, score.h, score.q, tile, ds);
  const V mean(rows.delta[r]);
  with_weight(p.score, rows.shift[r], [&](auto weight) {
    for_columns<A>(columns, [&](int64_t c) {
      const auto w = weight(load(weights + c));
      store(weights + c, w.value);
      store(ds + c, w.slope * (load(ds + c) - mean));
    });
  });
  score.hide(ds, columns, A(0));  // a hidden key may hold anything, and 0 * NaN is NaN
  drop_row(p, score.b, score.h, score.q, tile, weights);
  if constexpr (kSplits<operand_t<T>>) scale_row(weights, columns, rows.factor[r]);
  if (p.score.transform == ScoreKind::none) return;
  for_columns<A>(columns, [&](int64_t c) { store(ds + c, load(ds + c) * load(slope + c)); });
}

// Adds X^T Y to the rows of the keys in `sum`. X is (rows x keys of a tile), 16-bit numbers in
// pairs of rows; Y has `rows` rows.
template <class T>
void add_to_keys(const KeyTile& tile, const computed_t<operand_t<T>>* x, int64_t rows,
                 const operand_t<T>* y, int64_t ld, int64_t width, compute_t<T>* own,
                 compute_t<T>* sum) {
  using M = operand_t<T>;
  const auto multiply = [&](int64_t column, int64_t count, compute_t<T>* to, bool adds) {
    gemm_tile<M, ALayout::kTransposed>(x + column * kComputedPair<M>, kKeyBlock, row_panels(y, ld),
                                       to, ld, count, width, rows, adds);
  };
  if (own == nullptr) {
    for (int64_t n = 0; n < tile.spans; ++n) {
      multiply(tile.span[n].column, tile.span[n].count, sum + tile.span[n].key * ld, true);
    }
    return;
  }
  multiply(0, tile.columns, own, false);
  for (int64_t n = 0; n < tile.columns; ++n) {
    compute_t<T>* const to = sum + tile.position[n] * ld;
    for_columns<compute_t<T>>(
        {0, width}, [&](int64_t c) { store(to + c, load(to + c) + load(own + n * ld + c)); });
  }
}

template <class T>
void gradient_rows(const SelectedBackwardParams& params, const SelectedItem& item,
                   const KeyTile& keys, const RowTile& tile, const BackwardRows<T>& rows) {
  const AttentionProblem& p = params.attention.problem;
  Visibility visible(params.lists, p, keys, item.queries.begin + tile[0] / item.heads);
  for_tile_rows(item, tile, [&](int64_t n, int64_t r, int64_t q, int64_t h) {
    const RowScore<compute_t<T>> score{p, item.b, h, q, 0, visible.of(q), nullptr};
    gradient_row<T>(p, keys, score, rows, n, r);
  });
}

template <class T>
void gradient_tile(const SelectedBackwardParams& params, const SelectedItem& item,
                   const KeyTile& keys, const RowTile& tile, const BackwardKeys<T>& operands,
                   const KeySums<compute_t<T>>& sums, const BackwardRows<T>& rows) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.attention.problem;
  const int64_t width_k = round_up(p.d, 16), width_v = round_up(p.dv, 16);
  const GradientRows<T> own = rows.of(tile);
  multiply_by_tile(keys, own.q, rows.row_q, tile.count, p.d, operands.kt, rows.weights);
  multiply_by_tile(keys, own.grad_out, rows.row_o, tile.count, p.dv, operands.vt, rows.ds);
  gradient_rows(params, item, keys, tile, rows);
  const A factor = static_cast<A>(p.score.pre);
  const auto x = tile_operands<T>(rows.weights, rows.ds, tile.count, rows.tile_capacity, factor);
  add_to_keys<T>(keys, x.weights, tile.count, own.grad_pairs, rows.ldo, width_v, operands.sums,
                 sums.v);
  add_to_rows(tile, rows.item.grad_q, rows.ldq, own.grad_q, [&](A* grad_q) {
    accumulate_tile(keys, x.dq, kKeyBlock, tile.count, operands.k, rows.ldq, width_k, grad_q);
  });
  scale_for_keys<T>(rows.ds, tile.count, factor);
  add_to_keys<T>(keys, x.dk, tile.count, own.q_pairs, rows.ldq, width_k, operands.sums, sums.k);
}

// Processes a tile of few rows, with keys in place.
template <class T>
void gradient_in_place(const SelectedBackwardParams& params, const SelectedItem& item,
                       const KeyTile& keys, const RowTile& all, const KeySums<compute_t<T>>& sums,
                       const BackwardRows<T>& rows) {
  const AttentionProblem& p = params.attention.problem;
  KeysInPlace<T> placed(p, item);
  placed.set(p, keys);
  placed.dot(p, rows.item.q, rows.row_q, rows.count, rows.weights);
  dot_rows_at(rows.item.grad_out, rows.row_o, rows.count, placed.v, placed.at_v, placed.count, p.dv,
              rows.ds, kKeyBlock, [](int64_t) {});
  gradient_rows(params, item, keys, all, rows);
  int64_t at[kKeyBlock];
  for (int64_t n = 0; n < placed.count; ++n) at[n] = keys.position[n] * sums.ldv;
  add_rows_at(rows.weights, kKeyBlock, rows.count, rows.item.grad_out, rows.row_o,
              round_up(p.dv, 16), at, placed.count, sums.v);
  for (int64_t n = 0; n < placed.count; ++n) at[n] = keys.position[n] * sums.ldk;
  add_rows_at(rows.ds, kKeyBlock, rows.count, rows.item.q, rows.row_q, round_up(p.d, 16), at,
              placed.count, sums.k);
  weigh_rows_at(rows.ds, kKeyBlock, rows.count, placed.k, placed.at_k, placed.count, p.d,
                rows.item.grad_q, rows.ldq);
}

template <class T>
void gradient_item(const SelectedBackwardParams& params, const SelectedItem& item,
                   const BackwardKeys<T>& operands, const KeySums<compute_t<T>>& sums,
                   BackwardRows<T>& rows) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.attention.problem;
  start_rows(params.attention, item, rows);
  const auto visit = [&](const KeyTile& keys, const RowTile& tile) {
    gradient_tile(params, item, keys, tile, operands, sums, rows);
  };
  if (params.lists.shared) {
    SharedTiles(params.lists, p, item, operands.lists, visit).walk();
  } else {
    const RowTile all(rows.count);
    KeyTile keys;
    for (KeyTiles next(params.lists, p, item); next.next(keys);) {
      if constexpr (!kKeepsQueries<T>) {
        if (reads_in_place<T>(params.lists, rows.count)) {
          gradient_in_place(params, item, keys, all, sums, rows);
          continue;
        }
      }
      if (params.lists.gathered) operands.gather(p, item, keys);
      visit(keys, all);
    }
  }
  for_item_rows(item, [&](int64_t r, int64_t q, int64_t h) {
    store_row(rows.item.grad_q + r * rows.ldq, static_cast<A>(p.score.pre * p.score.chain), p.d,
              row_of<T>(params.attention.grad_q, item.b, q, h));
  });
}

// Processes the items of one kv head that belong to a split.
template <class T>
void owner_item(const SelectedBackwardParams& params, void* scratch, int64_t n) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.attention.problem;
  const SelectedLists& lists = params.lists;
  const int64_t head = n % kv_head_items(p), split = n / kv_head_items(p);
  Arena<A> arena{static_cast<A*>(scratch), selected_backward_scratch(params)};
  const BackwardKeys<T> keys(params, head, arena);
  BackwardRows<T> rows(params, p, arena);
  const KeySums<A> sums(params.attention, head, split);
  fill_zero(sums.k, p.tk * (sums.ldk + sums.ldv));
  const int64_t b = head / p.hkv, first = head % p.hkv * group_size(p);
  for (int64_t h = first; h < first + group_size(p); h += item_heads(lists, p)) {
    for (int64_t i = split; i < items_per_head(lists, p); i += params.attention.splits) {
      const SelectedItem item = selected_item(lists, p, b, h, i);
      if (!is_empty(item.queries)) gradient_item<T>(params, item, keys, sums, rows);
    }
  }
}

// dK and dV of a panel of keys: the sum over splits, in order, times the scale.
template <class T>
void finish_item(const SelectedBackwardParams& params, int64_t item) {
  using A = compute_t<T>;
  const AttentionBackwardParams& x = params.attention;
  const AttentionProblem& p = x.problem;
  const int64_t panels = ceil_div(p.tk, kKeyPanel), head = item / panels;
  const Range keys = block(item % panels, kKeyPanel, p.tk);
  const KeySums<A> first(x, head, 0);
  const auto add = [](const A* from, int64_t width, A* to) {
    for_columns<A>({0, width}, [&](int64_t c) { store(to + c, load(to + c) + load(from + c)); });
  };
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    A *const k = first.k + key * first.ldk, *const v = first.v + key * first.ldv;
    for (int64_t split = 1; split < x.splits; ++split) {
      const KeySums<A> other(x, head, split);
      add(other.k + key * first.ldk, round_up(p.d, 16), k);
      add(other.v + key * first.ldv, round_up(p.dv, 16), v);
    }
    const int64_t b = head / p.hkv, h = head % p.hkv;
    store_row(k, static_cast<A>(p.score.chain), p.d, row_of<T>(x.grad_k, b, key, h));
    store_row(v, A(1), p.dv, row_of<T>(x.grad_v, b, key, h));
  }
}

// Calls f(T{}, item) for items [begin, end).
template <class F>
OMNIATTN_INLINE void for_items(const SelectedBackwardParams& params, int64_t begin, int64_t end,
                               const F& f) {
  dispatch(params.attention.problem.dtype, [&](auto type) {
    for (int64_t n = begin; n < end; ++n) f(type, n);
  });
}

void pack(const SelectedBackwardParams& params, void*, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, pack_items(params.attention.problem));
  for_items(params, begin, end,
            [&](auto type, int64_t n) { pack_item<decltype(type)>(params, n); });
}
void backward(const SelectedBackwardParams& params, void* scratch, int64_t begin, int64_t end) {
  const TileScope scope;
  const SelectedBackwardParams& x = params;
  OMNIATTN_ASSERT_ITEMS(begin, end, kv_head_items(x.attention.problem) * x.attention.splits);
  for_items(params, begin, end,
            [&](auto type, int64_t n) { owner_item<decltype(type)>(params, scratch, n); });
}
void finish(const SelectedBackwardParams& params, void*, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, pack_items(params.attention.problem));
  for_items(params, begin, end,
            [&](auto type, int64_t n) { finish_item<decltype(type)>(params, n); });
}

// Gradient of a sink: the sum of its head's parts.
void sum_sinks(const SelectedBackwardParams& params, void*, int64_t begin, int64_t end) {
  const AttentionProblem& p = params.attention.problem;
  dispatch_compute(p.dtype, [&]<class A>(A) {
    for (int64_t h = begin; h < end; ++h) {
      double sum = 0;
      for (int64_t b = 0; b < p.batch; ++b) {
        const A* const part =
            static_cast<const A*>(params.attention.part_sinks) + (b * p.hq + h) * p.lse_stride;
        for (int64_t q = 0; q < p.tq; ++q) sum += part[q];
      }
      static_cast<A*>(params.attention.grad_sinks)[h] = static_cast<A>(sum);
    }
  });
}

}  // namespace

extern const SelectedBackwardKernels selected_backward_kernels_table = {pack, backward, finish,
                                                                        sum_sinks};

}  // namespace omniattn::OMNIATTN_ISA
