// Backward of matrix-state recurrences on AMX tiles, see recurrence_tiles.h and, for the formulas,
// recurrence_backward_cpu.cpp. Gradients of rows of q and k are computed transposed, one block of
// 32 channels at a time: a block of a state is then A without conversion.
#include "kernels/recurrence/recurrence_backward.h"
#include "kernels/recurrence/recurrence_tiles_chunk.h"
#include "runtime/denormals.h"
#include "runtime/transpose.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// G is the type of the gradient of o; fp32 gradients are split like computed values.
template <bool kDelta, class G>
struct TileBackward {
  static constexpr int kGradPieces = std::is_same_v<G, bf16> ? 1 : 2;

  const RecurrenceBackwardParams& params;
  const Recurrence& p = params.recurrence;
  const int64_t group = group_of(params);
  const HeadRange heads;
  Room<float> room;
  TileChunk c;
  const int64_t blocks, panels;  // of V: in 32 columns, and in 16
  const float scale;
  float* dstates;                      // dS' of the heads
  float* state;                        // S, for a delta update
  float *of_key, *of_update, *inside;  // per panel: k S, k dS', P^T do
  Panel turned[2];                     // scale P^T
  Panel error, u[2], du, de[2], dv[2];
  float* dbetas;                                    // 32 vectors, whose lane sums are dbeta
  Panel dscores[2][2];                              // gradients of N and P, each in two panels
  Panel met_q[2], met_k[2], made[2], dq[2], dk[2];  // of one block: (32 channels, 32 tokens)
  Panel grad_q[2], grad_k[2];                       // of the part: (K, 32 tokens)
  float *dg, *entering, *leaving;                   // per token

  Factor<2> columns;               // a panel of a state
  Factor<kGradPieces> do_columns;  // a panel of do
  Factor<2> P_transposed;          // scale P^T as A
  Factor<2> rows;                  // rows to be converted to B, as A
  Factor<kGradPieces> do_rows;     // do as A; do^T as B
  Factor<kGradPieces> do_transposed;
  Factor<2> de_rows, de_transposed, u_transposed;
  Factor<2> from_q, from_k;           // e^G do and e^G de of each panel, as B
  Factor<2> state_rows, dstate_rows;  // a block of channels as A
  Factor<2> dP_by_key, dP_by_query, dN_by_key, dN_by_query;  // as B; terms are keys or queries

  TileBackward(const RecurrenceBackwardParams& x, void* memory, HeadRange range)
      : params(x),
        heads(range),
        room(memory),
        c(p, room, true),
        blocks(ceil_div(p.value_width, kTileTerms)),
        panels(2 * blocks),
        scale(static_cast<float>(p.scale)) {
    constexpr int64_t kRows = kTokens * kPanel;
    const int64_t elements = TileState::elements(panels, c.steps * kTileTerms);
    dstates = room.take(group * params.parts * elements);
    of_update = room.take(panels * kRows), inside = room.take(panels * kRows);
    if (kDelta) state = room.take(elements);
    if (kDelta) of_key = room.take(panels * kRows), error = take_panel(room, kTokens);
    du = take_panel(room, kTokens);
    dbetas = room.take(kRows);
    for (int i = 0; i < 2; ++i) {
      for (Panel* panel : {&turned[i], &u[i], &de[i], &dv[i], &dscores[0][i], &dscores[1][i],
                           &met_q[i], &met_k[i], &made[i], &dq[i], &dk[i]}) {
        *panel = take_panel(room, kTokens);
      }
      grad_q[i] = take_panel(room, c.steps * kTileTerms);
      grad_k[i] = take_panel(room, c.steps * kTileTerms);
    }
    dg = room.take(kTokens), entering = room.take(kTokens), leaving = room.take(kTokens);
    take(room, c.steps, 1, columns), take(room, 1, 1, do_columns);
    take(room, 1, 2, P_transposed), take(room, 1, 2, rows);
    take(room, blocks, 2, do_rows), take(room, blocks, 2, do_transposed);
    take(room, blocks, 2, u_transposed);
    take(room, panels, 1, from_q);
    take(room, blocks, 2, state_rows), take(room, blocks, 2, dstate_rows);
    take(room, 1, 2, dP_by_key), take(room, 1, 2, dP_by_query);
    if (!kDelta) return;
    take(room, blocks, 2, de_rows), take(room, blocks, 2, de_transposed);
    take(room, panels, 1, from_k);
    take(room, 1, 2, dN_by_key), take(room, 1, 2, dN_by_query);
  }

