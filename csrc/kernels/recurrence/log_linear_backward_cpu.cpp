// Backward of log-linear attention, see log_linear.h. With S the state of a slot at the start of a
// chunk, d marks gradients, and f = in s the factor of a query that reads it:
//
//   dq += f do S^T         dS = end dS' + (f q)^T do       for each slot of the chunk's position
//   dv = (out k) dS'       dk = out v dS'^T                for the slot that the chunk made
//
// where dS' is the gradient of the slot that S is in after the chunk. Inside the chunk, with M the
// matrix of decays times scales: dq += dP k, dk += dP^T q, dP = (do v^T) M, dv += (q k^T M)^T do.
//
// The factor of token t is in all products from before t to t or later. Their gradients are added
// directly, as in recurrence_decay.h: pairs inside the chunk, states at the start with queries from
// t on, keys before t with the state at the end, and states at the start with that state.
#include "kernels/recurrence/item_pass.h"
#include "kernels/recurrence/log_linear_chunk.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
struct Backward {
  static constexpr int kWidth = Tokens<C>::kWidth, kVectors = Tokens<C>::kVectors;
  const LogLinearBackwardParams& params;
  const LogLinear& p = params.problem;
  const int64_t size = p.key_width * p.value_width;
  Room<C> room;
  Tokens<C> c;
  Matrix<C> grad_o, read, dq, dk, dv;
  Matrix<C> slopes, terms;  // gradients of products; these times the products
  C *entering, *dg;         // of each token
  C *states, *dstates;      // of each chunk; of each slot
  C* transposed;            // states of each slot, packed
  const C* packed_of[kMostSlots];
  Slots<C>* starts;  // of each chunk

  Backward(const LogLinearBackwardParams& x, void* memory) : params(x), room(memory), c(p, room) {
    const int64_t K = p.key_width, V = p.value_width, slots = smaller(p.levels, kMostSlots);
    const int64_t chunks = most_chunks(p.longest);
    grad_o = room.rows(kMostTokens, V), dv = room.rows(kMostTokens, V);
    read = room.rows(kMostTokens, K), dq = room.rows(kMostTokens, K);
    dk = room.rows(kMostTokens, K);
    slopes = room.rows(kMostTokens, kMostTokens), terms = room.rows(kMostTokens, kMostTokens);
    entering = room.take(kMostTokens), dg = room.take(kMostTokens);
    states = room.take(chunks * size), dstates = room.take(slots * size);
    transposed = room.take(slots * packed_elements<C>(V, K));
    constexpr int64_t kStart = sizeof(Slots<C>) / sizeof(C);
    starts = reinterpret_cast<Slots<C>*>(room.take(chunks * kStart));
  }

  void run(int64_t index) {
    const LogLinearItem x = item_of(p, index);
    int64_t chunks = recompute(x);
    for_slots(x.position + x.count, [&](int b) {
      C* const to = dstate_of(b);
      if (params.grad_final_state == nullptr) return zero_rows(Matrix<C>{to, size}, 1, size);
      add_scaled<C>(1, slot_of<C>(p, params.grad_final_state, x, b), to, size, Into::set);
    });
    for (const C*& each : packed_of) each = nullptr;
    for (int64_t t = x.count; t > 0; t -= c.rows) {
      const int64_t n = chunk_tokens(x.position + t, t);
      chunk(x, t - n, n, starts[--chunks]);
    }
    if (params.dinitial_state == nullptr) return;
    write_slots<C>(p, params.dinitial_state, x, x.position,
                   [&](int b, C* to) { add_scaled<C>(1, dstate_of(b), to, size, Into::set); });
  }

 private:
  C* dstate_of(int64_t slot) const { return dstates + slot * size; }
  template <class T>
  T* row_of_result(void* result, const LogLinearItem& x, int64_t t, int64_t width) const {
    const int64_t row = (x.batch * p.steps + x.begin + t) * p.value_heads + x.head;
    return static_cast<T*>(result) + row * width;
  }

  // Finds the slots at the start of each chunk; returns the number of chunks.
  int64_t recompute(const LogLinearItem& x) {
    Slots<C> slots = first_slots<C>(p, x);
    int64_t chunks = 0;
    for (int64_t t = 0; t < x.count; t += c.rows, ++chunks) {
      starts[chunks] = slots;
      c.load(x, t, chunk_tokens(x.position + t, x.count - t));
      if (t + c.rows == x.count) continue;  // nothing reads its state
      C* const state = states + chunks * size;
      c.decay_keys();
      c.form(slots, state);
      c.advance(slots, state);
    }
    return chunks;
  }

