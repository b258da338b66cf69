// Forward of fast weights, see fast_weights.h.
#include "kernels/fast_weights/fast_weights_chunk.h"
#include "kernels/recurrence/item_pass.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
struct Forward {
  const FastWeightsParams& params;
  const FastWeights& p = params.problem;
  Room<C> room;
  Chunk<C> c;
  Matrix<C> o;
  Model<C> memory;

  Forward(const FastWeightsParams& x, void* given) : params(x), room(given), c(p, room) {
    o = room.rows(kMostTokens, p.value_width);
    memory = {room.take(c.size), room.take(c.size), room.take(c.size), false};
  }

  void run(int64_t index) {
    const FastWeightsItem x = item_of(p, index);
    Model<C> model = c.begin(x, memory);
    bool open = x.position % p.mini_batch != 0;  // the anchor is not the weights
    for (int64_t t = 0; t < x.count; t += c.rows) {
      c.load(x, t);
      c.load_queries(x, t);
      c.descend(x, c.starts ? model.weights : model.anchor);
      outputs(x, t, model);
      c.move(model);
      open = !c.ends;
    }
    if (!model.moves) zero_rows(Matrix<C>{model.momentum, c.size}, 1, c.size);
    write(x, model.weights, params.final_weights);
    write(x, model.momentum, params.final_momentum);
    write(x, open ? model.anchor : model.weights, params.final_anchor);
    if (c.held == 0) return;
    c.load_held(x, x.count);
    c.store_held(x, c.k, c.K, params.final_keys);
    c.store_held(x, c.target, c.V, params.final_values);
  }

 private:
  void write(const FastWeightsItem& x, const C* from, void* to) const {
    copy_rows(from, 0, 1, c.size, Matrix<C>{static_cast<C*>(to) + x.index * c.size, c.size});
  }
  void outputs(const FastWeightsItem& x, int64_t t, const Model<C>& model) {
    const int64_t n = c.rows, R = c.R, V = c.V;
    const Matrix<const C> weights{model.weights, V}, momentum{model.momentum, V};
    if (!p.descent) scale_rows<C>(c.of_weights, 1, c.q, n, R, c.scaled);
    multiply(p.descent ? c.q : c.scaled, weights, o, n, V, R, Into::set);
    if (model.moves) {
      scale_rows<C>(c.from_momentum, -1, c.q, n, R, c.scaled);
      multiply(c.scaled, momentum, o, n, V, R, Into::add);
    }
    c.multiply_pairs();
    const int64_t width = c.pair_width();
    for (int64_t i = 0; i < n; ++i) {
      c.prefetch(x, t + n + i);
      C* const to = c.products.row(i);
      for (int64_t j = 0; j < width; j += c.kWidth) {
        const Vec<C> weighed = -load(to + j) * load(c.pairs.row(i) + j);
        store(to + j, select(lanes_below<C>(c.held + i + 1 - j), weighed, zero<C>()));
      }
    }
    multiply_lower(c.products, c.u, o, n, V, c.held);
    const int64_t stride = p.heads * V;
    const int64_t first = (x.batch * p.steps + x.begin + t) * stride + x.head * V;
    store_rows(p.dtype, o, n, V, static_cast<char*>(params.o) + first * size_of(p.dtype), stride);
  }
};

using Entries = ItemPass<Forward, FastWeightsParams>;

}  // namespace

extern const FastWeightsKernels fast_weights_kernels_table;
const FastWeightsKernels fast_weights_kernels_table{Entries::bytes, Entries::run};

}  // namespace omniattn::OMNIATTN_ISA