  void load(int64_t h, const float* from) { dstate_of(h).load(from); }
  void store(int64_t h, float* to) { dstate_of(h).store(to); }

  void chunk(const RecurrenceSequence& s, int64_t first, int64_t n, int64_t part) {
    const int64_t t = s.begin + first, key_head = part / params.shards;
    const bool same_keys = part * group > heads.first && part % params.shards > 0;
    if (!same_keys) c.load(s.batch, t, n, key_head);
    for (int64_t h = part * group; h < (part + 1) * group; ++h) {
      head(s, t, s.slot + first / kTokens, h, h == part * group);
    }
    const int64_t batches = p.boundaries == nullptr ? p.sequences : 1;
    const int64_t batch = part % params.shards * batches + s.batch;
    const auto write = [&]<class T>(T, void* to, const Panel(&x)[2]) {
      write_rows(x, out_row<T>(p, to, batch, t, p.key_heads, key_head, p.key_width));
    };
    if (params.shards == 1) {
      write(bf16{}, params.dq, grad_q), write(bf16{}, params.dk, grad_k);
    } else {
      write(float{}, params.dq, grad_q), write(float{}, params.dk, grad_k);
    }
  }

 private:
  TileState in_panels(float* x) const { return {p, x, panels, c.steps * kTileTerms}; }
  TileState dstate_of(int64_t h) const {
    const int64_t elements = TileState::elements(panels, c.steps * kTileTerms);
    return in_panels(dstates + (h - heads.first) * elements);
  }
  static Panel of_panel(float* x, int64_t i) { return {x + i * kTokens * kPanel}; }

