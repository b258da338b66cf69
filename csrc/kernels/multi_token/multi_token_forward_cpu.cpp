// Forward of multi-token attention, see multi_token.h. An item is a block of queries of a group of
// heads.
#include "kernels/multi_token/multi_token_block.h"
#include "kernels/recurrence/item_pass.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
struct Packing {
  const MultiToken& p;
  Room<C> room;
  Matrix<C> rows;

  Packing(const MultiToken& problem, void* memory)
      : p(problem), room(memory), rows(room.rows(p.kPanel, p.width)) {}

  void run(int64_t item) const {
    const int64_t panel = item % p.panels(), head = item / p.panels() % p.kv_heads;
    const int64_t b = item / p.panels() / p.kv_heads;
    const PackedKeys<C> to(p, b, head);
    const int64_t first = panel * p.kPanel - p.side();
    const int64_t begin = larger(0, first), end = smaller(p.keys, first + p.kPanel);
    zero_rows(rows, p.kPanel, p.width);
    if (begin < end) {
      load_rows(p.dtype, row_of(p.dtype, p.k, b, begin, head), p.k.step, end - begin, p.width,
                rows.at(begin - first));
    }
    pack_bt(rows.data, rows.stride, p.width, p.kPanel, to.k_columns + panel * p.kPanel * p.width);
    pack_rows_of(to, b, head, panel * p.kPanel);
  }

 private:
  void pack_rows_of(const PackedKeys<C>& to, int64_t b, int64_t head, int64_t first) const {
    const int64_t count = smaller(p.kPanel, p.keys - first);
    if (count <= 0) return;
    load_rows(p.dtype, row_of(p.dtype, p.v, b, first, head), p.v.step, count, p.value_width,
              to.v.at(first));
    if (!p.packs_gradients) return;
    load_rows(p.dtype, row_of(p.dtype, p.k, b, first, head), p.k.step, count, p.width,
              to.k.at(first));
    pack_bt(to.v.row(first), to.v.stride, p.value_width, count,
            to.v_columns + first * p.value_width);
  }
};

template <class C>
struct Forward : BlockPass<C> {
  using Base = BlockPass<C>;
  using Base::p, Base::room, Base::at, Base::count, Base::most_rows, Base::inverse, Base::kWidth;

  const MultiTokenParams& params;
  Matrix<C> s, o, mixed;

  Forward(const MultiTokenParams& x, void* memory) : Base(x.problem, memory), params(x) {
    s = this->tile_of_logits();
    o = room.rows(most_rows, p.value_width);
    mixed = room.rows(count, kColumns);
  }

  void run(int64_t index) {
    this->for_blocks_of(index, [&] { block(); });
  }

 private:
  static constexpr int64_t kColumns = 64;  // of weights that are mixed at a time

  void block() const {
    this->load_queries();
    for (int64_t c = 0; c < count; ++c) {
      this->for_tiles([&](int64_t key, int64_t columns) {
        this->logits(c, key, columns, s);
        this->convolve(c, key, columns, s);
      });
      this->exponentiate(c);
    }
    mix();
    for (int64_t c = 0; c < count; ++c) outputs(c);
  }
  // Turns P / inverse into A.
  [[gnu::noinline]] void mix() const {
    const int64_t end = round_up(at.keys, kWidth);
    for (int64_t i = 0; i < at.rows; ++i) {
      const Matrix<C> rows{this->weights.row(i), most_rows * this->weights.stride};
      for (int64_t first = 0; first < end; first += kColumns) {
        const int64_t columns = smaller(kColumns, end - first);
        for (int64_t j = 0; j < columns; j += kWidth) {
          for (int64_t to = 0; to < count; ++to) {
            Vec<C> sum = zero<C>();
            for (int64_t c = 0; c < count; ++c) {
              const C by = this->mixing.row(c)[to] * inverse[c * most_rows + i];
              sum = fma(load(rows.row(c) + first + j), Vec<C>(by), sum);
            }
            store(mixed.row(to) + j, sum);
          }
        }
        copy_rows<C>(mixed.data, mixed.stride, count, columns, rows.at(0, first));
      }
    }
  }
  void outputs(int64_t c) const {
    const Matrix<C> v = this->keys_of(c).v;
    zero_rows(o, at.rows, p.value_width);
    this->for_tiles([&](int64_t key, int64_t columns) {
      multiply(this->weights_of(c).at(0, key), v.at(key), o, at.rows, p.value_width, columns,
               Into::add);
    });
    const int64_t row = this->batch * p.rows() + at.first - p.lead;
    const int64_t first = (row * p.heads + this->head(c)) * p.value_width;
    store_rows(p.dtype, o, at.rows, p.value_width,
               static_cast<char*>(params.out) + first * size_of(p.dtype), p.heads * p.value_width);
  }
};

int64_t pack_bytes(const MultiToken& p) {
  int64_t result = 0;
  dispatch_compute(p.dtype, [&]<class C>(C) { result = Packing<C>(p, nullptr).room.bytes(); });
  return result;
}
void pack(const MultiToken& p, void* memory, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.batch * p.kv_heads * p.panels());
  OMNIATTN_ASSERT_HAS(memory, pack_bytes(p));
  dispatch_compute(p.dtype, [&]<class C>(C) {
    const Packing<C> packing(p, memory);
    for (int64_t i = begin; i < end; ++i) packing.run(i);
  });
}

using Entries = ItemPass<Forward, MultiTokenParams>;

}  // namespace

extern const MultiTokenKernels multi_token_kernels_table;
const MultiTokenKernels multi_token_kernels_table{pack_bytes, pack, Entries::bytes, Entries::run};

}  // namespace omniattn::OMNIATTN_ISA
