// Elementwise random draws, see random.h: computes the words of a block, then applies the function.
#include "kernels/random/random.h"

#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/philox_vec.h"
#include "runtime/row.h"
#include "semantics/arith.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// One 32-bit word for each lane of a Vec<T>.
template <class T>
using WordLanes [[gnu::vector_size(4 * Vec<T>::kWidth)]] = uint32_t;

template <class T>
OMNIATTN_INLINE WordLanes<T> load_words(const uint32_t* words) {
  WordLanes<T> w;
  __builtin_memcpy(&w, words, sizeof(w));
  return w;
}

// Calls f(first element, elements, their words) for each item of the range.
template <class F>
OMNIATTN_INLINE void for_blocks(const ElementStream& stream, int64_t n, int64_t begin, int64_t end,
                                const F& f) {
  static_assert(kRandomBlock % kWordsPerStore == 0);
  uint32_t words[kRandomBlock];
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item * kRandomBlock;
    const int64_t count = n - first < kRandomBlock ? n - first : kRandomBlock;
    for (int64_t i = 0; i < count; i += kWordsPerStore) {
      store_element_words(stream, static_cast<uint64_t>(first + i) / 4, words + i);
    }
    f(first, count, words);
  }
}

template <class S>
void dropout(const DropoutParams& p, int64_t begin, int64_t end) {
  using T = compute_t<S>;
  const Vec<T> scale(static_cast<T>(p.scale));
  for_blocks(p.stream, p.n, begin, end, [&](int64_t first, int64_t n, const uint32_t* words) {
    const S* const x = static_cast<const S*>(p.x) + first;
    S* const y = static_cast<S*>(p.y) + first;
    for_row<S>(n, [&](int64_t i, auto part) {
      const auto kept =
          __builtin_convertvector(load_words<T>(words + i) >= p.threshold, typename Vec<T>::Bits);
      part.store(y + i, Vec<T>::from_bits((part.load(x + i) * scale).bits() & kept));
    });
  });
}

void dropout_any(const DropoutParams& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, ceil_div(p.n, kRandomBlock));
  dispatch(p.dtype, [&]<class S>(S) { dropout<S>(p, begin, end); });
}

void uniform(const UniformParams& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, ceil_div(p.n, kRandomBlock));
  for_blocks(p.stream, p.n, begin, end, [&](int64_t first, int64_t n, const uint32_t* words) {
    float* const y = p.y + first;
    for_row<float>(n, [&](int64_t i, auto part) {
      const auto bits = reinterpret_cast<VecF::Bits>(load_words<float>(words + i) >> 8);
      part.store(y + i, VecF(__builtin_convertvector(bits, VecF::Raw)) * 0x1p-24f);
    });
  });
}

}  // namespace

extern const RandomKernels random_kernels_table;
const RandomKernels random_kernels_table{dropout_any, uniform};

}  // namespace omniattn::OMNIATTN_ISA
