// Neighborhoods in grids of tokens (NATTEN), one mask rule per axis; see mask_rules.h.
#pragma once

#include <cstdint>

#include "semantics/arith.h"
#include "semantics/macros.h"
#include "semantics/mask_ranges.h"
#include "semantics/mask_rule.h"
#include "semantics/seqlen.h"

namespace omniattn::mask_rules {

// One axis of a grid of tokens; position p has the coordinate floor(p / inner) mod length. A query
// sees the keys whose coordinates differ from its own by multiples of the dilation and lie in a
// window of `kernel` such coordinates, centred on it and shifted inwards at the ends of the axis;
// if causal, the window ends at the query. A group of `stride` queries shares the window of its
// middle query; if causal, the start of the window of its last query.
//
// a = inner + length 2^20, b = kernel + dilation 2^13 + stride 2^26 + causal 2^39
struct Grid {
  static constexpr SideTensor kSide = SideTensor::none;

  struct Axis {
    int64_t inner, length, kernel, dilation, stride;
    bool causal;

    OMNIATTN_FN Axis(int64_t a, int64_t b)
        : inner(low(a, 20)),
          length(a >> 20),
          kernel(low(b, 13)),
          dilation(low(b >> 13, 13)),
          stride(low(b >> 26, 13)),
          causal((b >> 39) != 0) {}
    OMNIATTN_FN static int64_t low(int64_t n, int bits) { return n & ((int64_t{1} << bits) - 1); }
    OMNIATTN_FN int64_t period() const { return inner * length; }

    // A range that holds the coordinates of these positions.
    OMNIATTN_FN Range coordinates(Range p) const {
      const int64_t first = floor_to(p.begin, inner) / inner;
      const int64_t last = floor_to(p.end - 1, inner) / inner;
      const int64_t start = floor_to(first, length);
      if (last >= start + length) return {0, length};
      return {first - start, last - start + 1};
    }
    // Range from the first to the last coordinate that the queries at y see.
    OMNIATTN_FN Range window(int64_t y) const {
      const int64_t rest = y % dilation, place = y / dilation, group = place / stride * stride;
      const int64_t count = ceil_div(length - rest, dilation);  // coordinates with this remainder
      const int64_t leads = group + (causal ? stride - 1 : stride / 2);
      const int64_t leader = leads < count ? leads : count - 1;
      const int64_t most = causal ? count : count - kernel;
      const int64_t wanted = leader - (causal ? kernel - 1 : kernel / 2);
      const int64_t first = wanted < 0 ? 0 : wanted < most ? wanted : most;
      const int64_t last = causal ? place : first + kernel - 1;
      return {rest + first * dilation, rest + last * dilation + 1};
    }
    // Reach of an unshifted window before and after its query.
    OMNIATTN_FN int64_t before() const {
      return dilation * (causal ? kernel - 1 : kernel / 2 + stride - 1 - stride / 2);
    }
    OMNIATTN_FN int64_t after() const {
      return causal ? 0 : dilation * ((kernel - 1) / 2 + stride / 2);
    }
    // Bounds of the coordinates that some query at y sees, and of the queries that see some
    // coordinate of z. A shifted window lies within `size` of its end of the axis.
    OMNIATTN_FN Range keys(Range y) const {
      const int64_t size = causal ? 0 : kernel * dilation;
      const int64_t begin = y.begin - before(), end = y.end + after();
      const int64_t at_end = causal ? length : length - size;
      const int64_t lowest = begin < at_end ? begin : at_end, highest = end > size ? end : size;
      return intersect({lowest, highest}, {0, length});
    }
    OMNIATTN_FN Range queries(Range z) const {
      const int64_t size = causal ? 0 : kernel * dilation;
      const bool shifted = !causal && z.end > length - size;
      const Range y{z.begin < size ? 0 : z.begin - after(), shifted ? length : z.end + before()};
      return intersect(y, {0, length});
    }
    // First position from p on with a wanted coordinate; end of the last one before `end`.
    OMNIATTN_FN int64_t next(Range wanted, int64_t p) const {
      const int64_t start = floor_to(p, period()), y = (p - start) / inner;
      if (y < wanted.begin) return start + wanted.begin * inner;
      return y < wanted.end ? p : start + period() + wanted.begin * inner;
    }
    OMNIATTN_FN int64_t last(Range wanted, int64_t end) const {
      const int64_t start = floor_to(end - 1, period()), y = (end - 1 - start) / inner;
      if (y >= wanted.end) return start + wanted.end * inner;
      return y >= wanted.begin ? end : start - period() + wanted.end * inner;
    }
    OMNIATTN_FN Range within(Range wanted, Range p) const {
      return {next(wanted, p.begin), last(wanted, p.end)};
    }
  };

  OMNIATTN_FN static Axis axis(const Place& x) { return Axis(x.rule.a, x.rule.b); }
  OMNIATTN_FN static bool parameters_fit(int64_t a, int64_t b) {
    if (a < 0 || b < 0) return false;
    const Axis n(a, b);
    return n.inner >= 1 && n.length >= 1 && n.kernel >= 1 && n.dilation >= 1 && n.stride >= 1 &&
           n.stride <= n.kernel && n.kernel * n.dilation <= n.length;
  }
  OMNIATTN_FN static Range wanted_keys(const Place& x, Range q) {
    return axis(x).keys(axis(x).coordinates(x.positions(q)));
  }
  OMNIATTN_FN static Range wanted_queries(const Place& x, Range k) {
    return axis(x).queries(axis(x).coordinates(k));
  }
  OMNIATTN_FN static Range keys_any(const Place& x, Range q) {
    return axis(x).within(wanted_keys(x, q), {0, x.tk});
  }
  OMNIATTN_FN static Range queries_any(const Place& x, Range k) {
    return x.queries(axis(x).within(wanted_queries(x, k), x.positions({0, x.tq})));
  }
  OMNIATTN_FN static int64_t next_key(const Place& x, Range q, int64_t key) {
    return axis(x).next(wanted_keys(x, q), key);
  }
  OMNIATTN_FN static int64_t next_query(const Place& x, Range k, int64_t query) {
    const int64_t i = axis(x).next(wanted_queries(x, k), x.position(query));
    return query + i - x.position(query);
  }
  OMNIATTN_FN static Range keys_in(const Place& x, Range q, Range k) {
    return intersect(axis(x).within(wanted_keys(x, q), k), k);
  }
  OMNIATTN_FN static bool all(const Place& x, Range q, Range k) {
    const Axis n = axis(x);
    const Range y = n.coordinates(x.positions(q));
    return n.dilation == 1 &&
           contains({n.window(y.end - 1).begin, n.window(y.begin).end}, n.coordinates(k));
  }
  OMNIATTN_FN static uint64_t bits(const Place& x, int64_t q, int64_t key) {
    const Axis n = axis(x);
    const int64_t i = x.position(q);
    const Range seen = n.window(n.coordinates({i, i + 1}).begin);
    uint64_t found = 0;
    for (int64_t start = floor_to(key, n.period()); start < key + 64; start += n.period()) {
      if (n.dilation == 1) {
        found |= range_bits({start + seen.begin * n.inner, start + seen.end * n.inner}, key);
        continue;
      }
      const int64_t done = (key - start) / n.inner - seen.begin;
      int64_t y = seen.begin + (done > 0 ? done / n.dilation * n.dilation : 0);
      for (; y < seen.end && start + y * n.inner < key + 64; y += n.dilation) {
        found |= range_bits({start + y * n.inner, start + (y + 1) * n.inner}, key);
      }
    }
    return found;
  }
};

}  // namespace omniattn::mask_rules
