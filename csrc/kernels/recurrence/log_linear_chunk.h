// Shared by forward and backward of log-linear attention, see log_linear.h: sequences and their
// chunks, the rows and decays of a chunk, and the slots between chunks.
#pragma once

#include "kernels/recurrence/log_linear.h"
#include "kernels/recurrence/recurrence_rows.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Largest number of tokens of a chunk. Longer ones read states less often, with more work inside.
constexpr int64_t kMostTokens = 64;
// Largest number of slots that can hold tokens: positions are less than 2^63.
constexpr int kMostSlots = 63;

// Number of tokens of the largest chunk of at most `most` tokens that starts, or ends, at a
// position.
OMNIATTN_INLINE int64_t chunk_tokens(int64_t position, int64_t most) {
  int64_t tokens = kMostTokens;
  while (tokens > most || position % tokens != 0) tokens /= 2;
  return tokens;
}
// No sequence of `count` tokens has more chunks: smaller ones are at its ends.
OMNIATTN_INLINE int64_t most_chunks(int64_t count) {
  return smaller(count, count / kMostTokens + 12);
}

OMNIATTN_INLINE int bit_length(int64_t x) {
  return x == 0 ? 0 : 64 - __builtin_clzll(static_cast<unsigned long long>(x));
}
// Calls f(b) for the slots that hold the tokens before a position.
template <class F>
OMNIATTN_INLINE void for_slots(int64_t position, const F& f) {
  for (int b = 0; position >> b != 0; ++b) {
    if ((position >> b & 1) != 0) f(b);
  }
}

// A sequence and value head: batch entry, first row, tokens before it in the initial state, tokens.
struct LogLinearItem {
  int64_t sequence, head, batch, begin, position, count;
};
OMNIATTN_INLINE LogLinearItem item_of(const LogLinear& p, int64_t index) {
  const int64_t n = index / p.value_heads, head = index % p.value_heads;
  const int64_t position = p.positions == nullptr ? 0 : p.positions[n];
  if (p.boundaries == nullptr) return {n, head, n, 0, position, p.steps};
  return {n, head, 0, p.boundaries[n], position, p.boundaries[n + 1] - p.boundaries[n]};
}
// Slot b of a state (N, Hv, L, K, V).
template <class C>
OMNIATTN_INLINE C* slot_of(const LogLinear& p, const void* states, const LogLinearItem& x, int b) {
  const int64_t index = (x.sequence * p.value_heads + x.head) * p.levels + b;
  return static_cast<C*>(const_cast<void*>(states)) + index * p.key_width * p.value_width;
}

// to = factor x, or to += factor x, over `count` numbers.
template <class C>
[[gnu::noinline]] void add_scaled(C factor, const C* x, C* to, int64_t count, Into into) {
  const Vec<C> by(factor);
  for_row<C>(count, [=](int64_t i, auto part) {
    const Vec<C> scaled = part.load(x + i) * by;
    part.store(to + i, into == Into::set ? scaled : scaled + part.load(to + i));
  });
}

// The states of the slots at the start of a chunk: slot b is factor[b] times state[b].
template <class C>
struct Slots {
  const C* state[kMostSlots];
  C factor[kMostSlots];
};
// The slots before the first token of an item.
template <class C>
OMNIATTN_INLINE Slots<C> first_slots(const LogLinear& p, const LogLinearItem& x) {
  Slots<C> slots;
  for_slots(x.position, [&](int b) {
    slots.state[b] = slot_of<C>(p, p.initial_state, x, b), slots.factor[b] = 1;
  });
  return slots;
}
// Writes the states (L, K, V) of an item at a position: slot b by write(b, to), zeros if it is
// empty.
template <class C, class F>
OMNIATTN_INLINE void write_slots(const LogLinear& p, void* states, const LogLinearItem& x,
                                 int64_t position, const F& write) {
  const int64_t size = p.key_width * p.value_width;
  for (int b = 0; b < p.levels; ++b) {
    C* const to = slot_of<C>(p, states, x, b);
    if (b < kMostSlots && (position >> b & 1) != 0) {
      write(b, to);
    } else {
      zero_rows(Matrix<C>{to, size}, 1, size);
    }
  }
}

// A chunk of tokens of an item.
template <class C>
struct Tokens {
  static constexpr int kWidth = Vec<C>::kWidth;
  static constexpr int kVectors = kMostTokens / kWidth;

  const LogLinear& p;
  const int64_t K, V;
  int64_t position = 0, rows = 0;
  int joined = 0;              // the slot of the states that the chunk joins
  Matrix<C> q, k, v, decayed;  // decayed: rows of q or k times a factor
  Matrix<C> weights;           // of queries and keys
  C *w, *in, *out;             // decays of tokens; products from the start, and to the end
  C end = 1;                   // product over the whole chunk
  C* packed;                   // one matrix for products
  StepView scales{};           // of the chunk

  Tokens(const LogLinear& problem, Room<C>& room) : p(problem), K(p.key_width), V(p.value_width) {
    q = room.rows(kMostTokens, K), k = room.rows(kMostTokens, K);
    v = room.rows(kMostTokens, V);
    decayed = room.rows(kMostTokens, K);
    weights = room.rows(kMostTokens, kMostTokens);
    w = room.take(kMostTokens), in = room.take(kMostTokens), out = room.take(kMostTokens);
    packed =
        room.take(larger(packed_elements<C>(larger(K, V), kMostTokens), packed_elements<C>(V, K)));
  }

