// Tiles of selected keys (see selected_attention.h): which keys they hold, their operands, and what
// their queries see of them.
#pragma once

#include "kernels/attention/attention_tile.h"
#include "kernels/attention/few_rows.h"
#include "kernels/attention/selected_attention.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// At most kKeyBlock keys, in columns 0, 1, ...
struct KeyTile {
  struct Span {
    int64_t key, column, count;  // keys from `key` on are in the columns from `column` on
  };
  int64_t columns, spans;
  Span span[kKeyBlock];
  int64_t position[kKeyBlock];  // of the key in each column

  OMNIATTN_INLINE Range padded_columns() const { return {0, round_up(columns, 16)}; }
};

// Walks the keys of an item that one of its queries may see, in the order of its list.
struct KeyTiles {
  const SelectedLists& s;
  const AttentionProblem& p;
  const SelectedItem& item;
  int64_t end;        // of the keys
  int64_t next_ = 0;  // entry of the list
  Range left{0, 0};   // of the block before it

  KeyTiles(const SelectedLists& lists, const AttentionProblem& problem, const SelectedItem& of)
      : s(lists), p(problem), item(of), end(selected_end(lists, problem, of.queries.end - 1)) {}

  bool next(KeyTile& tile) {
    tile.columns = tile.spans = 0;
    if (s.block_size == 1) return next_keys(tile);
    while (tile.columns < kKeyBlock) {
      if (is_empty(left)) {
        if (next_ == s.count) break;
        const int64_t n = selected_block(s, p, item.list, next_++);
        if (n >= 0) left = intersect({n * s.block_size, (n + 1) * s.block_size}, {0, end});
        continue;
      }
      // Blocks are cut at even keys, which are first in pairs of keys.
      const int64_t room = kKeyBlock - tile.columns;
      const int64_t all = left.end - left.begin, count = all <= room ? all : room / 2 * 2;
      if (count == 0) break;
      tile.span[tile.spans++] = {left.begin, tile.columns, count};
      for (int64_t n = 0; n < count; ++n) tile.position[tile.columns + n] = left.begin + n;
      tile.columns += count;
      left.begin += count;
    }
    return tile.columns > 0;
  }

  // The same for lists of single keys, which are no spans.
  bool next_keys(KeyTile& tile) {
    const auto add = [&](const auto* list) {
      int64_t columns = 0;
      for (; next_ < s.count && columns < kKeyBlock; ++next_) {
        const int64_t key = list[next_];
        tile.position[columns] = key;
        columns += 0 <= key && key < end ? 1 : 0;
      }
      tile.columns = columns;
    };
    s.wide ? add(static_cast<const int64_t*>(s.indices) + item.list)
           : add(static_cast<const int32_t*>(s.indices) + item.list);
    return tile.columns > 0;
  }
};

// Which keys of a tile each query of an item sees.
struct Visibility {
  bool masked;  // some column is hidden from some query
  uint64_t words[kQueryBlock][kMaskWords];

  void set(const SelectedLists& s, const AttentionProblem& p, const SelectedItem& item,
           const KeyTile& tile) {
    const Range columns = tile.padded_columns();
    int64_t last = 0;
    for (int64_t n = 0; n < tile.columns; ++n) last = larger(last, tile.position[n] + 1);
    masked = columns.end != tile.columns || last > selected_end(s, p, item.queries.begin);
    if (!masked) return;
    for (int64_t q = item.queries.begin; q < item.queries.end; ++q) {
      uint64_t* const word = words[q - item.queries.begin];
      for (int64_t w = 0; w < kMaskWords; ++w) word[w] = 0;
      const int64_t end = selected_end(s, p, q);
      for (int64_t n = 0; n < tile.columns; ++n) {
        word[n / 64] |= uint64_t{tile.position[n] < end} << (n % 64);
      }
    }
  }
  OMNIATTN_INLINE const uint64_t* of(int64_t query) const {
    return masked ? words[query] : nullptr;
  }
};

// Multiplies a row of a tile by the factors of dropout.
template <class A>
void drop_row(const AttentionProblem& p, int64_t b, int64_t h, int64_t q, const KeyTile& tile,
              A* x) {
  if (p.dropout.threshold == 0) return;
  const A scale = static_cast<A>(p.dropout.scale);
  int64_t group = -1;  // of four keys, which share a draw
  uint64_t keep = 0;
  for (int64_t n = 0; n < tile.columns; ++n) {
    const int64_t key = tile.position[n];
    if (key / 4 != group) {
      group = key / 4;
      keep = keep_groups<1>(p.dropout, b * p.hq + h, q, group * 4);
    }
    x[n] = (keep >> (key % 4) & 1) != 0 ? x[n] * scale : A(0);
  }
}