  void chunk(const LogLinearItem& x, int64_t t, int64_t n, const Slots<C>& slots) {
    c.load(x, t, n);
    c.load_queries(x, t);
    if (params.grad_o.data == nullptr) {
      zero_rows(grad_o, n, c.V);
    } else {
      load_rows(p.dtype, c.row(params.grad_o, x, t, x.head), params.grad_o.step, n, c.V, grad_o);
    }
    C* const dscales = row_of_result<C>(params.dscales, x, t, p.levels);
    const int64_t dscales_step = p.value_heads * p.levels;
    zero_rows(Matrix<C>{dscales, dscales_step}, n, p.levels);
    const C carried = through_state(slots);
    zero_rows(dq, n, c.K);
    for (int64_t i = 0; i < n; ++i) entering[i] = 0;
    for_slots(c.position, [&](int b) { through_slot(slots, b, dscales + b + 1, dscales_step); });
    inside(x, t, dscales, dscales_step);
    write(x, t, carried);
  }

  // Starts dk and dv with the shares of the state at the end, and dg with those of keys before each
  // token. Moves the gradients of slots to the start of the chunk. Returns the share of all tokens
  // in dg, that of states at the start with the state at the end.
  [[gnu::noinline]] C through_state(const Slots<C>& slots) {
    const int64_t n = c.rows, K = c.K, V = c.V;
    const Matrix<const C> made{dstate_of(c.joined), V};
    c.decay_keys();
    multiply(c.decayed, made, dv, n, V, K, Into::set);
    pack_columns<C>(made, K, V, c.packed);
    multiply(c.v, packed_panels(c.packed, V), dk, n, K, V, Into::set);
    C leaving = 0;
    for (int64_t i = 0; i < n; ++i) {
      convert_rows(dk.row(i), 0, 1, K, dk.row(i), 0, c.out[i]);
      dg[i] = leaving;
      leaving += dot(c.k.row(i), dk.row(i), K);
    }
    C carried = 0;
    for_slots(c.position, [&](int b) {
      const C *const state = slots.state[b], *const from = dstate_of(larger(b, c.joined));
      C* const to = dstate_of(b);
      const Vec<C> factor(c.end);
      carried += slots.factor[b] * row_sum<C>(size, [=](int64_t i, auto part) {
                   const Vec<C> after = part.load(from + i) * factor;
                   part.store(to + i, after);
                   return part.load(state + i) * after;
                 });
    });
    return carried;
  }

  // Adds the shares of queries that read a slot.
  [[gnu::noinline]] void through_slot(const Slots<C>& slots, int b, C* dscales, int64_t step) {
    const int64_t n = c.rows, K = c.K, V = c.V;
    const C* const state = slots.state[b];
    C* const packed = transposed + b * packed_elements<C>(V, K);
    if (packed_of[b] != state) {
      pack_columns<C>(Matrix<const C>{state, V}, K, V, packed);
      packed_of[b] = state;
    }
    multiply(grad_o, packed_panels(packed, V), read, n, K, V, Into::set);
    for (int64_t i = 0; i < n; ++i) {
      const C scale = c.scales_of(i)[b + 1], decay = slots.factor[b] * c.in[i];
      const Vec<C> of_query(decay * scale), of_state(c.in[i] * scale);
      const C *const q = c.q.row(i), *const met = read.row(i);
      C *const to = dq.row(i), *const reader = c.decayed.row(i);
      const C sum = decay * row_sum<C>(K, [=](int64_t j, auto part) {
                      const Vec<C> query = part.load(q + j), found = part.load(met + j);
                      part.store(to + j, fma(found, of_query, part.load(to + j)));
                      part.store(reader + j, query * of_state);
                      return query * found;
                    });
      dscales[i * step] = sum;
      entering[i] += scale * sum;
    }
    multiply<ALayout::kTransposed>(c.decayed, grad_o, Matrix<C>{dstate_of(b), V}, K, V, n,
                                   Into::add);
  }

