// The loss of the lightning indexer and its gradients, see indexer_loss.h.
#include "kernels/indexer/indexer_loss_tile.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Loss of a query from I and u of `count` keys, whose rows are padded. Writes the kept values.
template <class A>
A divergence(A* scores, A* u, int64_t count, A* kept) {
  using V = Vec<A>;
  const V none = zero<A>(), unit(static_cast<A>(kLog2E));
  for (int64_t c = count; c % V::kWidth != 0; ++c) {
    scores[c] = negative_infinity<A>();
    u[c] = A(0);
  }
  V highest(negative_infinity<A>());
  for (int64_t c = 0; c < count; c += V::kWidth) highest = max(highest, load(scores + c));
  const A top = count > 0 ? reduce_max(highest) : A(0);
  V exponentials = none, total = none, entropy = none, cross = none;
  for (int64_t c = 0; c < count; c += V::kWidth) {
    const V score = load(scores + c) - V(top), weight = load(u + c);
    const auto empty = weight == none;
    exponentials += exp2(score * unit);
    total += weight;
    entropy += select(empty, none, weight * log(weight));
    cross += select(empty, none, weight * score);
  }
  const A whole = reduce_add(total);
  const A log_sum = log(V(reduce_add(exponentials))).v[0];
  const bool nothing = whole == A(0);
  if (kept != nullptr) {
    kept[0] = nothing ? -negative_infinity<A>() : top + log_sum;
    kept[1] = nothing ? A(0) : A(1) / whole;
  }
  if (nothing) return A(0);
  return (reduce_add(entropy) - reduce_add(cross)) / whole - log(V(whole)).v[0] + log_sum;
}

template <class T>
void forward_item(const IndexerLossForwardParams& params, void* scratch, int64_t n) {
  using A = compute_t<T>;
  const IndexerLossParams& p = params.problem;
  const LossItem item = loss_item(p, n % p.batch, n / p.batch);
  Arena<A> arena{static_cast<A*>(scratch), loss_forward_scratch(p)};
  const LossOperands<T> x(p, item, arena);
  const int64_t ld = loss_columns(p);
  A* const scores = arena.take(loss_queries(p) * ld);
  A* const u = arena.take(loss_queries(p) * ld);
  x.pack_queries();
  x.pack_attention();
  int64_t columns = 0, seen[kLossQueries] = {};
  for (LossTiles tile(p, item); tile.next(); columns += tile.count) {
    x.attention_weights(tile, u + columns, ld);
    x.multiply_index(tile);
    for (int64_t i = 0; i < item.size(); ++i) {
      x.scores(i, scores + i * ld + columns);
      seen[i] += tile.seen(item.queries.begin + i);
    }
  }
  for (int64_t i = 0; i < item.size(); ++i) {
    const int64_t row = item.b * p.tq + item.queries.begin + i;
    A* const kept =
        params.kept != nullptr ? static_cast<A*>(params.kept) + row * loss_kept(p) : nullptr;
    static_cast<A*>(params.loss)[row] = divergence(scores + i * ld, u + i * ld, seen[i], kept);
    if (kept == nullptr) continue;
    for (int64_t c = 0; c < p.count; ++c) kept[kLossKept + c] = c < seen[i] ? u[i * ld + c] : A(0);
  }
}

// Turns the products of a query and a tile, of which it sees `seen` keys, into their gradients:
// dx = g w relu'(x) with g = grad (softmax I - p); adds g relu(x) to dw.
template <class A, bool kRelu>
void product_gradients(const IndexerLossParams& p, const A* g, int64_t seen, const A* w, A* x,
                       A* w_grad) {
  using V = Vec<A>;
  const V none = zero<A>();
  for (int64_t h = 0; h < p.heads; ++h, x += kLossKeys) {
    const V factor(w != nullptr ? w[h] : A(1));
    V sum = none;
    for (int64_t c = 0; c < kLossKeys; c += V::kWidth) {
      // A hidden key may hold anything, and 0 * NaN is NaN.
      const V product = select(lanes_below<A>(seen - c), load(x + c), none), grad = load(g + c);
      sum = fma(grad, kRelu ? max(none, product) : product, sum);
      const V down = grad * factor;
      store(x + c, kRelu ? select(product > none, down, none) : down);
    }
    w_grad[h] += reduce_add(sum);
  }
}

