// The lightning indexer, see indexer.h. Products of a few queries with a tile of keys stay in L1;
// their sums over heads are added to the candidates of each query.
#include "kernels/indexer/indexer_list.h"
#include "kernels/indexer/indexer_tile.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "semantics/block_schedule.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class T>
void pack_tile(const IndexerParams& p, int64_t n) {
  using A = compute_t<T>;
  using M = operand_t<T>;
  const int64_t b = n / indexer_tiles(p);
  const Range keys = block(n % indexer_tiles(p), kIndexerKeys, p.tk);
  A* const to = static_cast<A*>(p.workspace) + n * indexer_packed_tile(p);
  pack_bt(row_of<T>(p.k, b, keys.begin, 0), p.k.stride_t, p.d, keys.end - keys.begin,
          reinterpret_cast<M*>(to));
}

// Writes the list of a query, row n of (B, Tq).
template <class A>
void store_list(const IndexerParams& p, int64_t n, Candidates<A>& list, A* memory) {
  const int64_t kept = indexer_kept(p);
  if (list.count > kept) list.drop(kept);
  const Entries<order_t<A>> other{reinterpret_cast<order_t<A>*>(memory),
                                  reinterpret_cast<int32_t*>(memory + kept)};
  const Entries<order_t<A>> sorted = sort_entries(list.entries, other, list.count);
  int32_t* const index = p.index + n * p.count;
  for (int64_t i = 0; i < p.count; ++i) index[i] = i < list.count ? sorted.key[i] : -1;
  if (p.scores == nullptr) return;
  A* const scores = static_cast<A*>(p.scores) + n * p.count;
  for (int64_t i = 0; i < p.count; ++i) {
    scores[i] = i < list.count ? score_of_order(sorted.order[i]) : negative_infinity<A>();
  }
}

// Candidates that a split has found for row n of (B, Tq).
template <class A>
struct Part {
  Entries<order_t<A>> entries;
  int32_t* count;
  Part(const IndexerParams& p, int64_t n, int64_t split) {
    A* const first = static_cast<A*>(p.parts) + (n * p.splits + split) * indexer_part(p);
    const int64_t capacity = indexer_part_capacity(p);
    entries = {reinterpret_cast<order_t<A>*>(first), reinterpret_cast<int32_t*>(first + capacity)};
    count = reinterpret_cast<int32_t*>(first + 2 * capacity);
  }
};

template <class A>
void store_part(const IndexerParams& p, int64_t n, int64_t split, Candidates<A>& list) {
  if (list.count > indexer_kept(p)) list.drop(indexer_kept(p));
  const Part<A> part(p, n, split);
  for (int64_t i = 0; i < list.count; ++i) part.entries.move(i, list.entries, i);
  *part.count = static_cast<int32_t>(list.count);
}

// Tiles of split n of the keys before `end`, in walking order.
struct IndexerWalk {
  int64_t tiles, next, last;
  bool backwards;
  int64_t end;

  IndexerWalk(const IndexerParams& p, int64_t keys, int64_t n)
      : tiles(ceil_div(keys, kIndexerKeys)),
        next(tiles * n / p.splits),
        last(tiles * (n + 1) / p.splits),
        backwards(p.recent),
        end(keys) {}
  bool step(Range& tile) {
    if (next == last) return false;
    tile = block(backwards ? tiles - 1 - next : next, kIndexerKeys, end);
    ++next;
    return true;
  }
};

