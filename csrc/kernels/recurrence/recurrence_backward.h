// Shared by all backwards of recurrences: items, and the order of chunks and heads, in which the
// heads of an item alternate as in the forward.
#pragma once

#include "kernels/recurrence/recurrence_rows.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Number of value heads in a part.
OMNIATTN_INLINE int64_t group_of(const RecurrenceBackwardParams& params) {
  const Recurrence& p = params.recurrence;
  return p.key_heads > 0 ? p.value_heads / (p.key_heads * params.shards) : 0;
}

// Value heads of an item.
struct HeadRange {
  int64_t first, end;
};

// Processes item `index` chunk by chunk with Form{params, memory, heads}, which holds the
// gradients of the states of its heads:
//
//   load(head, from)           loads such a gradient from its tensor; null: zeros
//   store(head, to)            stores it
//   chunk(s, first, n, part)   processes n tokens of a part from token `first` of the sequence on
template <class C, class Form>
void backward_item(const RecurrenceBackwardParams& params, void* memory, int64_t index) {
  const Recurrence& p = params.recurrence;
  const int64_t size = recurrence_chunk(p), group = group_of(params);
  const int64_t parts = p.key_heads * params.shards, items = ceil_div(parts, params.parts);
  const int64_t first = index % items * params.parts, end = smaller(first + params.parts, parts);
  const RecurrenceSequence s = recurrence_sequence(p, index / items);
  const HeadRange heads{first * group, end * group};
  Form form(params, memory, heads);
  for (int64_t h = heads.first; h < heads.end; ++h) {
    const void* const given = params.grad_final_state;
    form.load(h, given == nullptr ? nullptr : state_of<C>(p, given, s.index, h));
    const auto clear = [&](C* row, int64_t width) {
      if (row != nullptr) zero_rows(Matrix<C>{row, width}, 1, width);
    };
    clear(head_row<C>(p, params.dbonus, s.index, h, p.key_width), p.key_width);
    clear(head_row<C>(p, params.dskip, s.index, h, p.value_width), p.value_width);
  }
  for (int64_t t = (s.count - 1) / size * size; s.count > 0 && t >= 0; t -= size) {
    for (int64_t part = first; part < end; ++part) {
      form.chunk(s, t, smaller(size, s.count - t), part);
    }
  }
  for (int64_t h = heads.first; params.dinitial_state != nullptr && h < heads.end; ++h) {
    form.store(h, state_of<C>(p, params.dinitial_state, s.index, h));
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
