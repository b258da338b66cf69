// Inputs of an attention call: tensors, mask and score.
#pragma once

#include <cstdint>

#include "kernels/score_program/score_program.h"
#include "runtime/dtype.h"
#include "semantics/mask.h"
#include "semantics/philox.h"
#include "semantics/score.h"
#include "semantics/seqlen.h"
#include "semantics/sequences.h"
#include "semantics/softmax.h"

namespace omniattn {

// (B, T, H, D), unit stride over D; strides in elements.
struct HeadView {
  const void* data;
  int64_t stride_b, stride_t, stride_h;
};
struct MutableHeadView {
  void* data;
  int64_t stride_b, stride_t, stride_h;
};

// (B, Hq, Tq, Tk) by strides (0: broadcast), unit stride over keys. data == nullptr: no view.
struct ScoreView {
  const void* data;
  DType dtype;
  int64_t stride_b, stride_h, stride_q;
};

// Table term of all pairs, expanded by the op, in the compute type. On the CPU 64 keys past Tk are
// readable. The term of a pair is element
//   origin + b stride_b + h stride_h + q stride_q + k
struct RelativeView {
  const void* data;  // null: none
  int64_t origin, stride_b, stride_h, stride_q;
};

// Rows of distances (rows, Hq, D) in the compute type, contiguous. A pair reads row k - i + zero,
// clamped to the first and last row. data == nullptr: none.
struct DistanceRows {
  const void* data;
  int64_t rows, zero;
};

struct AttentionProblem {
  DType dtype;
  int64_t batch, tq, tk, hq, hkv, d, dv;
  HeadView q;  // (B, Tq, Hq, D)
  HeadView k;  // (B, Tk, Hkv, D)
  HeadView v;  // (B, Tk, Hkv, Dv)
  // True if k and v are int8. Their rows then have factors (B, Tk, Hkv), in the compute type.
  bool is_int8;
  HeadView k_scale, v_scale;
  PageView pages;
  AttentionMask mask;
  uint32_t terms;  // set of the score's rules, see ScoreKind
  Score score;
  DistanceRows relative_keys, relative_queries;
  ScoreView bias;
  TableTerm table;
  RelativeView relative;        // the expanded table; kernels read only this
  int64_t relative_shift;       // k - i in the whole problem (see Part), minus k - i in this one
  const ScoreProgram* program;  // of a score_mod, or null
  RunProgram run_program;       // the interpreter, on the CPU
  int64_t first_position;       // position of query 0 for a program
  const void* sinks;            // (Hq,) in the compute type, or null
  const void* head_scale;       // (Hq,) in the compute type, or null
  Dropout dropout;
  const int64_t* seed;     // (2,) for kernels that read it themselves (CUDA), or null
  int64_t first_batch;     // of a packed sequence, a problem with B = 1; for dropout
  int64_t lse_stride;      // elements of lse between heads: Tq, or the rows of all packed sequences
  SequenceRows sequences;  // if any, tq and tk are the largest lengths, batch is their number
};

// Size of an element of k and v.
OMNIATTN_FN int64_t key_size(const AttentionProblem& p) { return p.is_int8 ? 1 : size_of(p.dtype); }
// Place of key t of batch entry b in a tensor of keys, of values or of their factors, at head 0.
OMNIATTN_FN int64_t key_offset(const AttentionProblem& p, const HeadView& x, int64_t b, int64_t t) {
  if (p.pages.table == nullptr) return b * x.stride_b + t * x.stride_t;
  const int64_t page = p.pages.table[b * p.pages.stride_b + t / p.pages.size];
  return page * x.stride_b + t % p.pages.size * x.stride_t;
}
OMNIATTN_FN bool has_distance_rows(const AttentionProblem& p) {
  return p.relative_keys.data != nullptr || p.relative_queries.data != nullptr;
}
// k - i of a query and a key in the whole problem.
OMNIATTN_FN int64_t distance_of(const AttentionProblem& p, int64_t q, int64_t k) {
  return k - q - (p.tk - p.tq) + p.relative_shift;
}
OMNIATTN_FN int64_t row_of_distance(const DistanceRows& x, int64_t distance) {
  const int64_t row = distance + x.zero;
  return row < 0 ? 0 : row < x.rows ? row : x.rows - 1;
}

template <class A>
OMNIATTN_FN A head_factor(const AttentionProblem& p, int64_t h) {
  return p.head_scale == nullptr ? A(1) : static_cast<const A*>(p.head_scale)[h];
}
// Factor of q: `pre` times the factor of its head.
template <class A>
OMNIATTN_FN A query_factor(const AttentionProblem& p, int64_t h) {
  return static_cast<A>(p.score.pre) * head_factor<A>(p, h);
}

// Running maximum of a row before its first key: the sink, if there is one.
template <class A>
OMNIATTN_FN A initial_maximum(const AttentionProblem& p, int64_t h) {
  if (!is_softmax(p.score)) return A(0);
  if (p.sinks == nullptr) return negative_infinity<A>();
  return static_cast<const A*>(p.sinks)[h];
}

}  // namespace omniattn
