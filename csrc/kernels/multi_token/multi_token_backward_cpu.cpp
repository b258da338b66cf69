// Backward of multi-token attention, see multi_token.h. An item is every items_per_group-th block
// of queries of a group of heads, whose gradients it adds to parts of its own.
#include "kernels/multi_token/multi_token_block.h"
#include "kernels/recurrence/item_pass.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
struct Backward : BlockPass<C> {
  using Base = BlockPass<C>;
  using Base::p, Base::room, Base::at, Base::halo, Base::side, Base::count, Base::most_rows,
      Base::height, Base::inverse, Base::mixing, Base::kWidth;

  const MultiTokenBackwardParams& params;
  const int64_t tiles;  // of all keys
  Matrix<C> flipped;    // taps in reverse
  Matrix<C> s;          // (C, tiles, height) rows of logits
  Matrix<C> grad;       // (C, most_rows) rows of dO
  Matrix<C> dx;         // (C, halo + most_rows + halo) rows of dA, then of dX, with zeros around
  Matrix<C> ds, dq;     // of one head
  Matrix<C> mixed;      // (2 C, kWidth)
  Matrix<C> products;   // (C, C): P_c dA_o of a row
  C* delta;

  Backward(const MultiTokenBackwardParams& x, void* memory)
      : Base(x.problem, memory), params(x), tiles(larger(1, ceil_div(p.keys, p.kKeys))) {
    flipped = room.rows(count, p.query_taps * p.key_taps);
    const Matrix<C> tile = this->tile_of_logits();
    s = {tile.data, tile.stride};
    room.take((count * tiles - 1) * height * tile.stride);
    grad = room.rows(count * most_rows, p.value_width);
    dx = room.rows(count * (height + halo), correlated_columns<C>(p.keys) + 2 * side);
    ds = room.rows(height, correlated_columns<C>(p.kKeys)), dq = room.rows(height, p.width);
    mixed = room.rows(2 * count, kWidth), products = room.rows(count, count);
    delta = room.take(count);
  }

  void run(int64_t index) {
    bool starts = true;
    this->for_blocks_of(index, [&] {
      if (starts) flip();
      starts = false;
      block();
    });
  }

 private:
  Matrix<C> logits_of(int64_t c, int64_t key) const {
    return s.at((c * tiles + key / p.kKeys) * height);
  }
  // Rows of dX of a head, from the first row and column of zeros on.
  Matrix<C> padded(int64_t c) const { return dx.at(c * (height + halo)); }
  Matrix<C> dx_of(int64_t c) const { return padded(c).at(halo, side); }
  C* part_of(void* parts, int64_t n, int64_t size) const {
    return static_cast<C*>(parts) + n * size;
  }

