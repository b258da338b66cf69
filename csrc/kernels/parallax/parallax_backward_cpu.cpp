// Backward of Parallax, see parallax.h: one head of queries at a time. The gradients of its keys
// and values stay in memory while the blocks of queries add to them.
#include "kernels/parallax/parallax_block.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
struct Backward {
  using Block = ParallaxBlock<C>;
  const ParallaxBackwardParams& params;
  const Parallax& p = params.problem;
  Room<C> room;
  Block block;
  Matrix<C> grad_o, slopes;    // dW, then W
  Matrix<C> dqueries, dk, dv;  // of q and r; of all keys of a sequence
  C *of_average, *of_product;  // e and f

  Backward(const ParallaxBackwardParams& x, void* memory)
      : params(x), room(memory), block(p, room) {
    grad_o = room.rows(p.kRows, p.value_width), slopes = room.rows(p.kRows, Block::kKeys);
    dqueries = room.rows(2 * p.kRows, p.width);
    dk = room.rows(p.longest_keys, p.width), dv = room.rows(p.longest_keys, p.value_width);
    of_average = room.take(p.kRows), of_product = room.take(p.kRows);
  }

  void run(int64_t index) {
    const ParallaxSequence x = sequence_of(p, index / p.heads);
    const int64_t head = index % p.heads, group = p.group();
    zero_rows(dk, x.keys, p.width), zero_rows(dv, x.keys, p.value_width);
    for (int64_t first = 0; first < x.queries; first += p.kRows) {
      block.begin(x, head, first);
      queries();
    }
    const DType type = group == 1 ? p.dtype : kComputed<C>;
    const int64_t entries = p.boundaries == nullptr ? p.sequences : 1;
    const int64_t row = (head % group * entries + x.batch) * p.keys + x.key;
    const auto write = [&](Matrix<C> from, int64_t width, void* to) {
      const int64_t at = (row * p.key_heads + head / group) * width;
      store_rows(type, from, x.keys, width, static_cast<char*>(to) + at * size_of(type),
                 p.key_heads * width);
    };
    write(dk, p.width, params.dk), write(dv, p.value_width, params.dv);
  }

 private:
  // Computes the shares of a block of queries.
  void queries() {
    const int64_t n = block.rows, D = p.width, V = p.value_width;
    zero_rows(dqueries, 2 * n, D);
    if (params.grad_o.data != nullptr) {
      load_rows(p.dtype, block.row(params.grad_o), params.grad_o.step, n, V, grad_o);
      block.attend();
      for (int64_t i = 0; i < n; ++i) {
        of_average[i] = dot(grad_o.row(i), block.sums.row(i), V);
        of_product[i] = dot(grad_o.row(i), block.sums.row(n + i), V);
      }
      block.for_tiles([&](int64_t key, int64_t count) { tile(key, count); });
    }
    const ParallaxSequence& x = block.x;
    const int64_t at = ((x.batch * p.queries + x.query + block.first) * p.heads + block.head) * D;
    const auto write = [&](Matrix<C> from, void* to, C factor) {
      store_rows(p.dtype, from, n, D, static_cast<char*>(to) + at * size_of(p.dtype), p.heads * D,
                 factor);
    };
    write(dqueries, params.dq, static_cast<C>(p.scale)), write(dqueries.at(n), params.dr, 1);
  }

  void tile(int64_t key, int64_t count) {
    const int64_t n = block.rows, D = p.width, V = p.value_width;
    block.score(key, count);
    pack_columns(block.v, count, V, block.packed);
    multiply(grad_o, packed_panels(block.packed, V), slopes, n, count, V, Into::set);
    for (int64_t i = 0; i < n; ++i) slope(i, key, count);
    multiply<ALayout::kTransposed>(slopes, Matrix<const C>(grad_o), dv.at(key), count, V, n,
                                   Into::add);
    multiply(block.scores, Matrix<const C>(block.k), dqueries, 2 * n, D, count, Into::add);
    multiply<ALayout::kTransposed>(block.scores, Matrix<const C>(block.queries), dk.at(key), count,
                                   D, 2 * n, Into::add);
  }
  // Replaces the logits and s of a query by dl and ds, and dW by W.
  OMNIATTN_INLINE void slope(int64_t i, int64_t key, int64_t count) const {
    C *const logits = block.scores.row(i), *const s = block.scores.row(block.rows + i);
    C* const slope = slopes.row(i);
    const C m = block.mean[i], inverse = block.total[i] > 0 ? 1 / block.total[i] : C{0};
    const Vec<C> zeros(C{0}), most(block.total[i] > 0 ? block.most[i] : C{0}), share(inverse);
    const Vec<C> e(of_average[i]), more(1 + m), shift(of_average[i] * m - of_product[i]);
    block.for_keys(i, key, count, [&](int64_t j, auto below, auto before) {
      const auto shown = [&](Vec<C> x) { return Block::shown(below, before, x, zeros); };
      const Vec<C> weight = exp(load(logits + j) - most) * share;
      const Vec<C> factor = more - load(s + j), gap = load(slope + j) - e;
      store(slope + j, shown(weight * factor));
      store(logits + j, shown(weight * (gap * factor - shift)));
      store(s + j, shown(-weight * gap));
    });
  }
};

using Entries = ItemPass<Backward, ParallaxBackwardParams>;

}  // namespace

extern const ParallaxBackwardKernels parallax_backward_kernels_table;
const ParallaxBackwardKernels parallax_backward_kernels_table{Entries::bytes, Entries::run};

}  // namespace omniattn::OMNIATTN_ISA