  int64_t key_head(const LogLinearItem& x) const { return x.head / (p.value_heads / p.key_heads); }
  const char* row(const StepView& from, const LogLinearItem& x, int64_t t, int64_t head) const {
    return row_of(p.dtype, from, x.batch, x.begin + t, head);
  }

  // Loads keys, values and decays of n tokens from token t of the item on.
  [[gnu::noinline]] void load(const LogLinearItem& x, int64_t t, int64_t n) {
    position = x.position + t, rows = n;
    for (joined = bit_length(n) - 1; (position >> joined & 1) != 0;) ++joined;
    load_rows(p.dtype, row(p.k, x, t, key_head(x)), p.k.step, n, K, k);
    load_rows(p.dtype, row(p.v, x, t, x.head), p.v.step, n, V, v);
    const C* const g = row_of<C>(p.g, x.batch, x.begin + t, x.head);
    for (int64_t i = 0; i < round_up(n, kWidth); ++i) w[i] = i < n ? g[i * p.g.step] : C{0};
    for (int64_t i = 0; i < n; i += kWidth) store(w + i, exp(OMNIATTN_ISA::load(w + i)));
    end = 1;
    for (int64_t i = 0; i < n; ++i) in[i] = end *= w[i];
    C after = 1;
    for (int64_t i = n; i-- > 0; after *= w[i]) out[i] = after;
  }
  void load_queries(const LogLinearItem& x, int64_t t) {
    load_rows(p.dtype, row(p.q, x, t, key_head(x)), p.q.step, rows, K, q);
    scales = p.scales;
    scales.data = row_of<C>(p.scales, x.batch, x.begin + t, x.head);
  }
  // Scales (L) of query i.
  OMNIATTN_INLINE const C* scales_of(int64_t i) const {
    return static_cast<const C*>(scales.data) + i * scales.step;
  }
  // Prefetches a token of the item, if it exists.
  void prefetch(const LogLinearItem& x, int64_t t) const {
    if (t < 0 || t >= x.count) return;
    const int64_t element = size_of(p.dtype);
    prefetch_row(row(p.q, x, t, key_head(x)), K * element);
    prefetch_row(row(p.k, x, t, key_head(x)), K * element);
    prefetch_row(row(p.v, x, t, x.head), V * element);
  }

  // decayed = k out, the keys that form the state at the end.
  [[gnu::noinline]] void decay_keys() const {
    for (int64_t i = 0; i < rows; ++i) {
      convert_rows(k.row(i), 0, 1, K, decayed.row(i), 0, out[i]);
    }
  }
  // state = the slot that the chunk makes, from decayed keys; calls advance() next.
  [[gnu::noinline]] void form(const Slots<C>& slots, C* state) const {
    Into into = Into::set;
    for (int b = bit_length(rows) - 1; b < joined; ++b) {
      add_scaled<C>(slots.factor[b] * end, slots.state[b], state, K * V, into);
      into = Into::add;
    }
    multiply<ALayout::kTransposed>(decayed, v, Matrix<C>{state, V}, K, V, rows, into);
  }
  void advance(Slots<C>& slots, const C* state) const {
    for_slots(position, [&](int b) { slots.factor[b] *= end; });
    slots.state[joined] = state, slots.factor[joined] = 1;
  }

  // weights = q k^T, on and below the diagonal.
  [[gnu::noinline]] void products() const {
    pack_columns(k, rows, K, packed);
    for_blocks(rows, [&](int64_t i, int64_t m) { multiply_to_lower(q, packed, weights, i, m, K); });
  }
  // Calls f(i, j, decays, scales) with those of query i and the keys from j on, a vector, which
  // must be used for keys <= i only. Keys j go to the end of the block of i (for_blocks).
  template <class F>
  OMNIATTN_INLINE void for_weights(const F& f) const {
    Vec<C> decays[kVectors];
#pragma GCC unroll 16
    for (auto& each : decays) each = Vec<C>(C{1});
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t end_of_block = smaller(round_up(i + 1, kBlock), rows);
      const C* const s = scales_of(i);
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) {
        const int64_t j = n * kWidth;
        decays[n] = select(lanes_below<C>(i - j), decays[n] * w[i], Vec<C>(C{1}));
        if (j < end_of_block) f(i, j, decays[n], scales_of_keys(s, i, j));
      }
    }
  }

 private:
  // The scales of query i for the keys from j <= i on.
  OMNIATTN_INLINE static Vec<C> scales_of_keys(const C* s, int64_t i, int64_t j) {
    const int64_t differs = i ^ j;
    if (differs >= kWidth) return Vec<C>(i < j ? C{0} : s[bit_length(differs)]);
    Vec<C> result(s[0]);
    for (int64_t bit = 1, level = 1; bit < kWidth; bit *= 2, ++level) {
      if ((differs & bit) != 0) {
        result = select(lanes_below<C>(differs & -bit), Vec<C>(s[level]), result);
      }
    }
    return result;
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
