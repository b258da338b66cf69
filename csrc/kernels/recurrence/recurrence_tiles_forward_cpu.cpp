// Forward of matrix-state recurrences on AMX tiles, see recurrence_tiles.h.
#include "kernels/recurrence/recurrence_forward.h"
#include "kernels/recurrence/recurrence_tiles_chunk.h"
#include "kernels/recurrence/recurrence_update.h"
#include "runtime/denormals.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Computes as Forward of recurrence_forward_cpu.cpp. Each step is done for all panels before the
// next step, so that no panel waits for its own products.
template <bool kDelta>
struct TileForward {
  const RecurrenceParams& params;
  const Recurrence& p = params.recurrence;
  Room<float> room;
  TileChunk c;
  const int64_t first;   // first head of the item
  const int64_t panels;  // number of panels of values
  float* states;         // states of the heads
  // Per panel: products of k and q with the state; P u later overwrites that of k.
  float* met;
  Panel error, u;
  Factor<2> state_columns[2];  // two consecutive panels of the state as B
  Factor<2> P;                 // as A
  Factor<2> updates;           // u of each panel as B
  Factor<3> leaving;           // updates, decayed to the end of the chunk

  TileForward(const RecurrenceParams& x, void* memory, int64_t first_head)
      : params(x),
        room(memory),
        c(p, room, false),
        first(first_head),
        panels(ceil_div(p.value_width, kPanel)) {
    states = room.take(params.heads * TileState::elements(panels, c.steps * kTileTerms));
    met = room.take(panels * kMet);
    error = take_panel(room, kTokens), u = take_panel(room, kTokens);
    for (auto& columns : state_columns) take(room, c.steps, 1, columns);
    take(room, 1, 2, P), take(room, panels, 1, updates), take(room, panels, 1, leaving);
  }

  void load(int64_t head, const float* from) { state_of(head).load(from); }
  void save(int64_t head, float* to) { state_of(head).stream(to); }
  void store(int64_t head, float* to) { state_of(head).store(to); }

  void chunk(const RecurrenceSequence& s, Turn now, int64_t n, Turn next) {
    const int64_t batch = s.batch, t = now.t, head = now.head, V = p.value_width;
    char* const o = out_row(p.o_dtype, p, params.o, batch, t, p.value_heads, head, V);
    const int64_t row_bytes = V * size_of(p.o_dtype);
    Ahead ahead{[&](int64_t i) {
      prefetch_row<true>(o + i * p.value_heads * row_bytes, row_bytes);
      if (next.t + i < s.begin + s.count) prefetch_token<float>(p, batch, next.t + i, next.head);
    }};
    const bool same_keys = head > first && p.key_head_of(head) == p.key_head_of(head - 1);
    if (!same_keys) c.load(batch, t, n, p.key_head_of(head));
    c.load_head(batch, t, head);
    for (int64_t i = 0; i < kTokens; ++i) store_row_pieces(P, 0, i, c.P[0].at(i), c.P[1].at(i));
    const TokenRows<> v(p.v, batch, t, n, head, V);
    const TileState state = state_of(head);
    for (int64_t i = 0; i <= panels; ++i) {
      if (i < panels) pack_state(state.panel(i), state_columns[i % 2]);
      if (i > 0) read_state(i - 1);
      ahead.ask_until(i * n / larger(panels, 1));
    }
    for (int64_t i = 0; i < panels; ++i) update(v, i);
    for (int64_t i = 0; i < panels; ++i) multiply_column<2>(P, updates.after(i), 1, met_of(i));
    for (int64_t i = 0; i < panels; ++i) {
      add_products(c.key_channels, c.steps, leaving.after(i), state.panel(i));
    }
    const float* const skip = head_row<const float>(p, p.skip, s.index, head, V);
    dispatch_storage<float>(p.o_dtype, [&]<class T>(T) {
      for (int64_t i = 0; i < panels; ++i) write(v, skip, i, reinterpret_cast<T*>(o));
    });
  }