  void head(const RecurrenceSequence& s, int64_t t, int64_t slot, int64_t h, bool first_of_part) {
    const int64_t batch = s.batch, n = c.rows, V = p.value_width;
    const bool last = h + 1 == heads.end;
    const int64_t next = last ? heads.first : h + 1, next_t = last ? t - kTokens : t;
    Ahead ahead{[&](int64_t i) {
      if (next_t < s.begin) return;
      prefetch_token<float>(p, batch, next_t + i, next);
      if (params.grad_o.data != nullptr) {
        prefetch_row(row_of<G>(params.grad_o, batch, next_t + i, next), V * sizeof(G));
      }
    }};
    const float* const saved = state_of<float>(p, params.states, slot, h);
    if constexpr (kDelta) in_panels(state).load(saved);
    const TileState dstate = dstate_of(h);
    c.load_head(batch, t, h);
    const TokenRows<> v(p.v, batch, t, n, h, V);
    const TokenRows<G> grad_o(params.grad_o, batch, t, n, h, V);
    transpose_scores();
    pack_rows(grad_o);
    for (int64_t i = 0; i < panels; ++i) {
      ahead.ask_until((i + 1) * n / panels);
      meet(grad_o, dstate.panel(i), i);
    }
    if (params.dbeta != nullptr) {
      for (int64_t i = 0; i < kTokens; ++i) Panel{dbetas}.set(i, VecF(0.0f));
    }
    const float* const skip = head_row<const float>(p, p.skip, s.index, h, V);
    float* const dskip = head_row<float>(p, params.dskip, s.index, h, V);
    const int64_t stride = p.value_heads * V;
    const RowsOut values(out_row<bf16>(p, params.dv, batch, t, p.value_heads, h, V), stride, V);
    for (int64_t b = 0; b < blocks; ++b) {
      for (int half = 0; half < 2; ++half) update(v, grad_o, skip, dskip, 2 * b + half, half);
      pack_block(b);
      for (int64_t i = 0; i < n; ++i) values.set(i, b * kTileTerms, dv[0].at(i), dv[1].at(i));
    }
    for (int64_t i = 0; params.dbeta != nullptr && i < n; ++i) {
      *out_row<float>(p, params.dbeta, batch, t + i, p.value_heads, h, 1) =
          reduce_add(Panel{dbetas}.at(i));
    }
    score_gradients();
    float carried = 0;
    for (int half = 0; half < 2; ++half) {
      OMNIATTN_ISA::store(entering + half * kPanel, VecF(0.0f));
      OMNIATTN_ISA::store(leaving + half * kPanel, VecF(0.0f));
    }
    for (int64_t block = 0; block < c.steps; ++block) {
      carried += pack_states(saved, dstate, block);
      rows_of_block(block, first_of_part);
    }
    for (int64_t i = 0; i < panels; ++i) {
      const Panel panel = dstate.panel(i);
      if constexpr (kDelta) add_products(c.key_channels, c.steps, from_k.after(i), panel);
      add_products(c.query_channels, c.steps, from_q.after(i), panel);
    }
    if (params.dg == nullptr) return;
    float* const to = out_row<float>(p, params.dg, batch, t, p.value_heads, h, 1);
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) dg[i] += carried, carried += leaving[i];
    for (int64_t i = n; i-- > 0;) to[i * p.value_heads] = dg[i] + (sum += entering[i]);
  }

  // Stores P^T times the scale, as A.
  [[gnu::noinline]] void transpose_scores() const {
    for (int part = 0; part < 2; ++part) {
      for (int half = 0; half < 2; ++half) {
        store_transposed(c.P[part].row(half * kPanel), kPanel, kPanel, kPanel, scale,
                         turned[half].row(part * kPanel), kPanel);
      }
    }
    for (int64_t i = 0; i < kTokens; ++i) {
      store_row_pieces(P_transposed, 0, i, turned[0].at(i), turned[1].at(i));
    }
  }

  [[gnu::noinline]] void pack_rows(TokenRows<G> grad_o) const {
    if constexpr (kGradPieces == 1) {
      TileChunk::set_rows(grad_o, blocks, do_rows);
    } else {
      for (int64_t t = 0; t < kTokens; ++t) {
        for (int64_t b = 0; b < blocks; ++b) {
          const int64_t j = b * kTileTerms;
          store_row_pieces(do_rows, b, t, grad_o.at(t, j), grad_o.at(t, j + kPanel));
        }
      }
    }
  }

  // Computes products of a panel: k S, k dS' and scale P^T do.
  [[gnu::noinline]] void meet(TokenRows<G> grad_o, Panel dstate, int64_t i) {
    const Factor<1> keys = c.readers;
    if constexpr (kDelta) {
      const Panel from = in_panels(state).panel(i);
      pack_columns(c.steps, columns, [=](int64_t d) OMNIATTN_LAMBDA { return from.at(d); });
      multiply_column<2>(keys, columns, c.steps, of_panel(of_key, i));
    }
    pack_columns(c.steps, columns, [=](int64_t d) OMNIATTN_LAMBDA { return dstate.at(d); });
    multiply_column<2>(keys, columns, c.steps, of_panel(of_update, i));
    if constexpr (kGradPieces == 1) {
      for (int64_t pair = 0; pair < kTileTerms / 2; ++pair) {
        store_pairs(do_columns.tile(0, 0, 0) + pair * kTileTerms,
                    grad_o.pairs(2 * pair, i * kPanel));
      }
    } else {
      pack_columns(1, do_columns,
                   [=](int64_t t) OMNIATTN_LAMBDA { return grad_o.at(t, i * kPanel); });
    }
    multiply_column<2>(P_transposed, do_columns, 1, of_panel(inside, i));
  }

  // Computes u, de, dv and shares of dbeta and dskip of a panel, which is one half of a block.
  [[gnu::noinline]] void update(TokenRows<> v, TokenRows<G> grad_o, const float* skip, float* dskip,
                                int64_t i, int half) {
    const float *const in = c.decay.in, *const out = c.decay.out, *const beta = c.beta;
    const int64_t j = i * kPanel, left = p.value_width - j;
    const Panel x = u[half], dx = du, e = kDelta ? error : x, d = de[half];
    for (int64_t t = 0; t < kTokens; ++t) {
      const VecF value = v.at(t, j);
      if constexpr (kDelta) {
        e.set(t, of_panel(of_key, i).at(t) * in[t] - value);
      } else {
        x.set(t, value * beta[t]);
      }
      dx.set(t, fma(of_panel(of_update, i).at(t), VecF(out[t]), of_panel(inside, i).at(t)));
    }
    if constexpr (kDelta) c.solve(e, x), c.solve_gradient(dx, d);
    const Panel sums{dbetas};
    for (int64_t t = 0; params.dbeta != nullptr && t < kTokens; ++t) {
      sums.set(t, kDelta ? sums.at(t) - e.at(t) * dx.at(t) : fma(v.at(t, j), dx.at(t), sums.at(t)));
    }
    const VecF factor = skip == nullptr ? VecF(0.0f) : load_n(skip + j, left) * scale;
    VecF of_skip(0.0f);
    for (int64_t t = 0; t < c.rows; ++t) {
      const VecF grad = grad_o.at(t, j);
      VecF dvalue = kDelta ? -d.at(t) : dx.at(t) * beta[t];
      if (skip != nullptr) dvalue = fma(factor, grad, dvalue);
      if (dskip != nullptr) of_skip = fma(grad, v.at(t, j), of_skip);
      dv[half].set(t, dvalue);
    }
    if (dskip != nullptr) store_n(dskip + j, load_n(dskip + j, left) + of_skip * scale, left);
    pack_columns(1, from_q.after(i), [=, scale = scale](int64_t t) OMNIATTN_LAMBDA {
      return grad_o.at(t, j) * (scale * in[t]);
    });
    if constexpr (kDelta) {
      pack_columns(1, from_k.after(i), [=](int64_t t) OMNIATTN_LAMBDA { return d.at(t) * in[t]; });
    }
  }

  // Packs the rows of do, u and de of a block as operands.
  [[gnu::noinline]] void pack_block(int64_t b) {
    for (int64_t t = 0; t < kTokens; ++t) {
      store_row_pieces(rows, 0, t, u[0].at(t), u[1].at(t));
      if constexpr (kDelta) store_row_pieces(de_rows, b, t, de[0].at(t), de[1].at(t));
    }
    rows_to_columns(rows, u_transposed.after(b), 0);
    rows_to_columns(do_rows, do_transposed, b);
    if constexpr (kDelta) rows_to_columns(de_rows, de_transposed, b);
  }

  // Computes dP and dN and their shares of dg, and packs them with their decays as operands.
  [[gnu::noinline]] void score_gradients() {
    auto& [dN, dP] = dscores;
    multiply_block(do_rows, u_transposed, blocks, dP);
    if constexpr (kDelta) multiply_block(de_rows, u_transposed, blocks, dN);
    for (int part = 0; part < 2; ++part) {
      for (int64_t i = 0; i < kTokens; ++i) {
        dP[part].set(i, TileChunk::lower(dP[part].at(i) * scale, i + 1, part));
        if (kDelta) dN[part].set(i, TileChunk::lower(dN[part].at(i), i, part));
      }
    }
    if (params.dg != nullptr) across();
    for (int part = 0; part < 2; ++part) {
      for (int64_t i = 0; i < kTokens; ++i) {
        const VecF factor = c.between(i, part);
        dP[part].set(i, dP[part].at(i) * factor);
        if (kDelta) dN[part].set(i, dN[part].at(i) * factor);
      }
    }
    pack_scores(dP, dP_by_key, dP_by_query);
    if constexpr (kDelta) pack_scores(dN, dN_by_key, dN_by_query);
  }
  void pack_scores(const Panel (&x)[2], Factor<2> by_key, Factor<2> by_query) const {
    for (int64_t i = 0; i < kTokens; ++i) store_row_pieces(rows, 0, i, x[0].at(i), x[1].at(i));
    rows_to_columns(rows, by_key, 0);
    for (int half = 0; half < 2; ++half) {
      const Panel of_keys = x[half];
      pack_columns(1, by_query.from(half),
                   [=](int64_t i) OMNIATTN_LAMBDA { return of_keys.at(i); });
    }
  }
  // See HeadDecay::across.
  void across() {
    const auto& [dN, dP] = dscores;
    VecF columns_of[2] = {VecF(0.0f), VecF(0.0f)};
    for (int64_t t = kTokens; t-- > 0;) {
      VecF sum(0.0f);
      for (int part = 0; part < 2; ++part) {
        VecF& x = columns_of[part];
        x = fma(dP[part].at(t), c.P[part].at(t), x);
        if (kDelta) x = fma(dN[part].at(t), c.N[part].at(t), x);
        sum += TileChunk::lower(x, t, part);
      }
      dg[t] = reduce_add(sum);
    }
  }

  // Packs the rows of S and dS' of a block of channels as A, decays dS' over the chunk, and returns
  // the product of S with the decayed dS'.
  [[gnu::noinline]] float pack_states(const float* saved, const TileState& dstate,
                                      int64_t block) const {
    const VecF end(c.decay.end);
    VecF sum(0.0f);
    for (int64_t i = 0; i < kTileTerms; ++i) {
      const int64_t d = block * kTileTerms + i;
      const auto row = [&](int64_t panel) {
        return kDelta ? in_panels(state).panel(panel).at(d) : dstate.part_of_row(saved, d, panel);
      };
      for (int64_t b = 0; b < blocks; ++b) {
        const Panel first = dstate.panel(2 * b), second = dstate.panel(2 * b + 1);
        const VecF x = row(2 * b), y = row(2 * b + 1), dx = first.at(d), dy = second.at(d);
        store_row_pieces(state_rows, b, i, x, y);
        store_row_pieces(dstate_rows, b, i, dx, dy);
        first.set(d, dx * end), second.set(d, dy * end);
        sum = fma(x, dx * end, fma(y, dy * end, sum));
      }
    }
    return reduce_add(sum);
  }

  // Computes dq and dk of a block of channels, and their shares of dg.
  [[gnu::noinline]] void rows_of_block(int64_t block, bool first_of_part) {
    const Factor<1> keys = c.key_channels.after(block), queries = c.query_channels.after(block);
    multiply_block(state_rows, do_transposed, blocks, met_q);
    multiply_block(dstate_rows, u_transposed, blocks, made);
    multiply_block(keys, dP_by_key, 1, dq);
    if constexpr (kDelta) {
      multiply_block(state_rows, de_transposed, blocks, met_k);
      multiply_block(queries, dP_by_query, 1, dk, keys, dN_by_key, dN_by_query);
    } else {
      multiply_block(queries, dP_by_query, 1, dk);
    }
    for (int half = 0; half < 2; ++half) {
      const VecF in = OMNIATTN_ISA::load(c.decay.in + half * kPanel), of_query = in * scale;
      const VecF out = OMNIATTN_ISA::load(c.decay.out + half * kPanel);
      VecF enters = OMNIATTN_ISA::load(entering + half * kPanel);
      VecF leaves = OMNIATTN_ISA::load(leaving + half * kPanel);
      for (int64_t i = 0; i < kTileTerms; ++i) {
        const auto input = [&](Factor<1> x) OMNIATTN_LAMBDA {
          return OMNIATTN_ISA::load(x.tile(0, 0, i / kPanel) + i % kPanel * kTileTerms +
                                    half * kPanel);
        };
        const VecF q = input(queries), k = input(keys);
        const VecF met = met_q[half].at(i) * of_query, key = made[half].at(i) * out;
        enters = fma(q, met, enters);
        leaves = fma(k, key, leaves);
        VecF of_q = met + dq[half].at(i), of_k = key + dk[half].at(i);
        if constexpr (kDelta) {
          const VecF probe = met_k[half].at(i) * in;
          enters = fma(k, probe, enters);
          of_k += probe;
        }
        const int64_t d = block * kTileTerms + i;
        if (!first_of_part) of_q += grad_q[half].at(d), of_k += grad_k[half].at(d);
        grad_q[half].set(d, of_q), grad_k[half].set(d, of_k);
      }
      OMNIATTN_ISA::store(entering + half * kPanel, enters);
      OMNIATTN_ISA::store(leaving + half * kPanel, leaves);
    }
  }

  // Writes rows of tokens from gradients (K, 32 tokens).
  template <class T>
  [[gnu::noinline]] void write_rows(const Panel (&x)[2], T* to) const {
    const RowsOut<T> out(to, p.key_heads * p.key_width, p.key_width);
    for (int half = 0; half < 2; ++half) {
      for (int64_t d = 0; d < p.key_width; d += kTileTerms) {
        VecF first[kPanel], second[kPanel];
#pragma GCC unroll 16
        for (int i = 0; i < kPanel; ++i) {
          first[i] = x[half].at(d + i), second[i] = x[half].at(d + kPanel + i);
        }
        transpose(first);
        transpose(second);
        for (int64_t i = 0; i < smaller(kPanel, c.rows - half * kPanel); ++i) {
          out.set(half * kPanel + i, d, first[i], second[i]);
        }
      }
    }
  }
};

