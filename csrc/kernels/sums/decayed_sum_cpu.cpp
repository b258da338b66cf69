// Sums of decayed products, see decayed_sum.h. The heads of an item alternate as in
// recurrence_forward.h.
#include "kernels/recurrence/item_pass.h"
#include "kernels/sums/decayed_sum.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Tokens of a product of matrices: many, since their sum is read and written once for all.
constexpr int64_t kTokens = 64;

template <class C>
struct Pass {
  const DecayedSumParams& params;
  const DecayedSum& p = params.problem;
  const int64_t K = p.key_width, V = p.value_width;
  Room<C> room;
  Matrix<C> keys, values;          // of a chunk of tokens
  Matrix<C> sums;                  // of the heads of an item
  Matrix<C> decays, value_decays;  // products so far of these heads
  C* factors;                      // of the tokens of a chunk, for all channels

  Pass(const DecayedSumParams& x, void* memory) : params(x), room(memory) {
    keys = room.rows(kTokens, K);
    values = room.rows(kTokens, V);
    sums = room.rows(p.heads * K, V);
    decays = room.rows(p.heads, K);
    value_decays = room.rows(p.heads, V);
    factors = room.take(kTokens);
  }

  void run(int64_t index) {
    const int64_t parts = ceil_div(p.value_heads, p.heads), batch = index / parts;
    const int64_t first = index % parts * p.heads;
    const int64_t count = smaller(p.heads, p.value_heads - first);
    zero_rows(sums, count * K, V);
    fill_ones(decays, count, K);
    fill_ones(value_decays, count, V);
    bool any = true;
    for (int64_t done = 0; any && done < p.steps; done += kTokens) {
      const int64_t n = smaller(kTokens, p.steps - done);
      any = false;
      for (int64_t i = 0; i < count; ++i) {
        if (!is_alive(i)) continue;
        any = true;
        chunk(batch, p.from_start ? done : p.steps - done - n, n, first + i, i);
      }
    }
    const int64_t at = batch * p.value_heads + first;
    copy_rows<C>(sums.data, sums.stride, count * K, V, {out(params.sum, at * K * V), V});
    copy_rows<C>(decays.data, decays.stride, count, K, {out(params.decay, at * K), K});
    if (params.value_decay == nullptr) return;
    copy_rows<C>(value_decays.data, value_decays.stride, count, V,
                 {out(params.value_decay, at * V), V});
  }

 private:
  bool decays_values() const { return p.gv.data != nullptr; }
  static C* out(void* x, int64_t at) { return static_cast<C*>(x) + at; }
  static void fill_ones(Matrix<C> x, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; ++i) {
      for_row<C>(width, [&](int64_t j, auto part) { part.store(x.row(i) + j, Vec<C>(C{1})); });
    }
  }
  // Head i of the item: its remaining tokens have a share in the sum.
  bool is_alive(int64_t i) const {
    return any_nonzero(decays.row(i), K) && any_nonzero(value_decays.row(i), V);
  }
  static bool any_nonzero(const C* x, int64_t n) {
    bool any = false;
    for (int64_t j = 0; j < n; ++j) any |= x[j] != 0;  // as is NaN
    return any;
  }

  void chunk(int64_t batch, int64_t t, int64_t n, int64_t head, int64_t i) {
    const int64_t key_head = head / (p.value_heads / p.key_heads);
    load_rows(p.dtype, row_of(p.dtype, p.k, batch, t, key_head), p.k.step, n, K, keys);
    to_features(p.features, keys, n, K);
    if (p.channel_decay) decay_rows(p.g, batch, t, head, n, keys, decays.row(i), K);
    scale_keys(batch, t, head, n, decays.row(i));
    Matrix<const C> u = values;
    if (p.v_dtype == kComputed<C> && !decays_values()) {
      u = {row_of<C>(p.v, batch, t, head), p.v.step};
    } else {
      load_rows(p.v_dtype, row_of(p.v_dtype, p.v, batch, t, head), p.v.step, n, V, values);
    }
    if (decays_values()) decay_rows(p.gv, batch, t, head, n, values, value_decays.row(i), V);
    multiply<ALayout::kTransposed>(keys, u, sums.at(i * K), K, V, n, Into::add);
  }

  // Calls f(i) for the tokens of a chunk in the order in which their decays are multiplied.
  template <class F>
  OMNIATTN_INLINE void for_tokens(int64_t n, const F& f) const {
    for (int64_t i = 0; p.from_start && i < n; ++i) f(i);
    for (int64_t i = n; !p.from_start && i-- > 0;) f(i);
  }
  // True if the decay of a token is a factor of its own rows.
  bool has_own() const { return p.from_start && !p.before_own; }

  // Multiplies rows by the products of decays g for each channel.
  [[gnu::noinline]] void decay_rows(const StepView& g, int64_t batch, int64_t t, int64_t head,
                                    int64_t n, Matrix<C> rows, C* product, int64_t width) const {
    const bool own = has_own();
    for_tokens(n, [&](int64_t i) {
      const C* const decay = row_of<C>(g, batch, t + i, head);
      C* const row = rows.row(i);
      for_row<C>(width, [=](int64_t d, auto part) {
        const Vec<C> before = part.load(product + d);
        const Vec<C> after = before * exp(part.load(decay + d));
        part.store(product + d, after);
        part.store(row + d, part.load(row + d) * (own ? after : before));
      });
    });
  }
  // Multiplies keys by their beta and by the products of decays for all channels.
  [[gnu::noinline]] void scale_keys(int64_t batch, int64_t t, int64_t head, int64_t n,
                                    C* product) const {
    const bool decays_heads = p.g.data != nullptr && !p.channel_decay, own = has_own();
    const bool has_beta = p.beta.data != nullptr;
    if (!decays_heads && !has_beta) return;
    for (int64_t i = 0; i < n; ++i) {
      factors[i] = decays_heads ? *row_of<C>(p.g, batch, t + i, head) : C{0};
    }
    for_row<C>(n,
               [&](int64_t i, auto part) { part.store(factors + i, exp(part.load(factors + i))); });
    C all = decays_heads && K > 0 ? product[0] : C{1};
    for_tokens(n, [&](int64_t i) {
      const C before = all;
      all *= factors[i];
      const C beta = has_beta ? *row_of<C>(p.beta, batch, t + i, head) : C{1};
      convert_rows(keys.row(i), 0, 1, K, keys.row(i), 0, (own ? all : before) * beta);
    });
    if (!decays_heads) return;
    for_row<C>(K, [=](int64_t d, auto part) { part.store(product + d, Vec<C>(all)); });
  }
};

using Entries = ItemPass<Pass, DecayedSumParams>;

}  // namespace

extern const DecayedSumKernels decayed_sum_kernels_table;
const DecayedSumKernels decayed_sum_kernels_table{Entries::bytes, Entries::run};

}  // namespace omniattn::OMNIATTN_ISA
