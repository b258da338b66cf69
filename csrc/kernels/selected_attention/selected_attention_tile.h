// Tiles of selected keys (see selected_attention.h): their keys and
// rows, visibility, and operands.
#pragma once

#include "kernels/attention/attention_tile.h"
#include "kernels/attention/few_rows.h"
#include "kernels/selected_attention/selected_attention.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// At most kKeyBlock keys, in columns 0, 1, ...
struct KeyTile {
  struct Span {
    int64_t key, column, count;  // keys from `key` on are in the columns from `column` on
  };
  int64_t columns, spans;
  Span span[kKeyBlock];
  int64_t position[kKeyBlock];  // position of the key in each column

  OMNIATTN_INLINE Range padded_columns() const { return {0, round_up(columns, 16)}; }
  OMNIATTN_INLINE void clear() { columns = spans = 0; }
  OMNIATTN_INLINE void add(int64_t key, int64_t count) {
    span[spans++] = {key, columns, count};
    for (int64_t n = 0; n < count; ++n) position[columns + n] = key + n;
    columns += count;
  }
};

// Rows of an item: `count` rows from `first` on, or the listed rows.
struct RowTile {
  int64_t first = 0, count = 0;
  bool consecutive = true;
  int64_t listed[kQueryBlock];

  RowTile() = default;
  explicit RowTile(int64_t rows) : count(rows) {}

  OMNIATTN_INLINE int64_t operator[](int64_t n) const {
    return consecutive ? first + n : listed[n];
  }
  OMNIATTN_INLINE void add(int64_t row) {
    if (count == 0) first = row;
    consecutive = row == first + count && (consecutive || count == 0);
    listed[count++] = row;
  }
};

OMNIATTN_INLINE int64_t item_rows(const SelectedItem& item) {
  return (item.queries.end - item.queries.begin) * item.heads;
}

// Walks the keys of an item's list that one of its queries may see, in list order.
struct KeyTiles {
  const SelectedLists& s;
  const AttentionProblem& p;
  const SelectedItem& item;
  int64_t end;        // end of the keys
  int64_t next_ = 0;  // entry of the list
  Range left{0, 0};   // remainder of the current block

  KeyTiles(const SelectedLists& lists, const AttentionProblem& problem, const SelectedItem& of)
      : s(lists), p(problem), item(of), end(selected_end(lists, problem, of.queries.end - 1)) {}

  bool next(KeyTile& tile) {
    tile.clear();
    if (s.block_size == 1) return next_keys(tile);
    while (tile.columns < kKeyBlock) {
      if (is_empty(left)) {
        if (next_ == s.count) break;
        const int64_t n = selected_block(s, p, item.list, next_++);
        if (n >= 0) left = intersect({n * s.block_size, (n + 1) * s.block_size}, {0, end});
        continue;
      }
      // Blocks are cut at even keys, which come first in pairs of keys.
      const int64_t room = kKeyBlock - tile.columns;
      const int64_t all = left.end - left.begin, count = all <= room ? all : room / 2 * 2;
      if (count == 0) break;
      tile.add(left.begin, count);
      left.begin += count;
    }
    return tile.columns > 0;
  }

  // next for lists of single keys, which form no spans.
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

// Lists of an item that has several lists, sorted by block: a counting sort.
struct ListsOfBlocks {
  struct List {
    Range queries, heads;  // within the item
  };
  const SelectedLists& s;
  const AttentionProblem& p;
  const SelectedItem& item;
  int64_t blocks, heads, groups;  // heads that share a list, and number of such groups
  int32_t *ends, *lists;          // ends: end of each block's lists, which are in order

  // memory: tile_key_elements.
  ListsOfBlocks(const SelectedLists& selected, const AttentionProblem& problem,
                const SelectedItem& of, int32_t* memory)
      : s(selected),
        p(problem),
        item(of),
        blocks(ceil_div(problem.tk, selected.block_size)),
        heads(list_heads(selected, problem)),
        groups(of.heads / heads),
        ends(memory),
        lists(memory + blocks + 1) {
    for (int64_t n = 0; n <= blocks; ++n) ends[n] = 0;
    for_entries([&](int64_t block, int64_t) { ++ends[block + 1]; });
    for (int64_t n = 1; n <= blocks; ++n) ends[n] += ends[n - 1];
    for_entries(
        [&](int64_t block, int64_t list) { lists[ends[block]++] = static_cast<int32_t>(list); });
  }
  // Lists of a block, as indices into `lists`.
  Range of(int64_t block) const { return {block == 0 ? 0 : ends[block - 1], ends[block]}; }
  List operator[](int64_t list) const {
    const int64_t query = (item.queries.begin / s.query_block + list / groups) * s.query_block;
    const int64_t head = item.first_head + list % groups * heads;
    return {intersect({query, query + s.query_block}, item.queries), {head, head + heads}};
  }

