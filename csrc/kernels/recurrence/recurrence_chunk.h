// A chunk of tokens of one sequence and head: its rows in the accumulator type, and products of its
// small matrices. With e^G the product of the decays from the start of the chunk through a token:
//
//   probe_in = probe e^G, q_in = q e^G      rows that meet the state at the chunk's start
//   k_out = k e^(G_C - G)                   rows that make the state at its end
//   N_ij = probe_i . D_ij k_j  (j < i),  P_ij = q_i . D_ij k_j  (j <= i)
//
// with D_ij = e^(G_i - G_j). The probe is what an update asks the state with: k of a delta update,
// a of one of low rank. For rows that read the state before their own token, as that a does and q
// with a bonus, e^G_i is e^G_{i-1}; P_ii with a bonus is q_i . (bonus k_i). The scale multiplies
// outputs where they are stored, and their gradients where they are loaded.
//
// Stacks hold the rows of the probe or of what belongs to it, then right after these the rows of q;
// of keys, those of k, then those of b.
#pragma once

#include "kernels/recurrence/recurrence.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/gemm_tile.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
struct Matrix {
  C* data;
  int64_t stride;

  OMNIATTN_INLINE C* row(int64_t i) const { return data + i * stride; }
  OMNIATTN_INLINE Matrix at(int64_t i, int64_t j = 0) const { return {row(i) + j, stride}; }
  OMNIATTN_INLINE operator Matrix<const C>() const { return {data, stride}; }
};
// A matrix that is read by a function which writes one of C.
template <class C>
using Input = std::type_identity_t<Matrix<const C>>;

// Hands out the memory of an item; without memory it counts the bytes.
template <class C>
class Room {
 public:
  explicit Room(void* memory) : memory_(static_cast<char*>(memory)) {}

  C* take(int64_t count) {
    C* const result = memory_ == nullptr ? nullptr : reinterpret_cast<C*>(memory_ + bytes_);
    bytes_ += round_up(count * static_cast<int64_t>(sizeof(C)), kLine);
    return result;
  }
  // Rows an odd number of cache lines apart, so that those of a column fall into all sets of L1.
  [[gnu::noinline]] Matrix<C> rows(int64_t count, int64_t width) {
    const int64_t lines = ceil_div(width * static_cast<int64_t>(sizeof(C)), kLine) | 1;
    const int64_t stride = lines * kLine / static_cast<int64_t>(sizeof(C));
    return {take(count * stride), stride};
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kLine = 64;
  char* memory_;
  int64_t bytes_ = 0;
};

// C (m, n) = A (m, k) B, or + A B.
enum class Into { set, add };
template <ALayout kLayout = ALayout::kRows, class C>
OMNIATTN_INLINE void multiply(Input<C> a, Panels<C> b, Matrix<C> c, int64_t m, int64_t n, int64_t k,
                              Into into) {
  gemm_tile<C, kLayout>(a.data, a.stride, b, c.data, c.stride, m, n, k, into == Into::add);
}
template <ALayout kLayout = ALayout::kRows, class C>
OMNIATTN_INLINE void multiply(Input<C> a, Input<C> b, Matrix<C> c, int64_t m, int64_t n, int64_t k,
                              Into into) {
  multiply<kLayout>(a, row_panels<C>(b.data, b.stride), c, m, n, k, into);
}

// Rows of a triangular product that are computed as one rectangle.
constexpr int64_t kBlock = 16;
// Rows of a product between which other work is done: a tile.
constexpr int64_t kStrip = 6;
template <class F>
OMNIATTN_INLINE void for_blocks(int64_t rows, const F& f) {
  for (int64_t i = 0; i < rows; i += kBlock) f(i, smaller(kBlock, rows - i));
}
// c += A b and c += A^T b of a lower triangular A, whose blocks on the diagonal have zeros. Out of
// line, as all that is done once per chunk and for every decay and update: copies of it were a
// twentieth of the library.
template <class C>
[[gnu::noinline]] void multiply_lower(Input<C> a, Input<C> b, Matrix<C> c, int64_t rows,
                                      int64_t n) {
  for_blocks(rows,
             [&](int64_t i, int64_t m) { multiply(a.at(i), b, c.at(i), m, n, i + m, Into::add); });
}
template <class C>
[[gnu::noinline]] void multiply_lower_transposed(Input<C> a, Input<C> b, Matrix<C> c, int64_t rows,
                                                 int64_t n, Into into) {
  for_blocks(rows, [&](int64_t i, int64_t m) {
    multiply<ALayout::kTransposed>(a.at(i, i), b.at(i), c.at(i), m, n, rows - i, into);
  });
}
// B^T of rows of `width`, for products.
template <class C>
[[gnu::noinline]] void pack_columns(Input<C> rows, int64_t count, int64_t width, C* packed) {
  pack_bt(rows.data, rows.stride, width, count, packed, round_up(count, Vec<C>::kWidth));
}
// The block of c = A B^T on and below the diagonal that starts at row i, B^T packed from rows of
// `width`.
template <class C>
[[gnu::noinline]] void multiply_to_lower(Input<C> a, const C* packed, Matrix<C> c, int64_t i,
                                         int64_t m, int64_t width) {
  multiply(a.at(i), packed_panels(packed, width), c.at(i), m, i + m, width, Into::set);
}

// Rows of x times factor, from one type of storage to another.
template <class T, class S>
OMNIATTN_INLINE void convert_rows(const T* x, int64_t stride, int64_t rows, int64_t width, S* out,
                                  int64_t out_stride, compute_t<T> factor) {
  for (int64_t i = 0; i < rows; ++i) {
    for_row<compute_t<T>>(width, [&](int64_t j, auto part) {
      part.store(out + i * out_stride + j, part.load(x + i * stride + j) * factor);
    });
  }
}
// What moves rows is out of line: it is called often, and once per chunk.
template <class C>
[[gnu::noinline]] void copy_rows(const C* x, int64_t stride, int64_t rows, int64_t width,
                                 Matrix<C> out) {
  for (int64_t i = 0; i < rows; ++i) {
    for_row<C>(width, [&](int64_t j, auto part) {
      part.store(out.row(i) + j, part.load(x + i * stride + j));
    });
  }
}
template <class C>
[[gnu::noinline]] void zero_rows(Matrix<C> x, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; ++i) {
    for_row<C>(width, [&](int64_t j, auto part) { part.store(x.row(i) + j, zero<C>()); });
  }
}
template <class C>
OMNIATTN_INLINE C dot(const C* a, const C* b, int64_t n) {
  return row_sum<C>(n, [&](int64_t i, auto part) { return part.load(a + i) * part.load(b + i); });
}

