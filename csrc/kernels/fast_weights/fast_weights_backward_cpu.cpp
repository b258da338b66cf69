// Backward of fast weights, see fast_weights.h. With d for gradients, P the weights of pairs, W the
// writes of tokens into the momentum, and l the last token of the chunk:
//
//   du = -(P o q k^T)^T do - P_l k dM' + W_l k dS'      dP = -(do u^T) o q k^T, dP_l -= u . k dM'
//   dM = (A q)^T do + A_l dM'                           dS = -(F q)^T do - F_l dM' + m_l dS'
//
// and those of q and k from the same products. Then du goes through the norm to dz = k dN, and the
// gradients of P, W, A, F and m go back through the products of gates.
#include "kernels/fast_weights/fast_weights_chunk.h"
#include "kernels/recurrence/item_pass.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
struct Backward {
  static constexpr int kWidth = Chunk<C>::kWidth;
  const FastWeightsBackwardParams& params;
  const FastWeights& p = params.problem;
  const int64_t chunks = most_chunks(p, p.longest);
  // Only the first chunk has momentum at its start if each mini-batch is one chunk.
  const int64_t momenta =
      p.descent && p.mini_batch <= kMostTokens ? smaller(chunks, int64_t{1}) : chunks;
  Room<C> room;
  Chunk<C> c;
  Matrix<C> grad_o, du, dq, dk, read, slopes, dpairs, dwrites;
  C *dstep, *dkeep, *dgate, *dshare, *dof_momentum, *dof_weights, *dfrom_momentum;
  C *dweights, *dmomentum, *danchor;  // gradients of the model
  Matrix<C> dkeys, dvalues;           // of the keys and values held by the chunk after
  C *weights, *momentum, *anchor;     // at the starts of chunks; of the first mini-batch
  C *dw, *db;                         // of the item
  C *moved_weights, *moved_momentum, *moved_anchor;
  C* packed;
  int64_t* begins;  // first token of each chunk
  bool* moves;      // whether it has momentum at its start
  int64_t first_of_batch = 0;

  Backward(const FastWeightsBackwardParams& x, void* memory) : params(x), room(memory), c(p, room) {
    const int64_t V = p.value_width, size = c.size, most_keys = c.held + kMostTokens;
    grad_o = room.rows(kMostTokens, V), du = room.rows(most_keys, V);
    dq = room.rows(kMostTokens, c.R), dk = room.rows(most_keys, c.R);
    read = room.rows(most_keys, larger(c.R, V));
    slopes = room.rows(kMostTokens, most_keys), dpairs = room.rows(kMostTokens, most_keys);
    dwrites = room.rows(kMostTokens, most_keys);
    dkeys = room.rows(c.held, c.K), dvalues = room.rows(c.held, V);
    dstep = room.take(kMostTokens * p.window);
    for (C** each : {&dkeep, &dgate, &dshare, &dof_momentum, &dof_weights, &dfrom_momentum}) {
      *each = room.take(kMostTokens);
    }
    for (C** each : {&dweights, &dmomentum, &danchor, &anchor, &moved_weights, &moved_momentum,
                     &moved_anchor}) {
      *each = room.take(size);
    }
    weights = room.take(chunks * size), momentum = room.take(momenta * size);
    dw = room.take(V), db = room.take(V);
    packed = room.take(packed_elements<C>(V, larger(c.K, most_keys)));
    constexpr int64_t kNumber = sizeof(int64_t) / sizeof(C);
    begins = reinterpret_cast<int64_t*>(room.take(chunks * kNumber));
    moves = reinterpret_cast<bool*>(room.take(chunks));
  }

