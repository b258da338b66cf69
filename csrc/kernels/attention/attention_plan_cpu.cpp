// Visibility of keys in a tile, see attention_plan.h.
#include "kernels/attention/attention_plan.h"

#include "runtime/assert.h"
#include "semantics/block_schedule.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

[[gnu::noinline]] Range seen_keys(const AttentionMask& mask, int64_t b, int64_t h, Range q,
                                  Range k) {
  return visible_keys_in(mask, b, h, q, k);
}

}  // namespace

bool sees_all(const AttentionMask& mask, int64_t b, int64_t h, Range q, Range k) {
  return all_visible(mask, b, h, q, k);
}
uint64_t seen_bits(const AttentionMask& mask, int64_t b, int64_t h, int64_t q, int64_t key) {
  return visible_bits(mask, b, h, q, key);
}
TileClass tile_class(const AttentionMask& mask, int64_t b, int64_t h, Range q, Range k) {
  if (is_empty(seen_keys(mask, b, h, q, k))) return TileClass::skip;
  return sees_all(mask, b, h, q, k) ? TileClass::full : TileClass::partial;
}

namespace {

// Plans a tile; returns false if no key of it is visible to any of its queries.
bool plan_tile(const AttentionProblem& p, int64_t b, int64_t h, Range queries, Range keys,
               TilePlan& plan) {
  OMNIATTN_ASSERT(contains({0, p.tq}, queries) && contains({0, p.tk}, keys));
  OMNIATTN_ASSERT(0 <= b && b < p.batch && 0 <= h && h < p.hq);
  plan.queries = queries;
  plan.keys = keys;
  const Range tile = seen_keys(p.mask, b, h, queries, keys);
  if (is_empty(tile)) return false;
  bool any = false;
  for (int64_t g = 0; g < plan.groups(); ++g) {
    const Range rows = plan.group_rows(g);
    const Range q = {queries.begin + rows.begin, queries.begin + rows.end};
    const Range seen = seen_keys(p.mask, b, h, q, tile);
    plan.seen[g] = plan.columns[g] = {0, 0};
    plan.masked[g] = false;
    if (is_empty(seen)) continue;
    plan.seen[g] = {seen.begin - keys.begin, seen.end - keys.begin};
    plan.columns[g] = {plan.seen[g].begin / kFirstColumn * kFirstColumn,
                       round_up(plan.seen[g].end, 16)};
    plan.masked[g] = !sees_all(
        p.mask, b, h, q, {keys.begin + plan.columns[g].begin, keys.begin + plan.columns[g].end});
    any = any || !plan.masked[g];
    if (!plan.masked[g]) continue;
    uint64_t some = 0;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      for (int64_t w = 0; w < kMaskWords; ++w) {
        plan.visible[r][w] = seen_bits(p.mask, b, h, queries.begin + r, keys.begin + 64 * w);
        some |= plan.visible[r][w];
      }
    }
    if (some == 0) plan.seen[g] = plan.columns[g] = {0, 0};
    any = any || some != 0;
  }
  return any;
}

}  // namespace

template <Along kAlong>
Tiles<kAlong>::Tiles(const AttentionProblem& problem, int64_t b, int64_t h, Range others)
    : p(problem),
      blocks(problem.mask, b, h, others, kAlong == Along::keys ? kKeyBlock : kQueryBlock) {}

template <Along kAlong>
bool Tiles<kAlong>::next(TilePlan& plan) {
  for (int64_t n; (n = blocks.next()) >= 0;) {
    const bool planned =
        kAlong == Along::keys
            ? plan_tile(p, blocks.b, blocks.h, blocks.others, block(n, kKeyBlock, p.tk), plan)
            : plan_tile(p, blocks.b, blocks.h, block(n, kQueryBlock, p.tq), blocks.others, plan);
    if (planned) return true;
  }
  return false;
}

template <Along kAlong>
bool Tiles<kAlong>::last(TilePlan& plan) {
  bool planned = false;
  for (Range left = blocks.left; !planned && !is_empty(left); blocks.left = left) {
    blocks.left = {--left.end, left.end + 1};
    planned = next(plan);
  }
  return planned;
}

template struct Tiles<Along::keys>;
template struct Tiles<Along::queries>;

}  // namespace omniattn::OMNIATTN_ISA