// The dtype of C.
template <class C>
constexpr DType kComputed = sizeof(C) == 8 ? DType::f64 : DType::f32;

// Calls f(T{}) with the storage type of a dtype that is computed in C.
template <class C, class F>
OMNIATTN_INLINE void dispatch_storage(DType dtype, const F& f) {
  dispatch(dtype, [&]<class T>(T x) {
    if constexpr (std::is_same_v<compute_t<T>, C>) return f(x);
    OMNIATTN_FAIL("rows of a dtype that is computed in another type");
  });
}

// Rows of the dtype of a call to rows of C and back. Only these two know this dtype: everything
// else is compiled once for all dtypes that are computed in C.
template <class C>
[[gnu::noinline]] void load_rows(DType dtype, const char* x, int64_t stride, int64_t rows,
                                 int64_t width, Matrix<C> out, C factor = 1) {
  dispatch_storage<C>(dtype, [&]<class T>(T) {
    convert_rows(reinterpret_cast<const T*>(x), stride, rows, width, out.data, out.stride, factor);
  });
}
template <class C>
[[gnu::noinline]] void store_rows(DType dtype, Matrix<C> x, int64_t rows, int64_t width, char* out,
                                  int64_t stride, C factor = 1) {
  dispatch_storage<C>(dtype, [&]<class T>(T) {
    convert_rows(x.data, x.stride, rows, width, reinterpret_cast<T*>(out), stride, factor);
  });
}
// The same past the caches where rows are whole vectors, for what is larger than they are and read
// much later: it saves reading the lines first. Before others read it, stream_fence() is called.
template <class C>
[[gnu::noinline]] void stream_rows(DType dtype, Matrix<C> x, int64_t rows, int64_t width, char* out,
                                   int64_t stride, C factor = 1) {
  constexpr int kWidth = Vec<C>::kWidth;
  const int64_t element = size_of(dtype), vector = kWidth * element;
  if (width % kWidth != 0 || stride * element % vector != 0 ||
      reinterpret_cast<uintptr_t>(out) % vector != 0) {
    return store_rows(dtype, x, rows, width, out, stride, factor);
  }
  dispatch_storage<C>(dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < rows; ++i) {
      T* const to = reinterpret_cast<T*>(out) + i * stride;
      for (int64_t j = 0; j < width; j += kWidth) stream(to + j, load(x.row(i) + j) * factor);
    }
  });
}

