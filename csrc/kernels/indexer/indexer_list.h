// Candidates of a query of the indexer (see indexer.h), in the order in which keys are walked. The
// best of them are found by their scores as integers, digit by digit.
#pragma once

#include "kernels/indexer/indexer.h"
#include "runtime/vec.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;

template <class Order>
OMNIATTN_INLINE int digit_of(Order x, int shift) {
  return static_cast<int>(x >> shift & (kDigits - 1));
}

// The n-th largest of x, n in [1, count]; `equal`: how many equal to it are among the n largest.
template <class Order>
Order nth_largest(const Order* x, int64_t count, int64_t n, int64_t& equal) {
  constexpr int kBits = 8 * static_cast<int>(sizeof(Order));
  Order found = 0, known = 0;
  for (int shift = kBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
    // Most scores share their first digit: two alternating counters do not wait for each other. The
    // last counter is for scores that differ in an earlier digit, so no branch depends on x.
    int32_t counts[2][kDigits + 1] = {};
    for (int64_t i = 0; i < count; ++i) {
      ++counts[i & 1][(x[i] & known) == found ? digit_of(x[i], shift) : kDigits];
    }
    int digit = kDigits - 1;
    for (; counts[0][digit] + counts[1][digit] < n; --digit) {
      n -= counts[0][digit] + counts[1][digit];
    }
    found |= static_cast<Order>(digit) << shift;
    known |= static_cast<Order>(kDigits - 1) << shift;
  }
  equal = n;
  return found;
}

// Number of orders that are at least `bound`.
template <class A>
int64_t count_from(const order_t<A>* x, int64_t count, order_t<A> bound) {
  using Bits = typename Vec<A>::Bits;
  using Order = order_t<A>;
  constexpr Order kSign = Order{1} << (8 * sizeof(Order) - 1);  // signed numbers in the same order
  const Bits least = Bits{} + static_cast<std::make_signed_t<Order>>(bound ^ kSign);
  Bits found{};
  int64_t i = 0;
  for (; i + Vec<A>::kWidth <= count; i += Vec<A>::kWidth) {
    Bits orders;
    __builtin_memcpy(&orders, x + i, sizeof(Bits));
    found -= (orders ^ static_cast<std::make_signed_t<Order>>(kSign)) >= least;
  }
  int64_t sum = 0;
  for (int n = 0; n < Vec<A>::kWidth; ++n) sum += found[n];
  for (; i < count; ++i) sum += x[i] >= bound ? 1 : 0;
  return sum;
}

// Parallel arrays of scores and keys.
template <class Order>
struct Entries {
  Order* order;
  int32_t* key;
  OMNIATTN_INLINE void move(int64_t to, const Entries& from, int64_t i) const {
    order[to] = from.order[i];
    key[to] = from.key[i];
  }
};

// Sorts `count` entries in descending order; equal entries keep their order. Returns the array that
// holds the result: x or `other`.
template <class Order>
Entries<Order> sort_entries(Entries<Order> x, Entries<Order> other, int64_t count) {
  constexpr int kBits = 8 * static_cast<int>(sizeof(Order));
  constexpr int64_t kFew = 64;
  if (count <= kFew) {
    for (int64_t i = 1; i < count; ++i) {
      const Order order = x.order[i];
      const int32_t key = x.key[i];
      int64_t at = i;
      for (; at > 0 && x.order[at - 1] < order; --at) x.move(at, x, at - 1);
      x.order[at] = order;
      x.key[at] = key;
    }
    return x;
  }
  for (int shift = 0; shift < kBits; shift += kDigitBits) {
    int32_t place[kDigits] = {};
    for (int64_t i = 0; i < count; ++i) ++place[digit_of(x.order[i], shift)];
    int32_t before = 0;
    for (int digit = kDigits - 1; digit >= 0; --digit) {
      const int32_t here = place[digit];
      place[digit] = before;
      before += here;
    }
    for (int64_t i = 0; i < count; ++i) {
      other.move(place[digit_of(x.order[i], shift)]++, x, i);
    }
    const Entries<Order> sorted = other;
    other = x;
    x = sorted;
  }
  return x;
}

template <class A>
struct Candidates {
  using Order = order_t<A>;
  Entries<Order> entries;
  int64_t count;
  Order least;    // only orders from here on can still be chosen,
  A least_score;  // if `has_least`, only scores from here on
  bool has_least;

  OMNIATTN_INLINE void start(A* memory, int64_t capacity) {
    entries = {reinterpret_cast<Order*>(memory), reinterpret_cast<int32_t*>(memory + capacity)};
    count = 0;
    least = 0;
    has_least = false;
  }

  // Appends the selectable keys among `keys` keys from `key` on, which have scores s.
  // There must be room for all of them.
  OMNIATTN_INLINE void add(const A* s, const uint8_t* real, int64_t key, int64_t keys,
                           bool backwards) {
    constexpr int64_t kWidth = Vec<A>::kWidth;
    const int64_t vectors = ceil_div(keys, kWidth);
    const Entries<Order> to = entries;
    const Order bound = least;
    int64_t end = count;
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t first = (backwards ? vectors - 1 - v : v) * kWidth;
      if (has_least && !any(load(s + first) >= Vec<A>(least_score))) continue;
      Order orders[kWidth];  // computed at once, in vectors
      for (int64_t lane = 0; lane < kWidth; ++lane) orders[lane] = order_of_score(s[first + lane]);
      const int64_t lanes = smaller(kWidth, keys - first);
      const auto add_lane = [&](int64_t lane) OMNIATTN_LAMBDA {
        const int64_t at = key + first + lane;
        to.order[end] = orders[lane];
        to.key[end] = static_cast<int32_t>(at);
        end += orders[lane] >= bound && (real == nullptr || real[at] != 0) ? 1 : 0;
      };
      if (backwards) {
        for (int64_t lane = lanes - 1; lane >= 0; --lane) add_lane(lane);
      } else {
        for (int64_t lane = 0; lane < lanes; ++lane) add_lane(lane);
      }
    }
    count = end;
  }

  // Keeps the best `kept`, in walking order.
  void drop(int64_t kept) {
    if (count < kept || kept == 0) return;
    int64_t equal;
    const Order last = nth_largest(entries.order, count, kept, equal);
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Order order = entries.order[i];
      const bool ties = order == last && equal > 0;
      equal -= ties ? 1 : 0;
      entries.move(left, entries, i);
      left += order > last || ties ? 1 : 0;
    }
    count = left;
    raise(last + 1);  // of equal scores, earlier ones win; the largest order is that of inf
  }

  // Keeps the best `kept` and a few more, if a bound separates them from the others; otherwise
  // drops. Takes a fraction of the time of drop.
  void thin(int64_t kept) {
    Order low = least, high = 0;  // bounds that leave too many, and too few
    for (int64_t i = 0; i < count; ++i) high = larger(high, entries.order[i]);
    while (high - low > 1) {
      const Order bound = low + (high - low) / 2;
      const int64_t left = count_from<A>(entries.order, count, bound);
      if (left < kept) {
        high = bound;
      } else if (left > kept + kept / 8) {
        low = bound;
      } else {
        int64_t to = 0;
        for (int64_t i = 0; i < count; ++i) {
          const Order order = entries.order[i];
          entries.move(to, entries, i);
          to += order >= bound ? 1 : 0;
        }
        count = to;
        return raise(bound);
      }
    }
    drop(kept);
  }

  void raise(Order to) {
    least = to;
    least_score = score_of_order(to);
    has_least = least_score == least_score;  // no score compares with NaN
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