  void run(int64_t index) {
    const FastWeightsItem x = item_of(p, index);
    int64_t count = recompute(x);
    const auto incoming = [&](const void* from, C* to) {
      if (from == nullptr) return zero_rows(Matrix<C>{to, c.size}, 1, c.size);
      copy_rows(static_cast<const C*>(from) + x.index * c.size, 0, 1, c.size,
                Matrix<C>{to, c.size});
    };
    incoming(params.grad_weights, dweights);
    incoming(params.grad_momentum, dmomentum);
    incoming(params.grad_anchor, danchor);
    const auto incoming_rows = [&](const void* from, int64_t width, Matrix<C> to) {
      if (from == nullptr) return zero_rows(to, c.held, width);
      copy_rows(static_cast<const C*>(from) + c.first_held(x, width), p.heads * width, c.held,
                width, to);
    };
    incoming_rows(params.grad_keys, c.K, dkeys);
    incoming_rows(params.grad_values, c.V, dvalues);
    zero_rows(Matrix<C>{dw, p.value_width}, 1, p.value_width);
    zero_rows(Matrix<C>{db, p.value_width}, 1, p.value_width);
    // Without tokens, or at the start of a mini-batch, the anchor is the weights.
    const bool closed = (x.position + x.count) % p.mini_batch == 0;
    if (closed) join_anchor();
    while (count-- > 0) chunk(x, count);
    const auto result = [&](const C* from, void* to) {
      if (to == nullptr) return;
      copy_rows(from, 0, 1, c.size, Matrix<C>{static_cast<C*>(to) + x.index * c.size, c.size});
    };
    if (p.anchor == nullptr) join_anchor();
    result(dweights, params.dweights);
    result(dmomentum, params.dmomentum);
    result(danchor, params.danchor);
    c.store_held(x, dkeys, c.K, params.dkeys);
    c.store_held(x, dvalues, c.V, params.dvalues);
    const auto of_norm = [&](const C* from, void* to) {
      if (to == nullptr) return;
      copy_rows(from, 0, 1, c.V, Matrix<C>{static_cast<C*>(to) + x.index * c.V, c.V});
    };
    of_norm(dw, params.dw), of_norm(db, params.db);
  }

 private:
  C* momentum_of(int64_t chunk) const { return momentum + (momenta == 1 ? 0 : chunk * c.size); }
  // The gradient of the anchor is one of the weights.
  void join_anchor() {
    add_scaled<C>(1, danchor, 1, dweights, c.size);
    zero_rows(Matrix<C>{danchor, c.size}, 1, c.size);
  }

  // Finds the model at the start of each chunk; returns the number of chunks.
  int64_t recompute(const FastWeightsItem& x) {
    Model<C> model = c.begin(x, {moved_weights, moved_momentum, moved_anchor, false});
    copy_rows<C>(model.anchor, 0, 1, c.size, Matrix<C>{anchor, c.size});
    int64_t count = 0;
    for (int64_t t = 0; t < x.count; t += c.rows, ++count) {
      begins[count] = t, moves[count] = model.moves;
      copy_rows<C>(model.weights, 0, 1, c.size, Matrix<C>{weights + count * c.size, c.size});
      if (model.moves) {
        copy_rows<C>(model.momentum, 0, 1, c.size, Matrix<C>{momentum_of(count), c.size});
      }
      c.load(x, t);
      if (t + c.rows == x.count) continue;  // nothing reads its model
      c.descend(x, c.starts ? model.weights : model.anchor);
      c.move(model);
    }
    return count;
  }
  // The weights at the start of the mini-batch of a chunk.
  const C* anchor_of(const FastWeightsItem& x, int64_t chunk) const {
    while (true) {
      if ((x.position + begins[chunk]) % p.mini_batch == 0) return weights + chunk * c.size;
      if (chunk-- == 0) return anchor;
    }
  }

  void chunk(const FastWeightsItem& x, int64_t index) {
    const int64_t t = begins[index];
    const C* const start = weights + index * c.size;
    const C* const moving = moves[index] ? momentum_of(index) : nullptr;
    const C* const from = anchor_of(x, index);
    c.load(x, t);
    c.load_queries(x, t);
    c.descend(x, from);
    const int64_t n = c.rows;
    if (params.grad_o.data == nullptr) {
      zero_rows(grad_o, n, c.V);
    } else {
      load_rows(p.dtype, c.row(params.grad_o, x, t), params.grad_o.step, n, c.V, grad_o);
    }
    zero_rows(dpairs, n, c.pair_width());
    zero_rows(dwrites, n, c.pair_width());
    for (int64_t i = 0; i < n; ++i) dof_momentum[i] = dof_weights[i] = dfrom_momentum[i] = 0;
    through_model(start, moving);
    inside(x, t);
    through_reads(start, moving);
    through_descent(x, from, start);
    through_gates();
    write(x, t);
  }