// The row of an input, of C and of the dtype of the call.
template <class C>
OMNIATTN_INLINE const C* row_of(const StepView& x, int64_t batch, int64_t t, int64_t head) {
  return static_cast<const C*>(x.data) + batch * x.batch + t * x.step + head * x.head;
}
OMNIATTN_INLINE const char* row_of(DType dtype, const StepView& x, int64_t batch, int64_t t,
                                   int64_t head) {
  return static_cast<const char*>(x.data) +
         (batch * x.batch + t * x.step + head * x.head) * size_of(dtype);
}
// The row of a result (B, T, H, D), likewise, and of a state (N, Hv, K, W).
template <class C>
OMNIATTN_INLINE C* out_row(const Recurrence& p, void* x, int64_t batch, int64_t t, int64_t heads,
                           int64_t head, int64_t width) {
  return static_cast<C*>(x) + ((batch * p.steps + t) * heads + head) * width;
}
OMNIATTN_INLINE char* out_row(DType dtype, const Recurrence& p, void* x, int64_t batch, int64_t t,
                              int64_t heads, int64_t head, int64_t width) {
  return out_row<char>(p, x, batch, t, heads, head, width * size_of(dtype));
}
template <class C>
OMNIATTN_INLINE C* state_of(const Recurrence& p, const void* x, int64_t n, int64_t head) {
  return static_cast<C*>(const_cast<void*>(x)) +
         (n * p.value_heads + head) * p.key_width * p.state_width();
}
// The row of a bonus or skip (N, Hv, width); null where there is none.
template <class C>
OMNIATTN_INLINE C* head_row(const Recurrence& p, auto* x, int64_t n, int64_t head, int64_t width) {
  return x == nullptr ? nullptr : static_cast<C*>(x) + (n * p.value_heads + head) * width;
}
// A state (K, W) to its columns of V and that of the sums, where there is one, and back.
template <class C>
[[gnu::noinline]] void load_state(const Recurrence& p, const C* from, Matrix<C> state, C* z) {
  const int64_t width = p.state_width();
  copy_rows(from, width, p.key_width, p.value_width, state);
  for (int64_t d = 0; p.normalize && d < p.key_width; ++d) z[d] = from[d * width + p.value_width];
}
template <class C>
[[gnu::noinline]] void store_state(const Recurrence& p, Matrix<C> state, const C* z, C* to) {
  const int64_t width = p.state_width();
  copy_rows<C>(state.data, state.stride, p.key_width, p.value_width, {to, width});
  for (int64_t d = 0; p.normalize && d < p.key_width; ++d) to[d * width + p.value_width] = z[d];
}

