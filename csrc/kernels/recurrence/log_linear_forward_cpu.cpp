// Forward of log-linear attention, see log_linear.h.
#include "kernels/recurrence/item_pass.h"
#include "kernels/recurrence/log_linear_chunk.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
struct Forward {
  const LogLinearParams& params;
  const LogLinear& p = params.problem;
  Room<C> room;
  Tokens<C> c;
  Matrix<C> o;
  C* states;  // of each slot that a chunk made, (K, V)

  Forward(const LogLinearParams& x, void* memory) : params(x), room(memory), c(p, room) {
    o = room.rows(kMostTokens, p.value_width);
    states = room.take(smaller(p.levels, kMostSlots) * p.key_width * p.value_width);
  }

  void run(int64_t index) {
    const LogLinearItem x = item_of(p, index);
    Slots<C> slots = first_slots<C>(p, x);
    for (int64_t t = 0; t < x.count; t += c.rows) {
      c.load(x, t, chunk_tokens(x.position + t, x.count - t));
      c.load_queries(x, t);
      outputs(x, t, slots);
      C* const state = states + c.joined * c.K * c.V;
      c.decay_keys();
      c.form(slots, state);
      c.advance(slots, state);
    }
    write_slots<C>(p, params.final_state, x, x.position + x.count, [&](int b, C* to) {
      add_scaled(slots.factor[b], slots.state[b], to, c.K * c.V, Into::set);
    });
  }

 private:
  void outputs(const LogLinearItem& x, int64_t t, const Slots<C>& slots) {
    const int64_t n = c.rows, V = c.V;
    Into into = Into::set;
    for_slots(c.position, [&](int b) {
      for (int64_t i = 0; i < n; ++i) {
        const C factor = slots.factor[b] * c.in[i] * c.scales_of(i)[b + 1];
        convert_rows(c.q.row(i), 0, 1, c.K, c.decayed.row(i), 0, factor);
      }
      multiply(c.decayed, Matrix<const C>{slots.state[b], V}, o, n, V, c.K, into);
      into = Into::add;
    });
    if (into == Into::set) zero_rows(o, n, V);
    c.products();
    c.for_weights([&](int64_t i, int64_t j, Vec<C> decays, Vec<C> scales) {
      if (j == 0) c.prefetch(x, t + n + i);
      C* const weights = c.weights.row(i) + j;
      const Vec<C> weighed = load(weights) * decays * scales;
      store(weights, select(lanes_below<C>(i + 1 - j), weighed, zero<C>()));
    });
    multiply_lower(c.weights, c.v, o, n, V);
    const int64_t stride = p.value_heads * V;
    const int64_t first = ((x.batch * p.steps + x.begin + t) * p.value_heads + x.head) * V;
    store_rows(p.dtype, o, n, V, static_cast<char*>(params.o) + first * size_of(p.dtype), stride);
  }
};

using Entries = ItemPass<Forward, LogLinearParams>;

}  // namespace

extern const LogLinearKernels log_linear_kernels_table;
const LogLinearKernels log_linear_kernels_table{Entries::bytes, Entries::run};

}  // namespace omniattn::OMNIATTN_ISA
