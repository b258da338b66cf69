// Shared by the kernels of scans, which are recurrences over time of a few numbers per channel. A
// channel is a lane of a vector on the CPU and a thread on CUDA.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "semantics/arith.h"

namespace omniattn {

// The sequences of a tensor (B, T, ..).
struct ScanRows {
  int64_t sequences;          // N: B, or the number of packed sequences
  int64_t steps;              // T: of each sequence, or of all packed sequences together
  const int64_t* boundaries;  // null, or (N + 1): then B = 1 and sequence n has the rows
                              // boundaries[n] .. boundaries[n + 1]
};

// A tensor (B, T, C) with unit stride over C.
struct ScanView {
  const void* data;
  int64_t batch, step;  // elements between batch entries and steps

  template <class T>
  OMNIATTN_FN const T* row(int64_t b, int64_t t) const {
    return static_cast<const T*>(data) + b * batch + t * step;
  }
};

// Steps between the states that a forward saves; the backward recomputes the states in between.
inline constexpr int64_t kScanChunk = 32;

// Slots of saved states. Sequence n of a batch begins at slot n ceil(T / chunk), a packed sequence
// at slot boundaries[n] / chunk + n, which leaves room for earlier sequences of any lengths.
OMNIATTN_FN int64_t scan_slots(const ScanRows& p) {
  return p.boundaries != nullptr ? p.steps / kScanChunk + p.sequences
                                 : p.sequences * ceil_div(p.steps, kScanChunk);
}

// One sequence: batch entry, first row, number of steps, first slot.
struct ScanSequence {
  int64_t batch, begin, count, slot;
};
OMNIATTN_FN ScanSequence scan_sequence(const ScanRows& p, int64_t n) {
  if (p.boundaries == nullptr) return {n, 0, p.steps, n * ceil_div(p.steps, kScanChunk)};
  const int64_t begin = p.boundaries[n];
  return {0, begin, p.boundaries[n + 1] - begin, begin / kScanChunk + n};
}

}  // namespace omniattn
