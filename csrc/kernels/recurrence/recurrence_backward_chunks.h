// Backward of matrix-state recurrences, see recurrence.h: processes chunks in reverse and
// recomputes each from the state S at its start. S' is the state at its end, d marks
// gradients, and do includes the scale:
//
//   du = P^T do + k_out dS'          x and de from du by the update; dv = -de = beta x (delta)
//   dP = tril(do u^T), dN = tril(de u^T, -1), to which the decay is then applied
//   met = [de; do] S^T, made = u dS'^T       parts of the gradients of rows through S and S'
//   dS = e^(G_C) dS' + probe_in^T de + q_in^T do
//
// de is the gradient of the prediction probe_in S + N u; dS' stays in the thread's memory. With
// decays of values, see recurrence_value_decay.h, met and dS have in * do in place of do, and made
// has out * u in place of u.
#pragma once

#include "kernels/recurrence/recurrence_backward.h"
#include "kernels/recurrence/recurrence_policy.h"
#include "kernels/recurrence/recurrence_sums.h"
#include "kernels/recurrence/recurrence_value_decay.h"
#include "runtime/denormals.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C, class Decay, class Update>
struct Backward {
  static constexpr int kKeys = Update::kKeys, kRows = 2 * kKeys;
  const RecurrenceBackwardParams& params;
  const Recurrence& p = params.recurrence;
  const int64_t size = recurrence_chunk(p);
  const int64_t group = group_of(params);
  const HeadRange heads;
  Room<C> room;
  Chunk<C> c;
  Decay decay;
  Sums<C> sums;
  ValueDecayBackward<C> values;
  Matrix<C> x, out;          // see above; out is [de; do]
  Matrix<C> state, dstates;  // S, and dS' of each value head of the item
  Matrix<C> dcolumns{};      // gradients of z of each value head
  Matrix<C> drows;           // [dk; dq; da; db], summed over the group
  ChunkGradient<C> d;

  Backward(const RecurrenceBackwardParams& y, void* memory, HeadRange heads_)
      : params(y),
        heads(heads_),
        room(memory),
        c(p, room, packed_size(y.recurrence)),
        decay(p, room),
        sums(p, room),
        values(p, room) {
    const int64_t K = p.key_width, V = p.value_width;
    c.error = room.rows(size, V);
    x = room.rows(kKeys * size, V);
    out = room.rows(2 * size, V);
    state = room.rows(K, V);
    dstates = room.rows(K * group * params.parts, V);
    if (p.normalize) dcolumns = room.rows(group * params.parts, K);
    drows = room.rows(kRows * size, K);
    d.scores = room.rows(2 * size, recurrence_chunk(p.channel_decay));
    if (kKeys == 2) d.scores_b = room.rows(2 * size, size);
    d.met = room.rows(2 * size, K);
    d.made = room.rows(kKeys * size, K);
    d.carried = room.take(K);
  }

  void load(int64_t h, const C* from) {
    if (from != nullptr) return load_state(p, from, dstate_of(h), dcolumn_of(h));
    zero_rows(dstate_of(h), p.key_width, p.value_width);
    if (p.normalize) zero_rows(Matrix<C>{dcolumn_of(h), 0}, 1, p.key_width);
  }
  void store(int64_t h, C* to) { store_state(p, dstate_of(h), dcolumn_of(h), to); }

  void chunk(const RecurrenceSequence& s, int64_t first, int64_t n, int64_t part) {
    const int64_t t = s.begin + first, K = p.key_width;
    const int64_t key_head = part / params.shards, shard = part % params.shards;
    const bool same_keys = part * group > heads.first && shard > 0;
    if (!same_keys) c.load(s.batch, t, n, key_head);
    zero_rows(drows, kRows * n, K);
    d.dk = drows, d.dq = drows.at(n);
    if (kKeys == 2) d.da = drows.at(2 * n), d.db = drows.at(3 * n);
    for (int64_t h = part * group; h < (part + 1) * group; ++h) {
      head(s, t, s.slot + first / size, h, same_keys || h % group > 0);
    }
    of_features(p.features, c.k, d.dk, n, K);
    of_features(p.features, c.q, d.dq, n, K);
    const DType dtype = params.shards == 1 ? p.dtype : kComputed<C>;
    const int64_t batches = p.boundaries == nullptr ? p.sequences : 1;
    const auto write = [&](Matrix<C> rows, void* to) {
      stream_rows(dtype, rows, n, K,
                  out_row(dtype, p, to, shard * batches + s.batch, t, p.key_heads, key_head, K),
                  p.key_heads * K);
    };
    write(d.dk, params.dk);
    write(d.dq, params.dq);
    if (kKeys == 2) write(d.da, params.da), write(d.db, params.db);
  }

