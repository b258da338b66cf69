// One sequence as a problem: pointers to its first rows, its lengths, and its entries in the side
// tensors of the mask.
#include "ops/attention/attention_sequences.h"

#include <type_traits>

#include "kernels/attention/attention_terms.h"
#include "ops/parallel.h"

namespace omniattn::ops::attention {
namespace {

template <class P>
P* moved(P* data, int64_t elements, int64_t size) {
  using Byte = std::conditional_t<std::is_const_v<P>, const char, char>;
  return data == nullptr ? nullptr : static_cast<Byte*>(data) + elements * size;
}

template <class View>
void move_rows(View& x, const Sequence& s, int64_t row, int64_t size) {
  x.data = moved(x.data, s.row * x.stride_b + row * x.stride_t, size);
}

MaskRule rule_of(MaskRule rule, int64_t b) {
  switch (mask_side_tensor(rule.kind)) {
    case SideTensor::per_score:
      rule.side = moved(rule.side, b * rule.stride_b, 1);
      break;
    case SideTensor::blocks:
      rule.side = moved(rule.side, b * rule.stride_b, sizeof(int32_t));
      break;
    case SideTensor::none:
    case SideTensor::per_batch:
    case SideTensor::ids:
      rule.side = moved(rule.side, b * rule.stride_b, sizeof(int64_t));
      rule.second = moved(rule.second, b * rule.second_stride_b, sizeof(int64_t));
      break;
  }
  return rule;
}

// Problem of one sequence; it reads the table term that was expanded for the longest one.
AttentionProblem problem_of(AttentionProblem p, const Sequence& s) {
  if (p.sequences.q == nullptr) p.first_position = s.tk - s.tq;  // a cache: queries are at its end
  const int64_t size = size_of(p.dtype), wide = size_of(accumulator(p.dtype));
  if (is_relative(p.table.kind)) p.relative.origin = p.tk - 1 + s.tq - s.tk;
  p.relative.data = moved(p.relative.data, s.b * p.relative.stride_b, wide);
  p.batch = 1;
  p.sequences = {};
  p.tq = s.tq;
  p.tk = s.tk;
  p.first_batch = s.b;
  move_rows(p.q, s, s.q_begin, size);
  if (p.pages.table != nullptr) {
    p.pages.table += s.row * p.pages.stride_b;
  } else {
    move_rows(p.k, s, s.k_begin, key_size(p));
    move_rows(p.v, s, s.k_begin, key_size(p));
    move_rows(p.k_scale, s, s.k_begin, wide);
    move_rows(p.v_scale, s, s.k_begin, wide);
  }
  p.mask.tq = s.tq;
  p.mask.tk = s.tk;
  for (int32_t n = 0; n < p.mask.count; ++n) p.mask.rules[n] = rule_of(p.mask.rules[n], s.b);
  p.bias.data = moved(p.bias.data, s.b * p.bias.stride_b, size_of(p.bias.dtype));
  return p;
}

int64_t stat_offset(const AttentionProblem& p, const Sequence& s) {
  return s.row * p.hq * p.lse_stride + s.q_begin;
}

}  // namespace

AttentionForwardParams of_sequence(AttentionForwardParams f, const Sequence& s) {
  const AttentionProblem& p = f.problem;
  const int64_t wide = size_of(accumulator(p.dtype));
  move_rows(f.out, s, s.q_begin, size_of(p.dtype));
  f.lse = moved(f.lse, stat_offset(p, s), wide);
  f.lse_tail = moved(f.lse_tail, stat_offset(p, s), wide);
  f.problem = problem_of(p, s);
  return f;
}

AttentionBackwardParams of_sequence(AttentionBackwardParams x, const Sequence& s) {
  const AttentionProblem& p = x.problem;
  const int64_t size = size_of(p.dtype), wide = size_of(accumulator(p.dtype));
  move_rows(x.out, s, s.q_begin, size);
  move_rows(x.grad_out, s, s.q_begin, size);
  move_rows(x.grad_q, s, s.q_begin, size);
  move_rows(x.grad_k, s, s.k_begin, size);
  move_rows(x.grad_v, s, s.k_begin, size);
  x.lse = moved(x.lse, stat_offset(p, s), wide);
  x.lse_tail = moved(x.lse_tail, stat_offset(p, s), wide);
  x.grad_lse = moved(x.grad_lse, stat_offset(p, s), wide);
  x.grad_bias = moved(x.grad_bias, s.b * x.grad_bias_stride_b, wide);
  x.problem = problem_of(p, s);
  return x;
}

AttentionTangentParams of_sequence(AttentionTangentParams x, const Sequence& s) {
  const AttentionProblem& p = x.problem;
  const int64_t size = size_of(p.dtype), wide = size_of(accumulator(p.dtype));
  for (HeadView* view : {&x.out, &x.moved_q, &x.grad_out, &x.moved_grad_out}) {
    move_rows(*view, s, s.q_begin, size);
  }
  for (HeadView* view : {&x.moved_k, &x.moved_v}) move_rows(*view, s, s.k_begin, size);
  for (MutableHeadView* view : {&x.moved_out, &x.moved_grad_q}) {
    move_rows(*view, s, s.q_begin, size);
  }
  for (MutableHeadView* view : {&x.moved_grad_k, &x.moved_grad_v}) {
    move_rows(*view, s, s.k_begin, size);
  }
  for (const void** each : {&x.lse, &x.lse_tail, &x.grad_lse, &x.moved_grad_lse}) {
    *each = moved(*each, stat_offset(p, s), wide);
  }
  x.moved_lse = moved(x.moved_lse, stat_offset(p, s), wide);
  x.problem = problem_of(p, s);
  return x;
}

void gather_rows(AttentionProblem& p, Tensors& memory) {
  const auto gather = [&](HeadView& x, const HeadView& factors, int64_t width) {
    const int64_t sizes[] = {p.tk, p.hkv, width};
    memory.push_back(empty_tensor({sizes, 3}, p.dtype));
    void* const to = memory.back().mutable_data_ptr();
    parallel_ranges(p.tk, grain_of(p.hkv * width), [&](int64_t begin, int64_t end) {
      attention_terms_kernels(p.dtype).gather_rows(p, x, factors, width, to, begin, end);
    });
    x = {memory.back().const_data_ptr(), 0, p.hkv * width, width};
  };
  gather(p.k, p.k_scale, p.d);
  gather(p.v, p.v_scale, p.dv);
  p.pages = {};
  p.is_int8 = false;
}

}  // namespace omniattn::ops::attention
