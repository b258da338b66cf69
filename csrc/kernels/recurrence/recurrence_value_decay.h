// Decays of values in a chunk of a plain update, for each channel, whatever the decay of keys. With
// x_i = exp(gv_i), and the products X_ij of x_{j+1} .. x_i, `in` of x_0 .. x_i, `out` of x_{i+1}
// and later ones, and `end` of all:
//
//   o_i = in_i * (q_in S)_i + sum_{j<=i} P_ij X_ij * u_j     S' = e^(G_C) S end + k_out^T (out * u)
//
// Outputs are to values what the scores of a channel decay are to keys, so that the products of the
// backward are those of recurrence_channel_decay.h with u for keys and the gradients of o for q.
#pragma once

#include <tuple>
#include <utility>

#include "kernels/recurrence/recurrence_channel_decay.h"
#include "kernels/recurrence/recurrence_update.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
class ValueDecay {
 public:
  // Without gv only `present` may be called.
  ValueDecay(const Recurrence& params, Room<C>& room)
      : p(params),
        size(present() ? recurrence_chunk(p) : 0),
        width(present() ? p.value_width : 0),
        products(room, size, width) {
    in = room.rows(size, width), out = room.rows(size, width);
    end = room.take(width);
    updates = room.rows(size, width);
  }
  bool present() const { return p.gv.data != nullptr; }

  [[gnu::noinline]] void load(int64_t batch, int64_t t, int64_t head, int64_t count) {
    rows = count;
    for_row<C>(width, [&](int64_t d, auto part) {
      Vec<C> product(C{1});
      for (int64_t i = 0; i < rows; ++i) {
        const Vec<C> factor = exp(part.load(row_of<C>(p.gv, batch, t + i, head) + d));
        product *= factor;
        part.store(products.w.row(i) + d, factor);
        part.store(in.row(i) + d, product);
      }
      part.store(end + d, product);
      product = Vec<C>(C{1});
      for (int64_t i = rows; i-- > 0;) {
        part.store(out.row(i) + d, product);
        product *= part.load(products.w.row(i) + d);
      }
    });
  }

  // Turns o = q_in S into the outputs of a chunk; returns out * u.
  [[gnu::noinline]] Matrix<const C> outputs(Matrix<C> P, Input<C> u, Matrix<C> o) {
    times(in, o, o);
    times(out, u, updates);
    for (int64_t j = 0; j < rows; j += kKeys) {
      constexpr int64_t kChannels = kVecs * Vec<C>::kWidth;
      int64_t d = 0;
      for (; d + kChannels <= width; d += kChannels) add_values<kVecs>(P, u, o, j, d, Whole{});
      for_row<C>(width - d,
                 [&](int64_t rest, auto part) { add_values<1>(P, u, o, j, d + rest, part); });
    }
    return updates;
  }
  void decay_row(C* state) const {
    for_row<C>(width, [=, this](int64_t j, auto part) {
      part.store(state + j, part.load(state + j) * part.load(end + j));
    });
  }

 private:
  // Number of values, and of vectors of their channels, kept in registers while they decay by row.
  static constexpr int kKeys = 4, kVecs = 2;

  // Adds to o the shares of values [j, j + kKeys) in kCount vectors of channels from d on.
  template <int kCount>
  [[gnu::noinline]] void add_values(Matrix<const C> P, Matrix<const C> u, Matrix<C> o, int64_t j,
                                    int64_t d, auto part) const {
    Vec<C> running[kKeys][kCount];
#pragma GCC unroll 4
    for (auto& value : running) {
#pragma GCC unroll 2
      for (Vec<C>& x : value) x = zero<C>();
    }
    const Matrix<const C> decays = products.w;
    const auto add = [&]<int kStarted, bool kStarts>(int64_t i) OMNIATTN_LAMBDA {
      const C* const weights = P.row(i) + j;
#pragma GCC unroll 2
      for (int z = 0; z < kCount; ++z) {
        const int64_t at = d + z * Vec<C>::kWidth;
        const Vec<C> decay = part.load(decays.row(i) + at);
        Vec<C> sum = part.load(o.row(i) + at);
#pragma GCC unroll 4
        for (int r = 0; r < kStarted; ++r) {
          running[r][z] *= decay;
          sum = fma(running[r][z], Vec<C>(weights[r]), sum);
        }
        if constexpr (kStarts) {
          running[kStarted][z] = part.load(u.row(i) + at);
          sum = fma(running[kStarted][z], Vec<C>(weights[kStarted]), sum);
        }
        part.store(o.row(i) + at, sum);
      }
    };
    [&]<int... kStarted>(std::integer_sequence<int, kStarted...>) OMNIATTN_LAMBDA {
      ((j + kStarted < rows ? add.template operator()<kStarted, true>(j + kStarted) : void()), ...);
    }(std::make_integer_sequence<int, kKeys>{});
    for (int64_t i = j + kKeys; i < rows; ++i) add.template operator()<kKeys, false>(i);
  }

