// Packed, cached and paged batches at the torch boundary, for any engine: checks the side tensors
// of a layout (semantics/sequences.h) and gives them as pointers for kernels, or as a list for
// engines that run one problem per sequence.
#pragma once

#include <memory>
#include <vector>

#include "ops/tensor.h"
#include "semantics/sequences.h"

namespace omniattn::ops {

// One sequence: rows [q_begin, q_begin + tq) and [k_begin, k_begin + tk) of batch entry `row`, or
// the first tk keys of its pages. b is its index in per-sequence arguments of the call.
struct Sequence {
  int64_t b, row, q_begin, tq, k_begin, tk;
};

struct Sequences {
  int64_t count = 0;                     // 0: a batch without a layout
  int64_t longest_q = 0, longest_k = 0;  // bounds of the lengths
  SequenceRows rows{};
  PageView pages{};
  std::vector<std::shared_ptr<const void>> memory;

  // Sequences in order. CPU only: on CUDA these numbers are in GPU memory, and reading them would
  // wait for the GPU.
  std::vector<Sequence> list() const;
};

// Rows of a tensor, and the boundaries (N + 1,) of the packed sequences in it, none longer than
// `longest`.
struct PackedRows {
  const char* name;
  const Tensor& boundaries;
  int64_t rows, longest;
};
// An engine whose inputs all have the same rows passes them twice.
Sequences packed_sequences(const char* op, const PackedRows& q, const PackedRows& k);

// Sequence b has tq queries and the first lengths[b] of tk keys.
Sequences cached_sequences(const char* op, const Tensor& lengths, int64_t batch, int64_t tq,
                           int64_t tk);

// As cached_sequences; row b of `table` (B, N) lists the pages that hold the keys of sequence b.
Sequences paged_sequences(const char* op, const Tensor& table, const Tensor& lengths, int64_t batch,
                          int64_t tq, int64_t pages, int64_t page_size);

}  // namespace omniattn::ops