  // Starts du and dk with the shares of the model after the chunk, and moves its gradients to the
  // start.
  [[gnu::noinline]] void through_model(const C* start, const C* moving) {
    const int64_t last = c.rows - 1;
    Into into = Into::set;
    if (!p.descent || c.ends) {
      through_state(dweights, c.pairs.row(last), -1, dpairs.row(last), into);
      into = Into::add;
    }
    if (!p.descent || !c.ends) {
      through_state(dmomentum, c.writes.row(last), 1, dwrites.row(last), into);
    }
    if (moving != nullptr && (!p.descent || c.ends)) {
      dfrom_momentum[last] -= dot(moving, dweights, c.size);
    }
    if (moving != nullptr && (!p.descent || !c.ends)) {
      dof_momentum[last] += dot(moving, dmomentum, c.size);
    }
    if (moving != nullptr && p.descent && c.ends) {
      convert_rows(dweights, 0, 1, c.size, dmomentum, 0, -c.from_momentum[last]);
    } else if (moving != nullptr) {
      const C share = p.descent ? C{0} : -c.from_momentum[last];
      add_scaled(share, dweights, c.of_momentum[last], dmomentum, c.size);
    }
    if (p.descent) return;
    dof_weights[last] += dot(start, dweights, c.size);
    c.scale(c.of_weights[last], dweights);
  }
  // The shares of a state that has sign factors_s k_s u_s^T.
  void through_state(const C* gradient, const C* factors, C sign, C* dfactors, Into into) {
    const int64_t n = c.keys(), K = c.K, V = c.V;
    const Matrix<const C> after{gradient, V};
    multiply(c.k, after, read, n, V, c.R, Into::set);
    for (int64_t i = 0; i < n; ++i) {
      dfactors[i] += sign * dot(read.row(i), c.u.row(i), V);
      const Vec<C> factor(sign * factors[i]);
      const C* const found = read.row(i);
      const C* const gradient_of_k = c.u.row(i);
      C *const to = du.row(i), *const scaled = read.row(i);
      for_row<C>(V, [=](int64_t j, auto part) {
        const Vec<C> share = part.load(found + j) * factor;
        part.store(to + j, into == Into::set ? share : share + part.load(to + j));
        part.store(scaled + j, part.load(gradient_of_k + j) * factor);
      });
    }
    pack_columns<C>(after, K, V, packed);
    multiply(read, packed_panels(packed, V), dk, n, K, V, into);
  }

  // Adds the shares of pairs of tokens of the chunk.
  [[gnu::noinline]] void inside(const FastWeightsItem& x, int64_t t) {
    const int64_t n = c.rows, width = c.pair_width();
    c.multiply_pairs();
    pack_columns(c.u, c.keys(), c.V, packed);
    for_blocks(n, [&](int64_t i, int64_t m) {
      multiply_to_lower(grad_o, packed, slopes, i, m, c.V, c.held);
    });
    for (int64_t i = 0; i < n; ++i) {
      prefetch(x, t - n + i);
      for (int64_t j = 0; j < width; j += kWidth) {
        C *const product = c.products.row(i) + j, *const slope = slopes.row(i) + j;
        C* const dpair = dpairs.row(i) + j;
        const Mask<C> seen = lanes_below<C>(c.held + i + 1 - j);
        const Vec<C> met = load(product), found = -load(slope), pair = load(c.pairs.row(i) + j);
        store(dpair, load(dpair) + select(seen, found * met, zero<C>()));
        store(product, select(seen, -met * pair, zero<C>()));
        store(slope, select(seen, found * pair, zero<C>()));
      }
    }
    multiply_lower_transposed(c.products, grad_o, du, n, c.V, Into::add, c.held);
    zero_rows(dq, n, c.K);
    multiply_lower(slopes, c.k, dq, n, c.K, c.held);
    multiply_lower_transposed(slopes, c.q, dk, n, c.K, Into::add, c.held);
  }
  // Adds the shares of outputs that read the model at the start. The packed weights stay.
  [[gnu::noinline]] void through_reads(const C* start, const C* moving) {
    if (moving != nullptr) through_read(moving, -1, c.from_momentum, dfrom_momentum, dmomentum);
    through_read(start, 1, c.of_weights, dof_weights, dweights);
  }
  void through_read(const C* state, C sign, const C* factors, C* dfactors, C* dstate) {
    const int64_t n = c.rows, K = c.K, V = c.V;
    const Matrix<const C> from{state, V};
    pack_columns<C>(from, K, V, packed);
    multiply(grad_o, packed_panels(packed, V), read, n, K, V, Into::set);
    for (int64_t i = 0; i < n; ++i) {
      const Vec<C> factor(sign * factors[i]);
      const C *const q = c.q.row(i), *const met = read.row(i);
      C* const to = dq.row(i);
      C sum = row_sum<C>(K, [=](int64_t j, auto part) {
        const Vec<C> found = part.load(met + j);
        part.store(to + j, fma(found, factor, part.load(to + j)));
        return found * part.load(q + j);
      });
      if (p.bias) sum += dot(grad_o.row(i), from.row(K), V);
      dfactors[i] += sign * sum;
    }
    scale_rows<C>(factors, sign, c.q, n, c.R, c.scaled);
    multiply<ALayout::kTransposed>(c.scaled, grad_o, Matrix<C>{dstate, V}, c.R, V, n, Into::add);
  }

