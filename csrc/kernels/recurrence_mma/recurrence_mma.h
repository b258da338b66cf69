// Matrix-state recurrences on tensor cores (CUDA).
#pragma once

#include "kernels/recurrence/recurrence.h"

namespace omniattn {

// Largest key width whose states fit in registers.
inline constexpr int64_t kMostMmaKeys = 128;

// True if tensor cores take a call: a plain or delta update of more tokens than half a chunk, in
// 16 bits and rows of whole pieces of 16 bytes.
inline bool recurrence_on_mma(const Recurrence& p) {
  const auto whole = [](const StepView& x, int64_t width, int64_t piece = 8) {
    return width % piece == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
           (x.batch | x.step | x.head) % piece == 0;
  };
  return (p.dtype == DType::bf16 || p.dtype == DType::f16) && p.a.data == nullptr &&
         p.bonus == nullptr && plain_rows(p) && p.key_width > 0 && p.key_width <= kMostMmaKeys &&
         whole(p.q, p.key_width) && whole(p.k, p.key_width) && whole(p.v, p.value_width) &&
         (!p.channel_decay || whole(p.g, p.key_width, 4));
}

// As launch_recurrence, without working memory, and as the functions for the backward.
Status launch_recurrence_mma(const RecurrenceParams& p, Stream stream);
int64_t recurrence_backward_mma_bytes(const Recurrence& p);
Status launch_recurrence_backward_mma(const RecurrenceBackwardParams& p, void* memory,
                                      Stream stream);

// Their parts: the forward and the backward's errors and du of calls with a decay per channel, and
// the backward's rows, which also compute dg.
void launch_recurrence_channels_mma(const RecurrenceParams& p, Stream stream);
void launch_recurrence_channels_backward_mma(const RecurrenceBackwardParams& p, void* memory,
                                             Stream stream);
void launch_recurrence_rows_mma(const RecurrenceBackwardParams& p, void* memory, Stream stream);
void launch_recurrence_channels_rows_mma(const RecurrenceBackwardParams& p, void* memory,
                                         Stream stream);

}  // namespace omniattn