 private:
  static constexpr int64_t kMet = 2 * kTokens * kPanel;

  TileState state_of(int64_t head) const {
    const int64_t rows = c.steps * kTileTerms;
    return {p, states + (head - first) * TileState::elements(panels, rows), panels, rows};
  }
  Panel met_of(int64_t i) const { return {met + i * kMet}; }

  // Packs a panel as B, and decays it over the chunk.
  [[gnu::noinline]] void pack_state(Panel state, Factor<2> columns) const {
    const VecF end(c.decay.end);
    pack_columns(c.steps, columns, [=](int64_t d) OMNIATTN_LAMBDA {
      const VecF x = state.at(d);
      state.set(d, x * end);
      return x;
    });
  }

  void read_state(int64_t i) const {
    const Factor<2> columns = state_columns[i % 2];
    if constexpr (kDelta) {
      multiply_column<4>(c.readers, columns, c.steps, met_of(i));
    } else {
      multiply_column<2>(c.readers, columns, c.steps, {met_of(i).row(kTokens)});
    }
  }

  [[gnu::noinline]] void update(TokenRows<> v, int64_t i) const {
    const int64_t j = i * kPanel;
    const float *const in = c.decay.in, *const out = c.decay.out, *const beta = c.beta;
    const Panel of_k = met_of(i), e = error, x = u;
    for (int64_t t = 0; t < kTokens; ++t) {
      if constexpr (kDelta) {
        e.set(t, of_k.at(t) * in[t] - v.at(t, j));
      } else {
        x.set(t, v.at(t, j) * beta[t]);
      }
    }
    if constexpr (kDelta) c.solve(e, x);
    pack_columns(1, updates.after(i), [=](int64_t t) OMNIATTN_LAMBDA { return x.at(t); });
    pack_columns(1, leaving.after(i), [=](int64_t t) OMNIATTN_LAMBDA { return x.at(t) * out[t]; });
  }

  // o = scale (e^G (q S) + P u + skip v)
  template <class T>
  [[gnu::noinline]] void write(TokenRows<> v, const float* skip, int64_t i, T* o) const {
    const int64_t j = i * kPanel, left = p.value_width - j;
    const Panel inside = met_of(i), of_q{inside.row(kTokens)};
    const VecF factor = skip == nullptr ? VecF(0.0f) : load_n(skip + j, left);
    const VecF scale(static_cast<float>(p.scale));
    for (int64_t t = 0; t < c.rows; ++t) {
      VecF x = fma(of_q.at(t), VecF(c.decay.in[t]), inside.at(t));
      if (skip != nullptr) x = fma(factor, v.at(t, j), x);
      store_n(o + t * p.value_heads * p.value_width + j, x * scale, left);
    }
  }
};

int64_t bytes(const Recurrence& p, int64_t heads) {
  RecurrenceParams params{};
  params.recurrence = p, params.heads = heads;
  return p.delta ? TileForward<true>(params, nullptr, 0).room.bytes()
                 : TileForward<false>(params, nullptr, 0).room.bytes();
}

void forward(const RecurrenceParams& params, void* memory, int64_t begin, int64_t end) {
  const FlushDenormals flush;
  const TileScope scope;
  const Recurrence& p = params.recurrence;
  OMNIATTN_ASSERT_ITEMS(begin, end, p.sequences * ceil_div(p.value_heads, params.heads));
  OMNIATTN_ASSERT_HAS(memory, bytes(p, params.heads));
  for (int64_t i = begin; i < end; ++i) {
    p.delta ? forward_item<float, DeltaUpdate, TileForward<true>>(params, memory, i)
            : forward_item<float, PlainUpdate, TileForward<false>>(params, memory, i);
  }
  stream_fence();
}

}  // namespace

extern const RecurrenceKernels recurrence_tile_kernels_table;
const RecurrenceKernels recurrence_tile_kernels_table{bytes, forward};

}  // namespace omniattn::OMNIATTN_ISA
