// Backward of matrix-state recurrences, see recurrence.h: chunks in reverse, each computed again
// from the state at its start. With S' the state at its end and d for gradients:
//
//   du = P^T do + k_out dS'          x, de from du by the update, dv = -de = beta x
//   dP = tril(do u^T), dN = tril(de u^T, -1), to which the decay applies
//   met = [de; do] S^T, made = u dS'^T       parts of dk and dq across chunks
//   dS = e^(G_C) dS' + k_in^T de + q_in^T do
//
// de is the gradient of the prediction k_in S + N u; that of S' stays in memory of the thread.
#include "kernels/recurrence/recurrence_policy.h"
#include "runtime/denormals.h"
#include "runtime/dispatch.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class T, class Decay, class Update>
struct Backward {
  using C = compute_t<T>;
  const RecurrenceBackwardParams& params;
  const Recurrence& p = params.recurrence;
  const int64_t size = recurrence_chunk(p.channel_decay);
  const int64_t group = p.key_heads > 0 ? p.value_heads / p.key_heads : 0;
  Room<C> room;
  Chunk<C> c;
  Decay decay;
  Matrix<C> x, out;          // see above; [de; do]
  Matrix<C> state, dstates;  // S, and dS' of each value head of the group
  Matrix<C> dkq;             // [dk; dq], sums over the group
  ChunkGradient<C> d;

  Backward(const RecurrenceBackwardParams& y, void* memory)
      : params(y), room(memory), c(p, room, packed_size(y.recurrence)), decay(p, room) {
    const int64_t K = p.key_width, V = p.value_width;
    c.error = room.rows(size, V);
    x = room.rows(size, V);
    out = room.rows(2 * size, V);
    state = room.rows(K, V);
    dstates = room.rows(K * group, V);
    dkq = room.rows(2 * size, K);
    d.scores = room.rows(2 * size, size);
    d.met = room.rows(2 * size, K);
    d.made = room.rows(size, K);
    d.carried = room.take(K);
  }

  // All of sequence n.
  void run(const RecurrenceSequence& s, int64_t n, int64_t key_head) {
    const int64_t K = p.key_width, V = p.value_width;
    for (int64_t h = 0; h < group; ++h) {
      const Matrix<C> dstate = dstates.at(h * K);
      if (params.grad_final_state != nullptr) {
        copy_rows(state_of<C>(p, params.grad_final_state, n, key_head * group + h), V, K, V,
                  dstate);
      } else {
        zero_rows(dstate, K, V);
      }
    }
    for (int64_t t = (s.count - 1) / size * size; s.count > 0 && t >= 0; t -= size) {
      chunk(s, t, smaller(size, s.count - t), key_head);
    }
    for (int64_t h = 0; params.dinitial_state != nullptr && h < group; ++h) {
      const Matrix<C> dstate = dstates.at(h * K);
      copy_rows(dstate.data, dstate.stride, K, V,
                state_of<C>(p, params.dinitial_state, n, key_head * group + h), V);
    }
  }

 private:
  static int64_t packed_size(const Recurrence& p) {
    const int64_t K = p.key_width, V = p.value_width, size = recurrence_chunk(p.channel_decay);
    const int64_t of_rows = packed_elements<C>(larger(K, V), size);
    return larger(of_rows, packed_elements<C>(V, K));
  }

  void chunk(const RecurrenceSequence& s, int64_t first, int64_t n, int64_t key_head) {
    const int64_t t = s.begin + first, K = p.key_width;
    c.template load<T>(s.batch, t, n, key_head);
    zero_rows(dkq, 2 * n, K);
    d.dk = dkq, d.dq = dkq.at(n);
    for (int64_t h = 0; h < group; ++h) {
      head(s, t, s.slot + first / size, key_head * group + h, dstates.at(h * K));
    }
    const int64_t stride = p.key_heads * K;
    copy_rows(d.dk.data, dkq.stride, n, K,
              out_row<T>(p, params.dk, s.batch, t, p.key_heads, key_head, K), stride);
    copy_rows(d.dq.data, dkq.stride, n, K,
              out_row<T>(p, params.dq, s.batch, t, p.key_heads, key_head, K), stride,
              static_cast<C>(p.scale));
  }

