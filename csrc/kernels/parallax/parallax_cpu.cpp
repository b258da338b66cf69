// Forward of Parallax, see parallax.h.
#include "kernels/parallax/parallax_block.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
struct Forward {
  const ParallaxParams& params;
  const Parallax& p = params.problem;
  Room<C> room;
  ParallaxBlock<C> block;

  Forward(const ParallaxParams& x, void* memory) : params(x), room(memory), block(p, room) {}

  void run(int64_t index) {
    const int64_t heads = p.sequences * p.heads;
    const ParallaxSequence x = sequence_of(p, index % heads / p.heads);
    const int64_t first = (p.blocks() - 1 - index / heads) * p.kRows, head = index % p.heads;
    if (first >= x.queries) return;
    block.begin(x, head, first);
    block.attend();
    const int64_t V = p.value_width, stride = p.heads * V;
    for (int64_t i = 0; i < block.rows; ++i) {
      C* const a = block.sums.row(i);
      const C* const b = block.sums.row(block.rows + i);
      const Vec<C> factor(1 + block.mean[i]);
      for_row<C>(V, [=](int64_t j, auto part) {
        part.store(a + j, part.load(a + j) * factor - part.load(b + j));
      });
    }
    const int64_t at = ((x.batch * p.queries + x.query + first) * p.heads + head) * V;
    store_rows(p.dtype, block.sums, block.rows, V,
               static_cast<char*>(params.o) + at * size_of(p.dtype), stride);
  }
};

using Entries = ItemPass<Forward, ParallaxParams>;

}  // namespace

extern const ParallaxKernels parallax_kernels_table;
const ParallaxKernels parallax_kernels_table{Entries::bytes, Entries::run};

}  // namespace omniattn::OMNIATTN_ISA
