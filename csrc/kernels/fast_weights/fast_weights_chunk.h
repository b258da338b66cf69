// Shared by forward and backward of fast weights, see fast_weights.h: the rows, gates and gradients
// of a chunk, and the states after it.
#pragma once

#include "kernels/fast_weights/fast_weights.h"
#include "kernels/recurrence/recurrence_rows.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Largest number of tokens of a chunk.
constexpr int64_t kMostTokens = 64;

// A sequence and head: batch entry, first row, tokens before it, tokens.
struct FastWeightsItem {
  int64_t index, head, batch, begin, position, count;
};
OMNIATTN_INLINE FastWeightsItem item_of(const FastWeights& p, int64_t index) {
  const int64_t n = index / p.heads, head = index % p.heads;
  const int64_t position = p.positions == nullptr ? 0 : p.positions[n];
  if (p.boundaries == nullptr) return {index, head, n, 0, position, p.steps};
  return {index, head, 0, p.boundaries[n], position, p.boundaries[n + 1] - p.boundaries[n]};
}
// No sequence of `count` tokens has more chunks.
OMNIATTN_INLINE int64_t most_chunks(const FastWeights& p, int64_t count) {
  return smaller(count, count / kMostTokens + count / p.mini_batch + 2);
}

// to = factor x + to_factor to, over `count` numbers.
template <class C>
[[gnu::noinline]] void add_scaled(C factor, const C* x, C to_factor, C* to, int64_t count) {
  const Vec<C> by(factor), of_to(to_factor);
  for_row<C>(count, [=](int64_t i, auto part) {
    part.store(to + i, fma(part.load(x + i), by, part.load(to + i) * of_to));
  });
}
// rows of `to` = factors of rows times rows of x.
template <class C>
[[gnu::noinline]] void scale_rows(const C* factors, C sign, Input<C> x, int64_t rows, int64_t width,
                                  Matrix<C> to) {
  for (int64_t i = 0; i < rows; ++i) {
    convert_rows(x.row(i), 0, 1, width, to.row(i), 0, sign * factors[i]);
  }
}

// Weights, momentum and anchor of an item, (R, V) each.
template <class C>
struct Model {
  C *weights, *momentum, *anchor;
  bool moves;  // false: the momentum is 0, and its memory is not defined
};

// A chunk of tokens of an item.
template <class C>
struct Chunk {
  static constexpr int kWidth = Vec<C>::kWidth;

  const FastWeights& p;
  const int64_t K, R, V, size;
  const int64_t held;  // keys and values before the chunk
  int64_t rows = 0;
  bool starts = false, ends = false;  // its mini-batch
  Matrix<C> q;
  Matrix<C> k, target, u, normal;     // after the held rows; normal: z with mean 0 and deviation 1
  Matrix<C> products, pairs, writes;  // q k^T; weights of u in outputs, and in the momentum
  Matrix<C> scaled;                   // rows of q or k times a factor
  C *step, *keep, *gate, *share;      // step: (rows, window)
  C *of_momentum, *of_weights, *from_momentum;  // m, A and F: shares of the start
  C* inverse;                                   // 1 / deviation
  C* packed;

  Chunk(const FastWeights& problem, Room<C>& room)
      : p(problem), K(p.key_width), R(p.rows()), V(p.value_width), size(R * V), held(p.held()) {
    const int64_t most_keys = held + kMostTokens;
    q = room.rows(kMostTokens, R), k = room.rows(most_keys, R);
    scaled = room.rows(most_keys, R);
    target = room.rows(most_keys, V), u = room.rows(most_keys, V);
    normal = room.rows(most_keys, V);
    products = room.rows(kMostTokens, most_keys), pairs = room.rows(kMostTokens, most_keys);
    writes = room.rows(kMostTokens, most_keys);
    step = room.take(kMostTokens * p.window), inverse = room.take(most_keys);
    for (C** each : {&keep, &gate, &share, &of_momentum, &of_weights, &from_momentum}) {
      *each = room.take(kMostTokens);
    }
    packed = room.take(larger(packed_elements<C>(R, most_keys), packed_elements<C>(V, K)));
  }

  // Number of keys of the chunk.
  OMNIATTN_INLINE int64_t keys() const { return held + rows; }
  // Number of elements of rows of pairs.
  OMNIATTN_INLINE int64_t pair_width() const { return round_up(keys(), kWidth); }
  const char* row(const StepView& from, const FastWeightsItem& x, int64_t t) const {
    return row_of(p.dtype, from, x.batch, x.begin + t, x.head);
  }