// Calls f.operator()<Form>() with the form of a call.
template <class F>
void with_form(const Recurrence& p, const F& f) {
  const auto of_gradient = [&]<class G>(G) {
    p.delta ? f.template operator()<TileBackward<true, G>>()
            : f.template operator()<TileBackward<false, G>>();
  };
  p.o_dtype == p.dtype ? of_gradient(bf16{}) : of_gradient(float{});
}

int64_t bytes(const Recurrence& p, int64_t shards, int64_t parts) {
  RecurrenceBackwardParams params{};
  params.recurrence = p, params.shards = shards, params.parts = parts;
  int64_t result = 0;
  with_form(p, [&]<class Form>() { result = Form(params, nullptr, {}).room.bytes(); });
  return result;
}

void backward(const RecurrenceBackwardParams& params, void* memory, int64_t begin, int64_t end) {
  const FlushDenormals flush;
  const TileScope scope;
  const Recurrence& p = params.recurrence;
  OMNIATTN_ASSERT_ITEMS(begin, end,
                        p.sequences * ceil_div(p.key_heads * params.shards, params.parts));
  OMNIATTN_ASSERT_HAS(memory, bytes(p, params.shards, params.parts));
  with_form(p, [&]<class Form>() {
    for (int64_t i = begin; i < end; ++i) backward_item<float, Form>(params, memory, i);
  });
  stream_fence();
}

}  // namespace

extern const RecurrenceBackwardKernels recurrence_tile_backward_kernels_table;
const RecurrenceBackwardKernels recurrence_tile_backward_kernels_table{bytes, backward};

}  // namespace omniattn::OMNIATTN_ISA