  // du -> the gradients of targets, norm, keys and the anchor.
  [[gnu::noinline]] void through_descent(const FastWeightsItem& x, const C* from, const C* start) {
    const int64_t n = c.keys(), K = c.K, V = c.V;
    for (int64_t i = 0; i < n; ++i) {
      p.w == nullptr ? through_plain(i) : through_norm(x, i);
    }
    if (p.residual) {
      for (int64_t i = 0; i < n; ++i) {
        add_scaled<C>(-1, c.target.row(i), 1, dk.row(i), V);
      }
    }
    if (from != start) pack_columns<C>(Matrix<const C>{from, V}, K, V, packed);
    multiply(du, packed_panels(packed, V), dk, n, K, V, Into::add);
    multiply<ALayout::kTransposed>(c.k, du, Matrix<C>{c.starts ? dweights : danchor, V}, c.R, V, n,
                                   Into::add);
    if (c.starts && !c.ends) join_anchor();
  }
  // Replaces the target by its gradient; du = dz.
  void through_plain(int64_t i) const {
    const C* const from = du.row(i);
    C* const to = c.target.row(i);
    for_row<C>(c.V, [=](int64_t j, auto part) { part.store(to + j, -part.load(from + j)); });
  }
  void through_norm(const FastWeightsItem& x, int64_t i) const {
    const int64_t V = c.V;
    const C each = C{1} / static_cast<C>(V), scale = c.inverse[i];
    const C *const w = static_cast<const C*>(p.w) + x.head * V,
                   *const b = static_cast<const C*>(p.b) + x.head * V,
                   *const unit = c.normal.row(i), *const u = c.u.row(i);
    C *const g = du.row(i), *const y = c.target.row(i), *const of_w = dw, *const of_b = db;
    RowSum<C> plain, along, spread, common;
    for_row_by_four<C>(V, [&](int64_t j, auto part, int k) {
      const Vec<C> of_u = part.load(g + j), normal = part.load(unit + j), by = part.load(w + j);
      const Vec<C> gap = by * (fma(normal, by, part.load(b + j)) - part.load(y + j));
      plain.add(k, part.zero_beyond(of_u)), along.add(k, part.zero_beyond(of_u * normal));
      spread.add(k, part.zero_beyond(of_u * part.load(u + j)));
      common.add(k, part.zero_beyond(gap * normal));
    });
    const Vec<C> mean(each * plain.total()), turn(each * along.total()), by_scale(scale);
    const Vec<C> kept(each * common.total());
    RowSum<C> means, turns;
    for_row_by_four<C>(V, [&](int64_t j, auto part, int k) {
      const Vec<C> of_u = part.load(g + j), normal = part.load(unit + j), by = part.load(w + j);
      const Vec<C> missed = fma(normal, by, part.load(b + j)) - part.load(y + j);
      const Vec<C> dgap = by_scale * (of_u - mean - normal * turn), dy = by * dgap;
      part.store(of_w + j, part.load(of_w + j) + fma(dgap, missed, dy * normal));
      part.store(of_b + j, part.load(of_b + j) + dy);
      part.store(y + j, -dy);
      const Vec<C> dnormal = by * dy - by_scale * (kept * of_u + by * missed * turn);
      part.store(g + j, dnormal);
      means.add(k, part.zero_beyond(dnormal)), turns.add(k, part.zero_beyond(dnormal * normal));
    });
    const Vec<C> shift(each * means.total());
    const Vec<C> share(each * (turns.total() + spread.total()));
    for_row<C>(V, [=](int64_t j, auto part) {
      part.store(g + j, by_scale * (part.load(g + j) - shift - part.load(unit + j) * share));
    });
  }