  void flip() const {
    const int64_t size = p.query_taps * p.key_taps;
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t n = 0; n < size; ++n) flipped.row(c)[n] = this->taps.row(c)[size - 1 - n];
    }
  }

  void block() const {
    this->load_queries();
    for (int64_t c = 0; c < count; ++c) {
      load_gradient(c);
      this->for_tiles([&](int64_t key, int64_t columns) {
        this->logits(c, key, columns, logits_of(c, key));
        this->convolve(c, key, columns, logits_of(c, key));
        multiply(grad.at(c * most_rows), values_of(c, key), dx_of(c).at(0, key), at.rows, columns,
                 p.value_width, Into::set);
      });
      this->exponentiate(c);
      surround(c);
    }
    for (int64_t i = 0; i < at.rows; ++i) row_gradients(i);
    for (int64_t c = 0; c < count; ++c) head_gradients(c);
  }

  void load_gradient(int64_t c) const {
    load_rows(p.dtype,
              row_of(p.dtype, params.grad_out, this->batch, at.first - p.lead, this->head(c)),
              params.grad_out.step, at.rows, p.value_width, grad.at(c * most_rows));
  }
  Panels<C> values_of(int64_t c, int64_t key) const {
    return packed_panels<C>(this->keys_of(c).v_columns, p.value_width).at(0, key);
  }
  // Sets the rows and columns around dX to 0.
  [[gnu::noinline]] void surround(int64_t c) const {
    const Matrix<C> all = padded(c);
    const int64_t columns = round_up(at.keys, kWidth) + 2 * side;
    zero_rows(all, halo, columns);
    zero_rows(all.at(halo + at.rows), halo, columns);
    zero_rows(all.at(halo), at.rows, side);
    zero_rows(all.at(halo, side + at.keys), at.rows, columns - side - at.keys);
  }

  // Turns rows i of P / inverse and dA of all heads into A and dX.
  [[gnu::noinline]] void row_gradients(int64_t i) const {
    const int64_t seen = p.seen_by(at.first + i), stride = (height + halo) * dx.stride;
    const Matrix<C> shares{this->weights.row(i), most_rows * this->weights.stride};
    const Matrix<C> grads{dx_of(0).row(i), stride};
    multiply_rows(shares, grads, i, seen);
    C* const sums =
        params.dhead_weight == nullptr
            ? nullptr
            : part_of(params.dhead_weight, sum_part(), p.heads * count) + this->head(0) * count;
    for (int64_t c = 0; c < count; ++c) {
      delta[c] = 0;
      for (int64_t o = 0; o < count; ++o) {
        delta[c] += mixing.row(c)[o] * products.row(c)[o];
        if (sums != nullptr) sums[c * count + o] += products.row(c)[o];
      }
    }
    for_row<C>(seen, [&](int64_t j, auto lanes) {
      for (int64_t c = 0; c < count; ++c) {
        Vec<C> of_weight = zero<C>(), weight = zero<C>();
        for (int64_t o = 0; o < count; ++o) {
          of_weight = fma(lanes.load(grads.row(o) + j), Vec<C>(mixing.row(c)[o]), of_weight);
          const C by = mixing.row(o)[c] * inverse[o * most_rows + i];
          weight = fma(lanes.load(shares.row(o) + j), Vec<C>(by), weight);
        }
        const Vec<C> own = lanes.load(shares.row(c) + j) * Vec<C>(inverse[c * most_rows + i]);
        store(mixed.row(c), own * (of_weight - Vec<C>(delta[c])));
        store(mixed.row(count + c), weight);
      }
      for (int64_t c = 0; c < count; ++c) {
        lanes.store(grads.row(c) + j, load(mixed.row(c)));
        lanes.store(shares.row(c) + j, load(mixed.row(count + c)));
      }
    });
    for (int64_t c = 0; c < count; ++c) zero_rows(grads.at(c, seen), 1, at.keys - seen);
  }
  // products_co = P_c dA_o of row i.
  void multiply_rows(Input<C> shares, Matrix<C> grads, int64_t i, int64_t seen) const {
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t o = 0; o < count; ++o) {
        products.row(c)[o] = inverse[c * most_rows + i] * dot<C>(shares.row(c), grads.row(o), seen);
      }
    }
  }
  // Part of this item in sums over the entries of the batch.
  int64_t sum_part() const { return this->batch * p.items_per_group + this->part; }

  // Adds the gradients of a head to the parts of the item.
  [[gnu::noinline]] void head_gradients(int64_t c) const {
    const int64_t h = this->head(c), kv = p.kv_head_of(h), rows = at.rows + halo - at.missing;
    const int64_t reader = (this->group - p.first_group(kv)) * p.items_per_group + this->part;
    const auto key_rows = [&](void* parts, int64_t width) {
      const int64_t first = (reader * p.batch + this->batch) * p.keys * p.kv_heads + kv;
      return Matrix<C>{parts == nullptr ? nullptr : part_of(parts, first, width),
                       p.kv_heads * width};
    };
    const Matrix<C> dk = key_rows(params.dk, p.width), dv = key_rows(params.dv, p.value_width);
    const bool wants_logits = params.dq != nullptr || params.dk != nullptr;
    const Matrix<C> k = this->keys_of(c).k, queries = this->q.at(c * height + at.missing);
    zero_rows(dq, at.rows + halo, p.width);
    this->for_tiles([&](int64_t key, int64_t columns) {
      if (dv.data != nullptr) {
        multiply<ALayout::kTransposed>(this->weights_of(c).at(0, key), grad.at(c * most_rows),
                                       dv.at(key), columns, p.value_width, at.rows, Into::add);
      }
      if (params.dweight != nullptr) tap_sums(c, key, columns);
      if (!wants_logits) return;
      correlate(this->taps_of(flipped, c), padded(c).at(0, key), ds, at.rows + halo, columns);
      this->hide(ds, key, columns);
      const Matrix<C> own = ds.at(at.missing);
      if (params.dq != nullptr) {
        multiply(own, k.at(key), dq.at(at.missing), rows, p.width, columns, Into::add);
      }
      if (dk.data != nullptr) {
        multiply<ALayout::kTransposed>(own, queries, dk.at(key), columns, p.width, rows, Into::add);
      }
    });
    if (params.dq != nullptr) add_query_gradients(h, rows);
  }
  void tap_sums(int64_t c, int64_t key, int64_t columns) const {
    const int64_t size = p.query_taps * p.key_taps;
    C* const sums = part_of(params.dweight, sum_part() * p.heads + this->head(c), size);
    tap_gradients(Taps<C>{sums, p.query_taps, p.key_taps}, dx_of(c).at(0, key), logits_of(c, key),
                  at.rows, columns);
  }
  void add_query_gradients(int64_t h, int64_t rows) const {
    const int64_t row =
        (this->part * p.batch + this->batch) * p.queries + this->query_of(at.missing);
    const Vec<C> scale(static_cast<C>(p.scale));
    for (int64_t r = 0; r < rows; ++r) {
      C* const to = part_of(params.dq, (row + r) * p.heads + h, p.width);
      const C* const from = dq.row(at.missing + r);
      for_row<C>(p.width, [&](int64_t j, auto lanes) {
        lanes.store(to + j, fma(lanes.load(from + j), scale, lanes.load(to + j)));
      });
    }
  }
};

using Entries = ItemPass<Backward, MultiTokenBackwardParams>;

}  // namespace

extern const MultiTokenBackwardKernels multi_token_backward_kernels_table;
const MultiTokenBackwardKernels multi_token_backward_kernels_table{Entries::bytes, Entries::run};

}  // namespace omniattn::OMNIATTN_ISA
