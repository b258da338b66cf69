// Part of each tile that the mask leaves visible, and visibility of a few keys of one query.
//
// The rules of a mask are long and the same for every dtype, so they are compiled once per ISA, in
// attention_plan_cpu.cpp: a copy in each kernel was a tenth of the library.
#pragma once

#include "kernels/attention/attention_sizes_cpu.h"
#include "runtime/gemm_tile.h"

namespace omniattn::OMNIATTN_ISA {

constexpr int64_t kMaskWords = kKeyBlock / 64;  // words of visibility of one query and key block

// The queries of a group share one clipped range of keys, so that a causal tile costs little more
// than the area of its triangle.
constexpr int64_t kRowGroup = kOnTiles ? kTileRows : 24;
constexpr int64_t kRowGroups = kQueryBlock / kRowGroup;
// Columns begin at a multiple of this. Weights of 16 bits are summed two vectors at a time: the
// order of a row's sum must not depend on the other rows of its group.
constexpr int64_t kFirstColumn = has_all_kernels(kIsa) ? 16 : 32;

// Work of one tile (a query block x a key block). Ranges of keys are relative to the block.
struct TilePlan {
  Range queries, keys;        // positions; keys.end is the end of the block or Tk
  bool masked[kRowGroups];    // a key of the group's columns is hidden from one of its rows
  Range seen[kRowGroups];     // contains every key visible to the group; may be empty
  Range columns[kRowGroups];  // seen, rounded to multiples of kFirstColumn and 16
  uint64_t visible[kQueryBlock][kMaskWords];  // for rows in masked groups

  OMNIATTN_INLINE int64_t rows() const { return queries.end - queries.begin; }
  OMNIATTN_INLINE int64_t groups() const { return ceil_div(rows(), kRowGroup); }
  OMNIATTN_INLINE bool is_full() const {
    for (int64_t g = 0; g < groups(); ++g) {
      if (columns[g].begin != 0 || columns[g].end != kKeyBlock) return false;
    }
    return true;
  }
  OMNIATTN_INLINE Range group_rows(int64_t g) const {
    return intersect({g * kRowGroup, (g + 1) * kRowGroup}, {0, rows()});
  }
};

// One group of a plan, as a plan of its own.
OMNIATTN_INLINE TilePlan group_of(const TilePlan& plan, int64_t g) {
  const Range rows = plan.group_rows(g);
  TilePlan part;
  part.queries = {plan.queries.begin + rows.begin, plan.queries.begin + rows.end};
  part.keys = plan.keys;
  part.masked[0] = plan.masked[g];
  part.seen[0] = plan.seen[g];
  part.columns[0] = plan.columns[g];
  if (plan.masked[g]) {
    __builtin_memcpy(part.visible, plan.visible[rows.begin],
                     static_cast<size_t>(rows.end - rows.begin) * sizeof(plan.visible[0]));
  }
  return part;
}

// Calls f for each group as a plan of its own, or for the whole plan. By groups, the rows of a
// group stay in L1 from the first product to the last.
template <bool kByGroups, class F>
OMNIATTN_INLINE void for_parts(const TilePlan& plan, const F& f) {
  if constexpr (kByGroups) {
    for (int64_t g = 0; g < plan.groups(); ++g) {
      f(group_of(plan, g));
    }
  } else {
    f(plan);
  }
}

// The tiles with a visible pair, in order: of a block of queries (along the keys) or of a
// block of keys (along the queries).
template <Along kAlong>
struct Tiles {
  const AttentionProblem& p;
  Cursor<kAlong> blocks;

  Tiles(const AttentionProblem& problem, int64_t b, int64_t h, Range others);
  // Plans the next tile; false at the end.
  bool next(TilePlan& plan);
  // Plans the last tile that is left; false if none is.
  bool last(TilePlan& plan);
};
extern template struct Tiles<Along::keys>;
extern template struct Tiles<Along::queries>;

// Out-of-line all_visible, visible_bits and classify of semantics/mask.h.
bool sees_all(const AttentionMask& mask, int64_t b, int64_t h, Range q, Range k);
uint64_t seen_bits(const AttentionMask& mask, int64_t b, int64_t h, int64_t q, int64_t key);
TileClass tile_class(const AttentionMask& mask, int64_t b, int64_t h, Range q, Range k);

}  // namespace omniattn::OMNIATTN_ISA