template <class T>
void add_tile(const IndexerRows<T>& rows, Range tile, Candidates<compute_t<T>>* lists) {
  using A = compute_t<T>;
  const IndexerParams& p = rows.p;
  const bool in_place = rows.multiply_in_place(tile);
  const auto columns = in_place ? Panels<operand_t<T>>{} : rows.panels(tile);
  const uint8_t* const real = p.real != nullptr ? p.real + rows.b * p.real_stride : nullptr;
  const int64_t capacity = indexer_capacity(p), group = indexer_group(p);
  alignas(64) A s[kIndexerKeys];
  for (int64_t first = rows.queries.begin; first < rows.queries.end; first += group) {
    const int64_t count = smaller(group, rows.queries.end - first);
    if (indexer_end(p, first + count - 1) <= tile.begin) continue;
    if (!in_place) rows.multiply(first, count, columns, tile.end - tile.begin);
    for (int64_t n = 0; n < count; ++n) {
      const int64_t t = first + n, end = smaller(tile.end, indexer_end(p, t));
      if (end <= tile.begin) continue;
      rows.scores(t, n, s);
      Candidates<A>& list = lists[t - rows.queries.begin];
      list.add(s, real, tile.begin, end - tile.begin, p.recent);
      if (list.count + kIndexerKeys > capacity) list.thin(indexer_kept(p));
    }
  }
}

template <class T>
void choose_item(const IndexerParams& p, void* scratch, int64_t item) {
  using A = compute_t<T>;
  // Later queries see more keys, so they come first.
  const int64_t per_block = p.batch * p.splits, of_block = item % per_block;
  const int64_t blocks = indexer_blocks(p), split = of_block % p.splits;
  const int64_t b = of_block / p.splits;
  const Range queries = block(blocks - 1 - item / per_block, indexer_queries(p), p.tq);

  Arena<A> arena{static_cast<A*>(scratch), indexer_scratch(p)};
  const IndexerRows<T> rows(p, b, queries, arena);
  Candidates<A> lists[kIndexerQueries];
  const int64_t capacity = indexer_capacity(p), count = queries.end - queries.begin;
  for (int64_t n = 0; n < count; ++n) lists[n].start(arena.take(2 * capacity), capacity);
  A* const memory = arena.take(2 * indexer_kept(p));

  Range tile;
  for (IndexerWalk walk(p, indexer_end(p, queries.end - 1), split); walk.step(tile);) {
    add_tile(rows, tile, lists);
  }
  for (int64_t n = 0; n < count; ++n) {
    const int64_t row = b * p.tq + queries.begin + n;
    if (p.parts != nullptr) {
      store_part(p, row, split, lists[n]);
    } else {
      store_list(p, row, lists[n], memory);
    }
  }
}

template <class A>
void merge_row(const IndexerParams& p, void* scratch, int64_t row) {
  Arena<A> arena{static_cast<A*>(scratch), indexer_merge_scratch(p)};
  const int64_t capacity = p.splits * indexer_part_capacity(p);
  Candidates<A> list;
  list.start(arena.take(2 * capacity), capacity);
  for (int64_t split = 0; split < p.splits; ++split) {
    const Part<A> part(p, row, split);
    for (int64_t i = 0; i < *part.count; ++i) list.entries.move(list.count++, part.entries, i);
  }
  store_list(p, row, list, arena.take(2 * indexer_kept(p)));
}

void pack(const IndexerParams& p, void*, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.batch * indexer_tiles(p));
  dispatch(p.dtype, [&](auto type) {
    for (int64_t n = begin; n < end; ++n) pack_tile<decltype(type)>(p, n);
  });
}
void choose(const IndexerParams& p, void* scratch, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.batch * indexer_blocks(p) * p.splits);
  OMNIATTN_ASSERT_HAS(scratch, indexer_scratch(p));
  const TileScope scope;
  dispatch(p.dtype, [&](auto type) {
    for (int64_t n = begin; n < end; ++n) choose_item<decltype(type)>(p, scratch, n);
  });
}
void merge(const IndexerParams& p, void* scratch, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.batch * p.tq);
  OMNIATTN_ASSERT_HAS(scratch, indexer_merge_scratch(p));
  dispatch(p.dtype, [&](auto type) {
    for (int64_t n = begin; n < end; ++n) merge_row<compute_t<decltype(type)>>(p, scratch, n);
  });
}

}  // namespace

extern const IndexerKernels indexer_kernels_table = {pack, choose, merge};

}  // namespace omniattn::OMNIATTN_ISA