 private:
  // Calls f(block, list) for the blocks that a query of a list may see.
  template <class F>
  void for_entries(const F& f) {
    const int64_t count =
        ceil_div(item.queries.end, s.query_block) - item.queries.begin / s.query_block;
    for (int64_t list = 0; list < count * groups; ++list) {
      const List at = (*this)[list];
      const int64_t end = selected_end(s, p, at.queries.end - 1);
      const int64_t first = list_of(s, p, item.b, at.heads.begin, at.queries.begin);
      for (int64_t n = 0; n < s.count; ++n) {
        const int64_t block = selected_block(s, p, first, n);
        if (block >= 0 && block * s.block_size < end) f(block, list);
      }
    }
  }
};

// Tiles of an item of several lists: calls visit(keys, rows). Rows are multiplied by the keys that
// all of them see. The few keys that only some rows see are multiplied by the rows of their list
// alone: keys hidden from all queries of a list are not read for it.
template <class F>
struct SharedTiles {
  static constexpr int64_t kFew = 16;
  const SelectedLists& s;
  const AttentionProblem& p;
  const SelectedItem& item;
  const F& visit;
  const ListsOfBlocks lists;
  const int64_t capacity;
  KeyTile keys;
  RowTile rows;

  // memory: tile_key_elements.
  SharedTiles(const SelectedLists& selected, const AttentionProblem& problem,
              const SelectedItem& of, int32_t* memory, const F& f)
      : s(selected),
        p(problem),
        item(of),
        visit(f),
        lists(selected, problem, of, memory),
        capacity(selected_tile_rows(selected, problem)) {}

  void walk() {
    for (int64_t n = 0; n < lists.blocks; ++n) {
      walk_block({n * s.block_size, smaller((n + 1) * s.block_size, p.tk)}, lists.of(n));
    }
  }

 private:
  void walk_block(Range block, Range entries) {
    Range cut{entries.end, entries.begin};  // contains the lists whose first query does not see all
    for (int64_t n = entries.begin; n < entries.end; ++n) {
      const auto list = lists[lists.lists[n]];
      if (selected_end(s, p, list.queries.begin) < block.end) {
        if (selected_end(s, p, list.queries.end - 1) > block.begin)
          cut = {smaller(cut.begin, n), n + 1};
      } else {
        add(list, block);
      }
    }
    meet(block);
    const int64_t size = block.end - block.begin;
    if (is_empty(cut)) return;
    if (size <= kFew) return walk_alone(block, cut);
    const int64_t part = size > kKeyBlock ? kKeyBlock : kFew;
    for (int64_t key = block.begin; key < block.end; key += part) {
      walk_block({key, smaller(key + part, block.end)}, cut);
    }
  }
  // Walks lists one by one, except that lists of the same queries are walked together.
  void walk_alone(Range block, Range entries) {
    Range seen{0, 0};
    int64_t query = -1;
    for (int64_t n = entries.begin; n < entries.end; ++n) {
      const auto list = lists[lists.lists[n]];
      if (list.queries.begin != query) meet(seen);
      query = list.queries.begin;
      seen = {block.begin, smaller(block.end, selected_end(s, p, list.queries.end - 1))};
      add(list, seen);
    }
    meet(seen);
  }
  void add(const ListsOfBlocks::List& list, Range seen) {
    for (int64_t q = list.queries.begin; q < list.queries.end; ++q) {
      for (int64_t h = list.heads.begin; h < list.heads.end; ++h) {
        if (rows.count == capacity) meet(seen);
        rows.add((q - item.queries.begin) * item.heads + h - item.first_head);
      }
    }
  }
  void meet(Range seen) {
    for (int64_t key = seen.begin; key < seen.end && rows.count > 0; key += kKeyBlock) {
      keys.clear();
      keys.add(key, smaller(kKeyBlock, seen.end - key));
      visit(keys, rows);
    }
    rows.count = 0;
  }
};

// Keys of a tile that each query of an item sees.
struct Visibility {
  const SelectedLists& s;
  const AttentionProblem& p;
  const KeyTile& tile;
  bool masked;  // some column is hidden from some query
  int64_t query = -1;
  uint64_t words[kMaskWords];