// x becomes its features.
template <class C>
[[gnu::noinline]] void to_features(FeatureMap map, Matrix<C> x, int64_t rows, int64_t width) {
  const auto each = [&](auto f) {
    for (int64_t i = 0; i < rows; ++i) {
      C* const row = x.row(i);
      for_row<C>(width, [=](int64_t j, auto part) { part.store(row + j, f(part.load(row + j))); });
    }
  };
  const Vec<C> none = zero<C>();
  switch (map) {
    case FeatureMap::identity:
      return;
    case FeatureMap::elu1:
      return each([=](Vec<C> y) { return select(y > none, y + C{1}, exp(y)); });
    case FeatureMap::relu:
      return each([=](Vec<C> y) { return max(none, y); });
    case FeatureMap::squared_relu:
      return each([=](Vec<C> y) { return max(none, y) * max(none, y); });
    case FeatureMap::exp:
      return each([](Vec<C> y) { return exp(y); });
  }
}
// d, the gradient of features x, becomes that of what they are of.
template <class C>
[[gnu::noinline]] void of_features(FeatureMap map, Input<C> x, Matrix<C> d, int64_t rows,
                                   int64_t width) {
  const auto each = [&](auto slope) {
    for (int64_t i = 0; i < rows; ++i) {
      const C* const value = x.row(i);
      C* const row = d.row(i);
      for_row<C>(width, [=](int64_t j, auto part) {
        part.store(row + j, part.load(row + j) * slope(part.load(value + j)));
      });
    }
  };
  const Vec<C> none = zero<C>(), one(C{1});
  switch (map) {
    case FeatureMap::identity:
      return;
    case FeatureMap::elu1:
      return each([=](Vec<C> y) { return min(one, y); });
    case FeatureMap::relu:
      return each([=](Vec<C> y) { return select(y > none, one, none); });
    case FeatureMap::squared_relu:
      return each([=](Vec<C> y) { return C{2} * sqrt(y); });
    case FeatureMap::exp:
      return each([](Vec<C> y) { return y; });
  }
}

// o += skip v.
template <class C>
[[gnu::noinline]] void add_skip(const C* skip, Input<C> v, Matrix<C> o, int64_t rows,
                                int64_t width) {
  for (int64_t i = 0; i < rows; ++i) {
    for_row<C>(width, [&](int64_t j, auto part) {
      part.store(o.row(i) + j,
                 fma(part.load(skip + j), part.load(v.row(i) + j), part.load(o.row(i) + j)));
    });
  }
}

// Brings the row of a token into L2, to read or to write it.
template <bool kWrite = false>
OMNIATTN_INLINE void prefetch_row(const void* row, int64_t bytes) {
  constexpr int64_t kLine = 64;
  for (int64_t j = 0; j < bytes; j += kLine) {
    __builtin_prefetch(static_cast<const char*>(row) + j, kWrite, 2);
  }
  asm volatile("");  // else GCC drops calls of what seems to have no effect
}

// Asks for the rows of tokens of another chunk by ask(i), a few at a time between products: they
// are far from each other in memory, and waiting for them took up to a fourth of the time. Asked
// for all at once, they wait for each other.
template <class F>
struct Ahead {
  F ask;
  int64_t asked = 0;

  OMNIATTN_INLINE void ask_until(int64_t end) {
    for (; asked < end; ++asked) ask(asked);
  }
};

template <class C>
struct Chunk {
  const Recurrence& p;
  const int64_t K, V;
  const bool delta;
  int64_t rows = 0;
  Matrix<const C> q, k, v, probe;  // k is a stack of keys, probe one of them or a
  Matrix<C> probe_in, q_in;        // see above; [probe_in; q_in] is a stack
  Matrix<C> k_out;                 // stack of keys
  Matrix<C> N, P, N_b, P_b;        // the latter two of b in the place of k
  Matrix<C> error;                 // what the state predicts, of a delta update minus v
  Matrix<const C> u;               // rows of updates: stack of those of k, and c of b
  C* beta;                         // of updates of values and sums; -1 of one of low rank
  Matrix<C> updates;               // u where it is not v itself
  const C *bonus, *skip;           // of a head
  C* packed;                       // one matrix for products

  [[gnu::noinline]] Chunk(const Recurrence& params, Room<C>& room, int64_t packed_size)
      : p(params), K(p.key_width), V(p.value_width), delta(p.delta) {
    const int64_t size = recurrence_chunk(p.channel_decay), keys = low_rank() ? 2 * size : size;
    if (!keys_in_place()) loaded_k = room.rows(keys, K), loaded_q = room.rows(size, K);
    probe_in = q_in = room.rows(2 * size, K);
    k_out = room.rows(keys, K);
    N = room.rows(size, size);
    P = room.rows(size, size);
    if (low_rank()) {
      loaded_probe = room.rows(size, K);
      N_b = room.rows(size, size);
      P_b = room.rows(size, size);
    }
    if (!in_place()) loaded_v = room.rows(keys, V);
    updates = delta || scales() ? room.rows(keys, V) : loaded_v;
    beta = room.take(size);
    packed = room.take(packed_size);
  }