// Gradients that an item of the backward holds: dq, dw, a tile of u, and dk of a tile.
template <class T>
struct LossGradients {
  using A = compute_t<T>;
  A *q, *w, *u, *k;

  LossGradients(const IndexerLossParams& p, Arena<A>& arena)
      : q(arena.take(loss_queries(p) * p.heads * padded_row(p.d))),
        w(arena.take(loss_queries(p) * p.heads)),
        u(arena.take(loss_queries(p) * kLossKeys)),
        k(arena.take(kLossKeys * padded_row(p.d))) {}
};

// Gradient g of the i-th query of an item for the keys of a tile; u belongs to this tile.
template <class T>
void score_gradients(const IndexerLossBackwardParams& params, const LossOperands<T>& x, int64_t i,
                     const compute_t<T>* u, int64_t seen, compute_t<T>* g) {
  using A = compute_t<T>;
  using V = Vec<A>;
  const IndexerLossParams& p = params.problem;
  const int64_t row = x.item.b * p.tq + x.item.queries.begin + i;
  const A* const kept = static_cast<const A*>(params.kept) + row * loss_kept(p);
  const V grad(static_cast<const A*>(params.grad)[row]), unit(static_cast<A>(kLog2E));
  x.scores(i, g);
  for (int64_t c = 0; c < kLossKeys; c += V::kWidth) {
    const V target = load_n(u + c, seen - c) * V(kept[1]);
    const V found = grad * (exp2((load(g + c) - V(kept[0])) * unit) - target);
    store(g + c, select(lanes_below<A>(seen - c), found, zero<A>()));
  }
}

// dq += dx K and dk += dx^T q for a tile.
template <class T>
void add_products(const LossOperands<T>& x, const LossGradients<T>& to, const LossTiles& tile,
                  compute_t<T>* sums) {
  using A = compute_t<T>;
  const IndexerLossParams& p = x.p;
  const int64_t rows = x.item.size() * p.heads, width = round_up(p.d, 16);
  if (x.reads_in_place(rows)) {
    int64_t at[kLossKeys];
    tile.offsets(p.k.stride_t, at);
    weigh_rows_at(x.products, kLossKeys, rows, row_of<T>(p.k, x.item.b, 0, 0), at, tile.count, p.d,
                  to.q, x.ldq);
    tile.offsets(x.ldq, at);
    add_rows_at(x.products, kLossKeys, rows, x.q, x.ldq, width, at, tile.count, sums);
    return;
  }
  gemm_tile<A>(x.products, kLossKeys, row_panels(static_cast<const A*>(x.rows), x.ldq), to.q, x.ldq,
               rows, width, tile.count, true);
  gemm_tile<A, ALayout::kTransposed>(x.products, kLossKeys,
                                     row_panels(static_cast<const A*>(x.q), x.ldq), to.k, x.ldq,
                                     tile.count, width, rows, false);
  for (int64_t n = 0; n < tile.count; ++n) {
    A *const sum = sums + tile.key[n] * x.ldq, *const own = to.k + n * x.ldq;
    for (int64_t c = 0; c < width; c += Vec<A>::kWidth) {
      store(sum + c, load(sum + c) + load(own + c));
    }
  }
}

template <class T>
void backward_tile(const IndexerLossBackwardParams& params, const LossOperands<T>& x,
                   const LossGradients<T>& to, const LossTiles& tile, int64_t column,
                   compute_t<T>* sums) {
  using A = compute_t<T>;
  const IndexerLossParams& p = params.problem;
  const bool listed = p.indices != nullptr;
  if (!listed) x.attention_weights(tile, to.u, kLossKeys);
  x.multiply_index(tile);
  alignas(64) A g[kLossKeys];
  for (int64_t i = 0; i < x.item.size(); ++i) {
    const int64_t row = x.item.b * p.tq + x.item.queries.begin + i;
    const int64_t seen = tile.seen(x.item.queries.begin + i);
    const A* const kept = static_cast<const A*>(params.kept) + row * loss_kept(p) + kLossKept;
    score_gradients<T>(params, x, i, listed ? kept + column : to.u + i * kLossKeys, seen, g);
    A *const products = x.index_products(i), *const w_grad = to.w + i * p.heads;
    p.relu ? product_gradients<A, true>(p, g, seen, x.weights(i), products, w_grad)
           : product_gradients<A, false>(p, g, seen, x.weights(i), products, w_grad);
  }
  add_products(x, to, tile, sums);
}