  // The gradients of weights of tokens -> those of gates.
  [[gnu::noinline]] void through_gates() const {
    const int64_t n = c.rows, width = c.pair_width();
    for (int64_t t = n; t-- > 0;) {
      const C g = c.gate[t], keep = c.keep[t], share = c.share[t];
      C *const dpair = dpairs.row(t), *const dwrite = dwrites.row(t);
      C sum = 0;
      if (p.descent) {
        add_scaled<C>(g, dpair, 1, dwrite, width);
        sum = dot(dpair, c.writes.row(t), width) + dfrom_momentum[t] * c.of_momentum[t];
        dof_momentum[t] += g * dfrom_momentum[t];
      } else {
        add_scaled<C>(share, dpair, 1, dwrite, width);
        dshare[t] = params.dshare == nullptr
                        ? C{0}
                        : dot(dpair, c.writes.row(t), width) + dfrom_momentum[t] * c.of_momentum[t];
        sum = dof_weights[t] * (t > 0 ? c.of_weights[t - 1] : C{1});
        dof_momentum[t] += share * dfrom_momentum[t];
        if (t > 0) {
          sum += dot(dpair, c.pairs.row(t - 1), width) + dfrom_momentum[t] * c.from_momentum[t - 1];
          add_scaled<C>(g, dpair, 1, dpairs.row(t - 1), width);
          dfrom_momentum[t - 1] += g * dfrom_momentum[t];
          dof_weights[t - 1] += g * dof_weights[t];
        }
      }
      dgate[t] = sum;
      for (int64_t j = 0; j < p.window; ++j) dstep[t * p.window + j] = dwrite[c.held + t - j];
      C kept = dof_momentum[t] * (t > 0 ? c.of_momentum[t - 1] : C{1});
      if (t > 0) {
        kept += dot(dwrite, c.writes.row(t - 1), width);
        add_scaled<C>(keep, dwrite, 1, dwrites.row(t - 1), width);
        dof_momentum[t - 1] += keep * dof_momentum[t];
      }
      dkeep[t] = kept;
    }
  }

  // Adds the gradients of the keys and values that the chunk after held, and keeps those that this
  // one holds.
  void exchange(Matrix<C> gradients, int64_t width, Matrix<C> of_held) const {
    for (int64_t i = 0; i < c.held; ++i) {
      add_scaled<C>(1, of_held.row(i), 1, gradients.row(c.rows + i), width);
    }
    copy_rows<C>(gradients.data, gradients.stride, c.held, width, of_held);
  }
  void write(const FastWeightsItem& x, int64_t t) const {
    exchange(dk, c.K, dkeys), exchange(c.target, c.V, dvalues);
    const int64_t n = c.rows;
    const int64_t first = (x.batch * p.steps + x.begin + t) * p.heads + x.head;
    const auto of_rows = [&](Matrix<C> from, int64_t width, void* to, C factor) {
      char* const row = static_cast<char*>(to) + first * width * size_of(p.dtype);
      stream_rows(p.dtype, from, n, width, row, p.heads * width, factor);
    };
    of_rows(dq, c.K, params.dq, static_cast<C>(p.scale));
    of_rows(dk.at(c.held), c.K, params.dk, 1);
    of_rows(c.target.at(c.held), c.V, params.dv, 1);
    const auto of_gates = [&](const C* from, void* to, int64_t width) {
      if (to == nullptr) return;
      C* const row = static_cast<C*>(to) + first * width;
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < width; ++j) row[i * p.heads * width + j] = from[i * width + j];
      }
    };
    of_gates(dstep, params.dstep, p.window);
    of_gates(dkeep, params.dkeep, 1), of_gates(dgate, params.dgate, 1);
    of_gates(dshare, params.dshare, 1);
  }

  void prefetch(const FastWeightsItem& x, int64_t t) const {
    c.prefetch(x, t);
    if (t < 0 || params.grad_o.data == nullptr) return;
    prefetch_row(c.row(params.grad_o, x, t), c.V * size_of(p.dtype));
  }
};

using Entries = ItemPass<Backward, FastWeightsBackwardParams>;

}  // namespace

extern const FastWeightsBackwardKernels fast_weights_backward_kernels_table;
const FastWeightsBackwardKernels fast_weights_backward_kernels_table{Entries::bytes, Entries::run};

}  // namespace omniattn::OMNIATTN_ISA