  // Adds the shares of queries and keys of the chunk.
  [[gnu::noinline]] void inside(const LogLinearItem& x, int64_t t, C* dscales, int64_t step) {
    const int64_t n = c.rows, K = c.K, V = c.V;
    c.products();
    pack_columns(c.v, n, V, c.packed);
    for_blocks(n,
               [&](int64_t i, int64_t m) { multiply_to_lower(grad_o, c.packed, slopes, i, m, V); });
    c.for_weights([&](int64_t i, int64_t j, Vec<C> decays, Vec<C> scales) {
      if (j == 0) prefetch(x, t - kMostTokens + i);
      C *const weight = c.weights.row(i) + j, *const slope = slopes.row(i) + j;
      const Mask<C> seen = lanes_below<C>(i + 1 - j);
      const Vec<C> product = load(weight) * decays, found = load(slope);
      const Vec<C> term = select(seen, product * found, zero<C>());
      add_by_level(i, j, term, dscales + i * step);
      store(terms.row(i) + j, term * scales);
      store(weight, select(seen, product * scales, zero<C>()));
      store(slope, select(seen, found * decays * scales, zero<C>()));
    });
    add_crossing();
    multiply_lower(slopes, c.k, dq, n, K);
    multiply_lower_transposed(slopes, c.q, dk, n, K, Into::add);
    multiply_lower_transposed(c.weights, grad_o, dv, n, V, Into::add);
  }

  // Adds the terms of query i and the keys from j on to the sums of their levels.
  OMNIATTN_INLINE static void add_by_level(int64_t i, int64_t j, Vec<C> term, C* sums) {
    const int64_t differs = i ^ j;
    if (i < j) return;
    if (differs >= kWidth) {
      sums[bit_length(differs)] += reduce_add(term);
      return;
    }
    const auto keys = [&](int64_t first, int64_t end) {
      return reduce_add(select(lanes_below<C>(end) & !lanes_below<C>(first), term, zero<C>()));
    };
    sums[0] += keys(differs, differs + 1);
    for (int64_t bit = 1, level = 1; bit < kWidth; bit *= 2, ++level) {
      if ((differs & bit) != 0) sums[level] += keys(differs & (-2 * bit), differs & -bit);
    }
  }
  // dg_t += terms of queries from t on with keys before t.
  void add_crossing() {
    Vec<C> columns[kVectors];
#pragma GCC unroll 16
    for (auto& column : columns) column = zero<C>();
    for (int64_t t = c.rows; t-- > 0;) {
      Vec<C> sum = zero<C>();
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) {
        const int64_t j = n * kWidth;
        if (j > t) break;
        columns[n] += load(terms.row(t) + j);
        sum += select(lanes_below<C>(t - j), columns[n], zero<C>());
      }
      dg[t] += reduce_add(sum);
    }
  }

  void write(const LogLinearItem& x, int64_t t, C carried) {
    const int64_t n = c.rows, group = p.value_heads / p.key_heads;
    const int64_t batches = p.boundaries == nullptr ? p.sequences : 1;
    const DType dtype = group == 1 ? p.dtype : kComputed<C>;
    const auto write_keys = [&](Matrix<C> rows, void* to) {
      const int64_t batch = x.head % group * batches + x.batch, stride = p.key_heads * c.K;
      const int64_t first = (batch * p.steps + x.begin + t) * stride + c.key_head(x) * c.K;
      stream_rows(dtype, rows, n, c.K, static_cast<char*>(to) + first * size_of(dtype), stride);
    };
    write_keys(dq, params.dq);
    write_keys(dk, params.dk);
    stream_rows(p.dtype, dv, n, c.V, row_of_result<char>(params.dv, x, t, c.V * size_of(p.dtype)),
                p.value_heads * c.V);
    C* const to = row_of_result<C>(params.dg, x, t, 1);
    C sum = carried;
    for (int64_t i = n; i-- > 0;) to[i * p.value_heads] = dg[i] + (sum += entering[i]);
  }

  void prefetch(const LogLinearItem& x, int64_t t) const {
    c.prefetch(x, t);
    if (t < 0 || params.grad_o.data == nullptr) return;
    prefetch_row(c.row(params.grad_o, x, t, x.head), c.V * size_of(p.dtype));
  }
};

using Entries = ItemPass<Backward, LogLinearBackwardParams>;

}  // namespace

extern const LogLinearBackwardKernels log_linear_backward_kernels_table;
const LogLinearBackwardKernels log_linear_backward_kernels_table{Entries::bytes, Entries::run};

}  // namespace omniattn::OMNIATTN_ISA