 protected:
  // to = factor * x; `to` may be x.
  void times(Input<C> factor, Input<C> x, Matrix<C> to) const {
    for (int64_t i = 0; i < rows; ++i) {
      for_row<C>(width, [&](int64_t d, auto part) {
        part.store(to.row(i) + d, part.load(factor.row(i) + d) * part.load(x.row(i) + d));
      });
    }
  }

  const Recurrence& p;
  const int64_t size, width;
  int64_t rows = 0;
  DecayedProducts<C, PlainUpdate> products;
  Matrix<C> in, out;  // per token
  C* end;
  Matrix<C> updates;  // out * u
};

// The backward of ValueDecay. `do` is the gradient of o, in rows.
template <class C>
class ValueDecayBackward : public ValueDecay<C> {
 public:
  ValueDecayBackward(const Recurrence& params, Room<C>& room) : ValueDecay<C>(params, room) {
    readers = room.rows(size, width);
    sums = room.rows(size, width);
  }

  // Turns x = k_out dS' into the gradient of u, and computes the gradients dP of the scores P.
  // Returns in * do, whose product with S is the gradient of q_in, and out * u.
  using Rows = std::pair<Matrix<const C>, Matrix<const C>>;
  [[gnu::noinline]] Rows gradient(Matrix<const C> P, Matrix<const C> u, Matrix<const C> grad_o,
                                  Matrix<C> x, Matrix<C> dP) {
    const Readers<C> of_outputs{rows, width, grad_o, {}};
    Ahead none{[](int64_t) {}};
    products.scores(of_outputs, u, {}, dP, none);
    products.clear_sums(of_outputs);
    products.within_chunk(of_outputs, u, P, P, sums);
    this->times(in, grad_o, readers);
    this->times(out, u, updates);
    // The shares of keys with the state at the end: those before row i contain x_i.
    for_row<C>(width, [&](int64_t d, auto part) {
      Vec<C> leaving = zero<C>();
      for (int64_t i = 0; i < rows; ++i) {
        C *const share = products.shares.row(i) + d, *const du = x.row(i) + d;
        part.store(share, part.load(share) + leaving);
        const Vec<C> made = part.load(du);
        leaving = fma(made, part.load(updates.row(i) + d), leaving);
        part.store(du, fma(made, part.load(out.row(i) + d), part.load(sums.row(i) + d)));
      }
    });
    return {readers, updates};
  }

  // Computes dgv from met = q_in S, and from S and dS', decayed to the start of the chunk.
  [[gnu::noinline]] void write(Matrix<const C> met, Matrix<const C> state, Matrix<const C> dstate,
                               C* dgv, int64_t stride) {
    for_row<C>(width, [&](int64_t d, auto part) {
      Vec<C> all = zero<C>();
      for (int64_t i = 0; i < p.key_width; ++i) {
        all = fma(part.load(state.row(i) + d), part.load(dstate.row(i) + d), all);
      }
      for (int64_t i = rows; i-- > 0;) {
        C* const share = products.shares.row(i) + d;
        all = fma(part.load(met.row(i) + d), part.load(readers.row(i) + d), all);
        part.store(share, part.load(share) + all);
      }
    });
    stream_rows(kComputed<C>, products.shares, rows, width, reinterpret_cast<char*>(dgv), stride);
  }

 private:
  using ValueDecay<C>::p, ValueDecay<C>::size, ValueDecay<C>::width, ValueDecay<C>::rows;
  using ValueDecay<C>::products, ValueDecay<C>::in, ValueDecay<C>::out, ValueDecay<C>::updates;
  Matrix<C> readers, sums;
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