  // The tokens [t, t + n).
  [[gnu::noinline]] void load(int64_t batch, int64_t t, int64_t n, int64_t key_head) {
    rows = n;
    q_in = probe_in.at(n);
    probe = k = features_of(p.k, batch, t, key_head, loaded_k);
    if (low_rank()) {
      load_input(p.b, batch, t, key_head, K, loaded_k.at(n));
      probe = rows_of(p.a, batch, t, key_head, K, loaded_probe);
    }
    q = features_of(p.q, batch, t, key_head, loaded_q);
  }
  void load_input(const StepView& x, int64_t batch, int64_t t, int64_t head, int64_t width,
                  Matrix<C> to, C factor = 1) const {
    load_rows(p.dtype, row_of(p.dtype, x, batch, t, head), x.step, rows, width, to, factor);
  }
  // met = A S for `count` rows of A, while the rest of the tokens are asked for.
  template <class F>
  void meet(Matrix<C> a, Matrix<C> state, Matrix<C> met, int64_t count, Ahead<F>& ahead) const {
    const int64_t asked = ahead.asked;
    for (int64_t i = 0; i < count; i += kStrip) {
      const int64_t m = smaller(kStrip, count - i);
      ahead.ask_until(asked + (i + m) * (rows - asked) / count);
      multiply(a.at(i), state, met.at(i), m, V, K, Into::set);
    }
  }
  int64_t key_head_of(int64_t head) const { return head / (p.value_heads / p.key_heads); }
  [[gnu::noinline]] void fetch(int64_t batch, int64_t t, int64_t head) const {
    const int64_t key_head = key_head_of(head), element = size_of(p.dtype);
    const auto ask = [&](const StepView& x, int64_t h, int64_t width) {
      prefetch_row(row_of(p.dtype, x, batch, t, h), width * element);
    };
    ask(p.q, key_head, K);
    ask(p.k, key_head, K);
    if (low_rank()) ask(p.a, key_head, K), ask(p.b, key_head, K);
    ask(p.v, head, V);
    if (p.channel_decay) prefetch_row(row_of<C>(p.g, batch, t, head), K * sizeof(C));
  }
  // What an update has for one value head; u is v, or where it will be.
  [[gnu::noinline]] void load_update(const RecurrenceSequence& s, int64_t t, int64_t head) {
    v = rows_of(p.v, s.batch, t, head, V, loaded_v);
    u = delta || scales() ? updates : v;
    const bool given = p.beta.data != nullptr;
    for (int64_t i = 0; given && i < rows; ++i) beta[i] = *row_of<C>(p.beta, s.batch, t + i, head);
    for (int64_t i = 0; !given && i < rows; ++i) beta[i] = low_rank() ? -1 : 1;
    bonus = head_row<const C>(p, p.bonus, s.index, head, K);
    skip = head_row<const C>(p, p.skip, s.index, head, V);
  }
  // Whether a plain update has a beta.
  bool scales() const { return !delta && p.beta.data != nullptr; }
  // Rows of V times their beta.
  [[gnu::noinline]] void times_beta(Input<C> x, Matrix<C> to) const {
    for (int64_t i = 0; i < rows; ++i) convert_rows(x.row(i), 0, 1, V, to.row(i), 0, beta[i]);
  }

 private:
  Matrix<C> loaded_q, loaded_k, loaded_v, loaded_probe;  // what is not read in place

  bool low_rank() const { return p.a.data != nullptr; }
  // Inputs of C are read where they are, which saves a tenth of the time of long sequences; not
  // with a second key, where keys and updates are stacks.
  bool in_place() const { return size_of(p.dtype) == sizeof(C) && !low_rank(); }
  bool keys_in_place() const { return in_place() && p.features == FeatureMap::identity; }
  Matrix<const C> features_of(const StepView& x, int64_t batch, int64_t t, int64_t head,
                              Matrix<C> to) const {
    if (keys_in_place()) return rows_of(x, batch, t, head, K, to);
    load_input(x, batch, t, head, K, to);
    to_features(p.features, to, rows, K);
    return to;
  }
  Matrix<const C> rows_of(const StepView& x, int64_t batch, int64_t t, int64_t head, int64_t width,
                          Matrix<C> to) const {
    if (in_place()) return {row_of<C>(x, batch, t, head), x.step};
    load_input(x, batch, t, head, width, to);
    return to;
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