  // Loads the tokens of the chunk that starts at token t of the item.
  [[gnu::noinline]] void load(const FastWeightsItem& x, int64_t t) {
    const int64_t place = (x.position + t) % p.mini_batch;
    rows = smaller(smaller(p.mini_batch - place, x.count - t), kMostTokens);
    starts = place == 0, ends = place + rows == p.mini_batch;
    load_held(x, t);
    load_rows(p.dtype, row(p.k, x, t), p.k.step, rows, K, k.at(held));
    load_rows(p.dtype, row(p.v, x, t), p.v.step, rows, V, target.at(held));
    for (int64_t i = 0; p.bias && i < rows; ++i) q.row(i)[K] = k.row(i)[K] = 1;
    if (p.residual) add_rows(k, C{-1}, target);
    load_gate(p.step, x, t, step, p.window);
    load_gate(p.keep, x, t, keep);
    load_gate(p.gate, x, t, gate);
    load_gate(p.share, x, t, share);
    combine_gates();
  }
  // Loads the keys and values of the tokens before token t.
  [[gnu::noinline]] void load_held(const FastWeightsItem& x, int64_t t) const {
    if (held == 0) return;
    const int64_t of_state = larger(held - t, int64_t{0}), first = larger(t - held, int64_t{0});
    const auto state = [&](const void* from, int64_t width, Matrix<C> to) {
      if (from == nullptr) return zero_rows(to, of_state, width);
      const C* const own = static_cast<const C*>(from) + first_held(x, width) + t * p.heads * width;
      copy_rows(own, p.heads * width, of_state, width, to);
    };
    if (of_state > 0) state(p.keys, K, k), state(p.values, V, target);
    const int64_t count = held - of_state;
    load_rows(p.dtype, row(p.k, x, first), p.k.step, count, K, k.at(of_state));
    load_rows(p.dtype, row(p.v, x, first), p.v.step, count, V, target.at(of_state));
  }
  // First element of the rows of an item in (N, J - 1, H, width).
  int64_t first_held(const FastWeightsItem& x, int64_t width) const {
    return (x.index / p.heads * held * p.heads + x.head) * width;
  }
  void store_held(const FastWeightsItem& x, Input<C> from, int64_t width, void* to) const {
    if (to == nullptr) return;
    copy_rows<C>(from.data, from.stride, held, width,
                 {static_cast<C*>(to) + first_held(x, width), p.heads * width});
  }
  void load_queries(const FastWeightsItem& x, int64_t t) const {
    load_rows(p.dtype, row(p.q, x, t), p.q.step, rows, K, q, static_cast<C>(p.scale));
  }
  // Prefetches a token of the item, if it exists.
  void prefetch(const FastWeightsItem& x, int64_t t) const {
    if (t < 0 || t >= x.count) return;
    const int64_t element = size_of(p.dtype);
    prefetch_row(row(p.q, x, t), K * element);
    prefetch_row(row(p.k, x, t), K * element);
    prefetch_row(row(p.v, x, t), V * element);
  }
  // to += factor x, rows of V.
  void add_rows(Input<C> x, C factor, Matrix<C> to) const {
    for (int64_t i = 0; i < rows; ++i) add_scaled<C>(factor, x.row(i), 1, to.row(i), V);
  }

  // The model before the first token of an item.
  [[gnu::noinline]] Model<C> begin(const FastWeightsItem& x, Model<C> model) const {
    const auto copy = [&](const void* from, C* to) {
      if (from == nullptr) return zero_rows(Matrix<C>{to, size}, 1, size);
      copy_rows(static_cast<const C*>(from) + x.index * size, 0, 1, size, Matrix<C>{to, size});
    };
    copy(p.weights, model.weights);
    copy(p.anchor == nullptr ? p.weights : p.anchor, model.anchor);
    model.moves = p.momentum != nullptr;
    if (model.moves) copy(p.momentum, model.momentum);
    return model;
  }
  // u of all tokens, at the weights at the start of the mini-batch.
  [[gnu::noinline]] void descend(const FastWeightsItem& x, const C* weights) {
    multiply(k, Matrix<const C>{weights, V}, u, keys(), V, R, Into::set);
    const auto* const w = static_cast<const C*>(p.w);
    for (int64_t i = 0; i < keys(); ++i) {
      if (w == nullptr) {
        add_scaled<C>(-1, target.row(i), 1, u.row(i), V);
      } else {
        inverse[i] = descend_norm(w + x.head * V, static_cast<const C*>(p.b) + x.head * V,
                                  target.row(i), normal.row(i), u.row(i));
      }
    }
  }
  // Moves the model past the chunk.
  [[gnu::noinline]] void move(Model<C>& model) const {
    const int64_t last = rows - 1;
    const Matrix<C> weights{model.weights, V}, momentum{model.momentum, V};
    if (starts && !ends) {
      copy_rows<C>(model.weights, 0, 1, size, Matrix<C>{model.anchor, size});
    }
    if (!p.descent || ends) {
      if (model.moves) {
        add_scaled<C>(-from_momentum[last], model.momentum, of_weights[last], model.weights, size);
      } else {
        scale(of_weights[last], model.weights);
      }
      scale_rows<C>(pairs.row(last), -1, k, keys(), R, scaled);
      multiply<ALayout::kTransposed>(scaled, u, weights, R, V, keys(), Into::add);
    }
    if (p.descent && ends) {
      model.moves = false;
      return;
    }
    if (model.moves) scale(of_momentum[last], model.momentum);
    scale_rows<C>(writes.row(last), 1, k, keys(), R, scaled);
    multiply<ALayout::kTransposed>(scaled, u, momentum, R, V, keys(),
                                   model.moves ? Into::add : Into::set);
    model.moves = true;
  }
  // products = q k^T, on and below the diagonal.
  [[gnu::noinline]] void multiply_pairs() const {
    pack_columns(k, keys(), R, packed);
    for_blocks(
        rows, [&](int64_t i, int64_t m) { multiply_to_lower(q, packed, products, i, m, R, held); });
  }