  void head(const RecurrenceSequence& s, int64_t t, int64_t slot, int64_t h, Matrix<C> dstate) {
    const int64_t batch = s.batch, n = c.rows, K = c.K, V = c.V;
    const Matrix<C> grad_o = out.at(n);
    c.load_beta(batch, t, h);
    decay.apply(c, batch, t, h);
    copy_rows(state_of<C>(p, params.states, slot, h), V, K, V, state);
    if constexpr (Update::kDelta) multiply(c.k_in, state, c.error, n, V, K, Into::set);
    Update::values(c, row_of<T>(p.v, batch, t, h), p.v.step);
    if (params.grad_o.data != nullptr) {
      copy_rows(row_of<T>(params.grad_o, batch, t, h), params.grad_o.step, n, V, grad_o);
    } else {
      zero_rows(grad_o, n, V);
    }
    c.meet(c.k_out, dstate, x, n, [&](int64_t i) {
      prefetch_row<true>(out_row<T>(p, params.dv, batch, t + i, p.value_heads, h, V), V);
      const int64_t before = t - size + i;
      if (before < s.begin) return;
      c.template fetch<T>(batch, before, h);
      if (params.grad_o.data != nullptr) {
        prefetch_row(row_of<T>(params.grad_o, batch, before, h), V);
      }
    });
    multiply_lower_transposed(c.P, grad_o, x, n, V, Into::add);
    if constexpr (Update::kDelta) Update::gradient(c, x, out);
    write_values(batch, t, h);
    // Rows that belong to k come first, where there are any.
    const int64_t skip = Update::kDelta ? 0 : n, rows = 2 * n - skip;
    pack_bt(c.u.data, c.u.stride, V, n, c.packed);
    if constexpr (Update::kDelta) multiply_to_lower(out, c.packed, d.scores, n, V);
    multiply_to_lower(grad_o, c.packed, d.scores.at(n), n, V);
    pack_bt(dstate.data, dstate.stride, V, K, c.packed);
    multiply(c.u, packed_panels(c.packed, V), d.made, n, K, V, Into::set);
    pack_bt(state.data, state.stride, V, K, c.packed);
    multiply(out.at(skip), packed_panels(c.packed, V), d.met.at(skip), rows, K, V, Into::set);
    for (int64_t i = 0; i < K; ++i) {
      decay.decay_row(dstate.row(i), i, V);
      d.carried[i] = dot(state.row(i), dstate.row(i), V);
    }
    multiply<ALayout::kTransposed>(c.k_in.at(skip), out.at(skip), dstate, K, V, rows, Into::add);
    const bool channels = p.channel_decay;
    C* const dg = params.dg == nullptr
                      ? nullptr
                      : out_row<C>(p, params.dg, batch, t, p.value_heads, h, channels ? K : 1);
    decay.gradient(c, d, dg, p.value_heads * (channels ? K : 1));
  }

  // dv = -de, or x of a plain update, and dbeta = (v - prediction) . x.
  void write_values(int64_t batch, int64_t t, int64_t h) {
    const int64_t V = p.value_width;
    const Matrix<C> dv = Update::kDelta ? out : x;
    copy_rows(dv.data, dv.stride, c.rows, V,
              out_row<T>(p, params.dv, batch, t, p.value_heads, h, V), p.value_heads * V,
              C{Update::kDelta ? -1 : 1});
    if (!Update::kDelta || params.dbeta == nullptr) return;
    for (int64_t i = 0; i < c.rows; ++i) {
      *out_row<C>(p, params.dbeta, batch, t + i, p.value_heads, h, 1) =
          -dot(c.error.row(i), x.row(i), V);
    }
  }
};

int64_t bytes(const Recurrence& p) {
  int64_t result = 0;
  dispatch(p.dtype, [&]<class T>(T) {
    choose<T>(p, [&]<class S, class Decay, class Update>() {
      RecurrenceBackwardParams params{};
      params.recurrence = p;
      result = Backward<S, Decay, Update>(params, nullptr).room.bytes();
    });
  });
  return result;
}

void backward(const RecurrenceBackwardParams& params, void* memory, int64_t begin, int64_t end) {
  const FlushDenormals flush;
  const Recurrence& p = params.recurrence;
  dispatch(p.dtype, [&]<class T>(T) {
    choose<T>(p, [&]<class S, class Decay, class Update>() {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t n = i / p.key_heads;
        Backward<S, Decay, Update>(params, memory)
            .run(recurrence_sequence(p, n), n, i % p.key_heads);
      }
    });
  });
}

}  // namespace

extern const RecurrenceBackwardKernels recurrence_backward_kernels_table;
const RecurrenceBackwardKernels recurrence_backward_kernels_table{bytes, backward};

}  // namespace omniattn::OMNIATTN_ISA