 private:
  bool decays_values() const { return Update::kValueDecay && values.present(); }
  Matrix<C> dstate_of(int64_t h) const { return dstates.at((h - heads.first) * p.key_width); }
  C* dcolumn_of(int64_t h) const { return dcolumns.row(h - heads.first); }
  static int64_t packed_size(const Recurrence& p) {
    const int64_t K = p.key_width, V = p.value_width, size = recurrence_chunk(p);
    const int64_t of_rows = packed_elements<C>(larger(K, V), size);
    return larger(of_rows, packed_elements<C>(V, K));
  }

  void head(const RecurrenceSequence& s, int64_t t, int64_t slot, int64_t h, bool same_keys) {
    const int64_t batch = s.batch, n = c.rows, K = c.K, V = c.V;
    const Matrix<C> grad_o = out.at(n), dstate = dstate_of(h);
    const C *const saved = state_of<C>(p, params.states, slot, h), *const z = saved + K * V;
    const bool last = h + 1 == heads.end;
    const int64_t next = last ? heads.first : h + 1, next_t = last ? t - size : t;
    Ahead ahead{[&](int64_t i) {
      if (next_t < s.begin) return;
      prefetch_token<C>(p, batch, next_t + i, next);
      if (params.grad_o.data != nullptr) {
        prefetch_row(row_of(p.o_dtype, params.grad_o, batch, next_t + i, next),
                     V * size_of(p.o_dtype));
      }
    }};
    c.load_update(s, t, h);
    decay.apply(c, batch, t, h, same_keys, ahead);
    copy_rows(saved, V, K, V, state);
    if constexpr (Update::kProbe) multiply(c.probe_in, state, c.error, n, V, K, Into::set);
    Update::values(c);
    if (params.grad_o.data != nullptr) {
      load_rows(p.o_dtype, row_of(p.o_dtype, params.grad_o, batch, t, h), params.grad_o.step, n, V,
                grad_o, static_cast<C>(p.scale));
    } else {
      zero_rows(grad_o, n, V);
    }
    if (p.normalize) {
      sums.find(c, z, batch, t, h);
      sums.divide(c, grad_o);
    }
    c.meet(c.k_out, dstate, x, kKeys * n, ahead);
    // Rows of the probe come first, if there is a probe.
    const int64_t skip = Update::kProbe ? 0 : n, rows = 2 * n - skip;
    Matrix<const C> added = c.u, readers = out.at(skip);
    if (decays_values()) {
      values.load(batch, t, h, n);
      std::tie(readers, added) = values.gradient(c.P, c.u, grad_o, x, d.scores.at(n));
    } else {
      multiply_lower_transposed(c.P, grad_o, x, n, V, Into::add);
    }
    if constexpr (kKeys == 2) {
      multiply_lower_transposed(c.P_b, grad_o, x.at(n), n, V, Into::add);
    }
    if constexpr (Update::kProbe) Update::gradient(c, x, out);
    write_values(s, t, h);
    if (!decays_values()) score_gradients(c.u, d.scores);
    if constexpr (kKeys == 2) score_gradients(c.u.at(n), d.scores_b);
    pack_columns<C>(dstate, K, V, c.packed);
    multiply(added, packed_panels(c.packed, V), d.made, kKeys * n, K, V, Into::set);
    pack_columns<C>(state, K, V, c.packed);
    multiply(readers, packed_panels(c.packed, V), d.met.at(skip), rows, K, V, Into::set);
    if (p.normalize) {
      const auto of_tokens = [&](void* to) {
        return to == nullptr ? nullptr : out_row<C>(p, to, batch, t, p.value_heads, h, 1);
      };
      sums.gradient(c, d, z, dcolumn_of(h), of_tokens(params.dmin_denominator),
                    of_tokens(params.dbeta), p.value_heads);
      decay.decay_column(dcolumn_of(h), K);
    }
    for (int64_t i = 0; i < K; ++i) {
      decay.decay_row(dstate.row(i), i, V);
      if (decays_values()) values.decay_row(dstate.row(i));
      if (params.dg == nullptr) continue;
      d.carried[i] = dot(state.row(i), dstate.row(i), V);
      if (p.normalize) d.carried[i] += z[i] * dcolumn_of(h)[i];
    }
    if (p.normalize) sums.retreat(c, dcolumn_of(h));
    if (params.dgv != nullptr) {
      multiply(c.q_in, state, c.error, n, V, K, Into::set);
      values.write(c.error, state, dstate, out_row<C>(p, params.dgv, batch, t, p.value_heads, h, V),
                   p.value_heads * V);
    }
    multiply<ALayout::kTransposed>(c.probe_in.at(skip), readers, dstate, K, V, rows, Into::add);
    d.dbonus = head_row<C>(p, params.dbonus, s.index, h, K);
    const bool channels = p.channel_decay;
    C* const dg = params.dg == nullptr
                      ? nullptr
                      : out_row<C>(p, params.dg, batch, t, p.value_heads, h, channels ? K : 1);
    decay.gradient(c, d, dg, p.value_heads * (channels ? K : 1));
  }