// Copies of the keys or values of a tile, as rows of `cols`.
template <class T>
void gather_rows(const HeadView& x, const SelectedItem& item, const KeyTile& tile, int64_t cols,
                 T* to) {
  constexpr int64_t kAhead = 8;  // rows whose first lines are fetched before they are copied
  for (int64_t n = 0; n < tile.columns; ++n, to += cols) {
    if (n + kAhead < tile.columns) {
      const T* const later = row_of<T>(x, item.b, tile.position[n + kAhead], item.kv_head);
      for (int64_t c = 0; c < cols; c += 64 / static_cast<int64_t>(sizeof(T))) {
        __builtin_prefetch(later + c);
      }
    }
    __builtin_memcpy(to, row_of<T>(x, item.b, tile.position[n], item.kv_head),
                     static_cast<size_t>(cols) * sizeof(T));
  }
}

template <class T>
OMNIATTN_INLINE bool reads_in_place(const SelectedLists& s, int64_t rows) {
  return !kKeepsQueries<T> && s.gathered && rows <= kRowsInPlace;
}

// The keys of a tile where they lie: offsets from the first key and value of a head.
template <class T>
struct KeysInPlace {
  const T *k, *v;
  int64_t count = 0, at_k[kKeyBlock], at_v[kKeyBlock];

  KeysInPlace(const AttentionProblem& p, const SelectedItem& item)
      : k(row_of<T>(p.k, item.b, 0, item.kv_head)), v(row_of<T>(p.v, item.b, 0, item.kv_head)) {}
  void set(const AttentionProblem& p, const KeyTile& tile) {
    count = tile.columns;
    for (int64_t n = 0; n < count; ++n) {
      at_k[n] = tile.position[n] * p.k.stride_t;
      at_v[n] = tile.position[n] * p.v.stride_t;
    }
  }
  // s = q K^T. Fetches later keys, and their values.
  void dot(const AttentionProblem& p, const compute_t<T>* q, int64_t ldq, int64_t rows,
           compute_t<T>* s) const {
    constexpr int64_t kAhead = 8;
    const auto fetch = [](const T* row, int64_t cols) {
      for (int64_t c = 0; c < cols; c += 64 / static_cast<int64_t>(sizeof(T))) {
        __builtin_prefetch(row + c);
      }
    };
    dot_rows_at(q, ldq, rows, k, at_k, count, p.d, s, kKeyBlock, [&](int64_t first) {
      const int64_t end = smaller(first + kAhead + kKeys, count);
      for (int64_t n = first + kAhead; n < end; ++n) {
        fetch(k + at_k[n], p.d);
        if (k + at_k[n] != v + at_v[n]) fetch(v + at_v[n], p.dv);
      }
    });
  }
};

// The tile whose operands were gathered: its keys are rows 0, 1, ...
inline void number_rows(KeyTile& tile) {
  tile.spans = 1;
  tile.span[0] = {0, 0, tile.columns};
}

// x = A B^T for `rows` rows of a tile; B is packed keys as column panels.
template <class M>
void multiply_by_tile(const KeyTile& tile, const M* a, int64_t lda, int64_t rows, int64_t k,
                      const M* packed, compute_t<M>* x) {
  for (int64_t n = 0; n < tile.spans; ++n) {
    const auto [key, column, count] = tile.span[n];
    for (int64_t done = 0; done < count;) {
      // A span may begin inside a panel, of which it uses the columns that are left.
      const int64_t inside = (key + done) % kPanelCols<M>, panel = key + done - inside;
      const int64_t room = kPanelCols<M> - inside, rest = count - done;
      const int64_t cols = inside == 0 || rest < room ? rest : room;
      Panels<M> b = packed_panels(packed + panel * packed_depth<M>(k), k);
      b.data += inside * Operand<M>::kStep;
      gemm_tile<M>(a, lda, b, x + column + done, kKeyBlock, rows, cols, k, false);
      done += cols;
    }
  }
}

// sum += X Y for `rows` rows of a tile: Y has a row per key, for 16-bit operands in pairs of keys.
template <class M>
void accumulate_tile(const KeyTile& tile, const computed_t<M>* x, int64_t ldx, int64_t rows,
                     const M* y, int64_t ldy, int64_t width, compute_t<M>* sum) {
  for (int64_t n = 0; n < tile.spans; ++n) {
    const auto [key, column, count] = tile.span[n];
    for (int64_t first = 0; first < width; first += kSumColumns<M>) {
      accumulate_range(x + column, ldx, y + key * ldy + first * Operand<M>::kStep, ldy, {0, count},
                       rows, smaller(kSumColumns<M>, width - first), sum + first, ldy);
    }
  }
}

// Copies the rows (query, head) of an item, of x (B, Tq, Hq, cols).
template <class T, class M>
void pack_item_rows(const HeadView& x, const SelectedItem& item, int64_t cols, compute_t<T> factor,
                    M* to) {
  for (int64_t q = item.queries.begin; q < item.queries.end; ++q) {
    pack_rows<T>(row_of<T>(x, item.b, q, item.first_head), x.stride_h, item.heads, cols, factor,
                 to);
    to += item.heads * operand_row<M>(cols);
  }
}

// The rows (query, head) of an item, in order: f(row, query, head).
template <class F>
OMNIATTN_INLINE void for_item_rows(const SelectedItem& item, const F& f) {
  int64_t row = 0;
  for (int64_t q = item.queries.begin; q < item.queries.end; ++q) {
    for (int64_t h = item.first_head; h < item.first_head + item.heads; ++h) f(row++, q, h);
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