template <class T>
void backward_item(const IndexerLossBackwardParams& params, const LossItem& item,
                   Arena<compute_t<T>> arena, compute_t<T>* sums) {
  using A = compute_t<T>;
  const IndexerLossParams& p = params.problem;
  const LossOperands<T> x(p, item, arena);
  const LossGradients<T> to(p, arena);
  x.pack_queries();
  if (p.indices == nullptr) x.pack_attention();
  fill_zero(to.q, item.size() * p.heads * x.ldq);
  fill_zero(to.w, item.size() * p.heads);
  int64_t column = 0;
  for (LossTiles tile(p, item); tile.next(); column += tile.count) {
    backward_tile<T>(params, x, to, tile, column, sums);
  }
  for (int64_t i = 0; i < item.size(); ++i) {
    const int64_t t = item.queries.begin + i, first = i * p.heads;
    for (int64_t h = 0; h < p.heads; ++h) {
      store_row(to.q + (first + h) * x.ldq, A(1), p.d, row_of<T>(params.q_grad, item.b, t, h));
      if (params.w_grad == nullptr) continue;
      static_cast<A*>(params.w_grad)[(item.b * p.tq + t) * p.heads + h] = to.w[first + h];
    }
  }
}

template <class A>
A* key_sums(const IndexerLossBackwardParams& params, int64_t b, int64_t split) {
  const IndexerLossParams& p = params.problem;
  return static_cast<A*>(params.sums) + split * loss_sums(p) + b * p.tk * padded_row(p.d);
}

// Processes the items of one batch entry that belong to a split.
template <class T>
void owner_item(const IndexerLossBackwardParams& params, void* scratch, int64_t n) {
  using A = compute_t<T>;
  const IndexerLossParams& p = params.problem;
  const int64_t b = n % p.batch, split = n / p.batch;
  A* const sums = key_sums<A>(params, b, split);
  fill_zero(sums, p.tk * padded_row(p.d));
  for (int64_t i = split; i < loss_blocks(p); i += params.splits) {
    const Arena<A> arena{static_cast<A*>(scratch), loss_backward_scratch(p)};
    backward_item<T>(params, loss_item(p, b, i), arena, sums);
  }
}

// dk of a key: the sum over splits, in order.
template <class T>
void finish_key(const IndexerLossBackwardParams& params, int64_t n) {
  using A = compute_t<T>;
  const IndexerLossParams& p = params.problem;
  const int64_t b = n / p.tk, key = n % p.tk, ld = padded_row(p.d);
  A* const first = key_sums<A>(params, b, 0) + key * ld;
  for (int64_t split = 1; split < params.splits; ++split) {
    const A* const other = key_sums<A>(params, b, split) + key * ld;
    for (int64_t c = 0; c < ld; c += Vec<A>::kWidth) {
      store(first + c, load(first + c) + load(other + c));
    }
  }
  store_row(first, A(1), p.d, row_of<T>(params.k_grad, b, key, 0));
}

void forward(const IndexerLossForwardParams& params, void* scratch, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, params.problem.batch * loss_blocks(params.problem));
  dispatch(params.problem.dtype, [&](auto type) {
    for (int64_t n = begin; n < end; ++n) forward_item<decltype(type)>(params, scratch, n);
  });
}
void backward(const IndexerLossBackwardParams& params, void* scratch, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, params.problem.batch * params.splits);
  dispatch(params.problem.dtype, [&](auto type) {
    for (int64_t n = begin; n < end; ++n) owner_item<decltype(type)>(params, scratch, n);
  });
}
void finish(const IndexerLossBackwardParams& params, void*, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, params.problem.batch * params.problem.tk);
  dispatch(params.problem.dtype, [&](auto type) {
    for (int64_t n = begin; n < end; ++n) finish_key<decltype(type)>(params, n);
  });
}

}  // namespace

extern const IndexerLossKernels indexer_loss_kernels_table = {forward, backward, finish};

}  // namespace omniattn::OMNIATTN_ISA
