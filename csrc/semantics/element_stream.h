// Random words for the elements of a tensor: element n reads word n & 3 of the Philox block (n >>
// 2, n >> 34, "ELEM", offset).
#pragma once

#include "semantics/philox.h"

namespace omniattn {

struct ElementStream {
  PhiloxKey key;
  uint32_t offset;
};
inline constexpr uint32_t kElementCounter = 0x454C454D;  // "ELEM"

// Random words of elements 4 group, ..., 4 group + 3.
OMNIATTN_FN PhiloxWords element_words(const ElementStream& stream, uint64_t group) {
  return philox({{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), kElementCounter,
                  stream.offset}},
                stream.key);
}

// Maps a word to a number in [0, 1) with 24 random bits.
OMNIATTN_FN float uniform_of(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f;
}

}  // namespace omniattn