  // Multiplies a state by a factor.
  void scale(C factor, C* state) const {
    if (factor != 1) convert_rows(state, 0, 1, size, state, 0, factor);
  }

 private:
  void load_gate(const StepView& from, const FastWeightsItem& x, int64_t t, C* to,
                 int64_t width = 1) const {
    const C* const g =
        from.data == nullptr ? nullptr : row_of<C>(from, x.batch, x.begin + t, x.head);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < width; ++j) *to++ = g == nullptr ? C{1} : g[i * from.step + j];
    }
  }
  // Finds the weights of tokens in states and outputs.
  [[gnu::noinline]] void combine_gates() const {
    const int64_t width = pair_width();
    C kept = 1, weighed = 1, from = 0;
    for (int64_t t = 0; t < rows; ++t) {
      const C g = gate[t], part = share[t];
      of_momentum[t] = kept *= keep[t];
      if (!p.descent) weighed *= g;
      of_weights[t] = weighed;
      from_momentum[t] = from = p.descent ? g * kept : g * from + part * kept;
      C *const write = writes.row(t), *const pair = pairs.row(t);
      const C *const write_before = writes.row(larger(t - 1, int64_t{0})), *const pair_before =
                                                                               pairs.row(larger(
                                                                                   t - 1,
                                                                                   int64_t{0}));
      for (int64_t j = 0; j < width; j += kWidth) {
        store(write + j,
              t == 0 ? zero<C>() : OMNIATTN_ISA::load(write_before + j) * Vec<C>(keep[t]));
      }
      const C* const steps = step + t * p.window;
      write[held + t] = steps[0];
      for (int64_t j = 1; j <= held; ++j) write[held + t - j] += steps[j];
      for (int64_t j = 0; j < width; j += kWidth) {
        const Vec<C> written = OMNIATTN_ISA::load(write + j) * Vec<C>(part), by(g);
        store(pair + j, p.descent ? written * by
                        : t == 0  ? written
                                  : fma(OMNIATTN_ISA::load(pair_before + j), by, written));
      }
    }
  }
  // Turns z into u; returns 1 / deviation.
  OMNIATTN_INLINE C descend_norm(const C* w, const C* b, const C* y, C* unit, C* z) const {
    const C each = C{1} / static_cast<C>(V);
    const C mean = each * row_sum<C>(V, [=](int64_t i, auto part) { return part.load(z + i); });
    const C variance = each * row_sum<C>(V, [=](int64_t i, auto part) {
                         const Vec<C> centred = part.load(z + i) - Vec<C>(mean);
                         return centred * centred;
                       });
    const C scale = C{1} / static_cast<C>(__builtin_sqrt(variance + static_cast<C>(p.eps)));
    RowSum<C> gaps, common;
    for_row_by_four<C>(V, [&](int64_t i, auto part, int n) {
      const Vec<C> x = (part.load(z + i) - Vec<C>(mean)) * Vec<C>(scale), by = part.load(w + i);
      const Vec<C> gap = by * (fma(x, by, part.load(b + i)) - part.load(y + i));
      part.store(unit + i, x), part.store(z + i, gap);
      gaps.add(n, part.zero_beyond(gap)), common.add(n, part.zero_beyond(gap * x));
    });
    const Vec<C> shift(each * gaps.total()), along(each * common.total()), by(scale);
    for_row<C>(V, [=](int64_t i, auto part) {
      part.store(z + i, by * (part.load(z + i) - shift - part.load(unit + i) * along));
    });
    return scale;
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