  // `first` is the first query of the tile.
  Visibility(const SelectedLists& lists, const AttentionProblem& problem, const KeyTile& keys,
             int64_t first)
      : s(lists), p(problem), tile(keys) {
    int64_t last = 0;
    for (int64_t n = 0; n < tile.columns; ++n) last = larger(last, tile.position[n] + 1);
    masked = tile.padded_columns().end != tile.columns || last > selected_end(s, p, first);
  }
  OMNIATTN_INLINE const uint64_t* of(int64_t of_query) {
    if (!masked) return nullptr;
    if (query != of_query) {
      for (int64_t w = 0; w < kMaskWords; ++w) words[w] = 0;
      const int64_t end = selected_end(s, p, of_query);
      for (int64_t n = 0; n < tile.columns; ++n) {
        words[n / 64] |= uint64_t{tile.position[n] < end} << (n % 64);
      }
      query = of_query;
    }
    return words;
  }
};

// Multiplies a row of a tile by the dropout factors.
template <class A>
void drop_row(const AttentionProblem& p, int64_t b, int64_t h, int64_t q, const KeyTile& tile,
              A* x) {
  if (p.dropout.threshold == 0) return;
  const A scale = static_cast<A>(p.dropout.scale);
  int64_t group = -1;  // group of four keys, which share a draw
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

// Copies the keys or values of a tile to rows of `cols` elements.
template <class T>
void gather_rows(const HeadView& x, const SelectedItem& item, const KeyTile& tile, int64_t cols,
                 T* to) {
  constexpr int64_t kAhead = 8;  // rows whose first lines are prefetched before they are copied
  if (cols == 0) return;         // the rows may be null
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

// Keys of a tile in place: offsets from the first key and value of a head.
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
  // s = q K^T. Prefetches later keys and their values.
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

// Numbers the keys of a tile whose operands were gathered: they are rows 0, 1, ...
inline void number_rows(KeyTile& tile) {
  tile.spans = 1;
  tile.span[0] = {0, 0, tile.columns};
}

// x = A B^T for `rows` rows of a tile; B holds packed keys as column panels.
template <class M>
void multiply_by_tile(const KeyTile& tile, const M* a, int64_t lda, int64_t rows, int64_t k,
                      const M* packed, compute_t<M>* x) {
  for (int64_t n = 0; n < tile.spans; ++n) {
    const auto [key, column, count] = tile.span[n];
    for (int64_t done = 0; done < count;) {
      // A span may begin inside a panel, of which it uses the remaining columns.
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

// sum += X Y for `rows` rows of a tile. Y has a row per key; 16-bit operands have pairs of keys.
template <class M>
void accumulate_tile(const KeyTile& tile, const computed_t<M>* x, int64_t ldx, int64_t rows,
                     const M* y, int64_t ldy, int64_t width, compute_t<M>* sum) {
  for (int64_t n = 0; n < tile.spans; ++n) {
    const auto [key, column, count] = tile.span[n];
    for (int64_t first = 0; first < width; first += kSumColumns<M>) {
      accumulate_range(x + column, ldx, y + key * ldy + first * Operand<M>::kStep, ldy, {0, count},
                       rows, smaller(kSumColumns<M>, width - first), false, sum + first, ldy);
    }
  }
}

// Operands of the rows of a tile, with row stride ld: in place, or copies of `cols` elements, a
// number that padded_row makes a multiple of 16.
template <class M>
M* rows_of_tile(const RowTile& tile, M* from, int64_t ld, int64_t cols, M* copies) {
  if (tile.consecutive) return from + tile.first * ld;
  for (int64_t n = 0; n < tile.count; ++n) {
    const M* const row = from + tile[n] * ld;
    for (int64_t c = 0; c < cols; c += 16) {
      __builtin_memcpy(copies + n * ld + c, row + c, 16 * sizeof(M));
    }
  }
  return copies;
}

// Calls f(sums) to add to the rows of a tile: in place, or in zeros that are then added to them.
template <class A, class F>
void add_to_rows(const RowTile& tile, A* to, int64_t width, A* zeros, const F& f) {
  if (tile.consecutive) return f(to + tile.first * width);
  fill_zero(zeros, tile.count * width);
  f(zeros);
  for (int64_t n = 0; n < tile.count; ++n) {
    A *const row = to + tile[n] * width, *const sum = zeros + n * width;
    for_columns<A>({0, width}, [&](int64_t c) { store(row + c, load(row + c) + load(sum + c)); });
  }
}

// Copies the rows (query, head) of an item from x (B, Tq, Hq, cols).
template <class T, class M>
void pack_item_rows(const HeadView& x, const SelectedItem& item, int64_t cols, compute_t<T> factor,
                    M* to) {
  for (int64_t q = item.queries.begin; q < item.queries.end; ++q) {
    pack_rows<T>(row_of<T>(x, item.b, q, item.first_head), x.stride_h, item.heads, cols, factor,
                 to);
    to += item.heads * operand_row<M>(cols);
  }
}

// Calls f(row, query, head) for the rows of an item, in order.
template <class F>
OMNIATTN_INLINE void for_item_rows(const SelectedItem& item, const F& f) {
  int64_t row = 0;
  for (int64_t q = item.queries.begin; q < item.queries.end; ++q) {
    for (int64_t h = item.first_head; h < item.first_head + item.heads; ++h) f(row++, q, h);
  }
}

// Calls f(number in the tile, row, query, head) for the rows of a tile.
template <class F>
OMNIATTN_INLINE void for_tile_rows(const SelectedItem& item, const RowTile& tile, const F& f) {
  const auto heads = static_cast<uint32_t>(item.heads);
  for (int64_t n = 0; n < tile.count; ++n) {
    const auto row = static_cast<uint32_t>(tile[n]);
    f(n, row, item.queries.begin + row / heads, item.first_head + row % heads);
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