  // [dN; dP] for the updates u.
  void score_gradients(Matrix<const C> u, Matrix<C> scores) {
    const int64_t n = c.rows, V = c.V;
    pack_columns(u, n, V, c.packed);
    for_blocks(n, [&](int64_t i, int64_t m) {
      if constexpr (Update::kProbe) multiply_to_lower(out, c.packed, scores, i, m, V);
      multiply_to_lower(out.at(n), c.packed, scores.at(n), i, m, V);
    });
  }

  // dbeta = x . (v - prediction), without the prediction if the update is plain. dv is -de for a
  // delta update, otherwise computed by the update.
  void write_values(const RecurrenceSequence& s, int64_t t, int64_t h) {
    const int64_t V = p.value_width;
    for (int64_t i = 0; params.dbeta != nullptr && i < c.rows; ++i) {
      *out_row<C>(p, params.dbeta, s.batch, t + i, p.value_heads, h, 1) =
          c.delta ? -dot(c.error.row(i), x.row(i), V) : dot(c.v.row(i), x.row(i), V);
    }
    if constexpr (!Update::kProbe) {
      Update::gradient(c, x, out.at(c.rows), head_row<C>(p, params.dskip, s.index, h, V));
    }
    stream_rows(p.dtype, c.delta ? out : x, c.rows, V,
                out_row(p.dtype, p, params.dv, s.batch, t, p.value_heads, h, V), p.value_heads * V,
                c.delta ? C{-1} : C{1});
  }
};

template <class Update>
int64_t backward_bytes(const Recurrence& p, int64_t shards, int64_t parts) {
  int64_t result = 0;
  choose<Update>(p, [&]<class C, class Decay>() {
    RecurrenceBackwardParams params{};
    params.recurrence = p, params.shards = shards, params.parts = parts;
    result = Backward<C, Decay, Update>(params, nullptr, {}).room.bytes();
  });
  return result;
}

template <class Update>
void run_backward(const RecurrenceBackwardParams& params, void* memory, int64_t begin,
                  int64_t end) {
  const FlushDenormals flush;
  const Recurrence& p = params.recurrence;
  OMNIATTN_ASSERT_ITEMS(begin, end,
                        p.sequences * ceil_div(p.key_heads * params.shards, params.parts));
  OMNIATTN_ASSERT_HAS(memory, backward_bytes<Update>(p, params.shards, params.parts));
  choose<Update>(p, [&]<class C, class Decay>() {
    for (int64_t i = begin; i < end; ++i) {
      backward_item<C, Backward<C, Decay, Update>>(params, memory, i);
    }
  });
  stream_fence();
}

// Kernels of calls with this update.
template <class Update>
inline constexpr RecurrenceBackwardKernels kBackwardKernels{backward_bytes<Update>,
                                                            run_backward<Update>};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
