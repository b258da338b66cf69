// The gates of gates.h on the CPU: one vector of channels at a time, step by step.
#include "kernels/scan/gates.h"

#include "kernels/scan/scan_rules.h"
#include "runtime/assert.h"
#include "runtime/denormals.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Calls f(sequence, its number, first channel in the tensor, part) for the vectors of an item.
template <class C, class F>
OMNIATTN_INLINE void for_vectors(const Gates& p, int64_t item, const F& f) {
  const int64_t blocks = ceil_div(p.channels, p.block);
  const int64_t n = item / blocks, first = item % blocks * p.block;
  const ScanSequence s = scan_sequence(p.rows, n);
  for_row<C>(smaller(p.block, p.channels - first),
             [&](int64_t c, auto part) { f(s, n, first + c, part); });
}

template <class C>
void forward_item(const GatesParams& params, int64_t item) {
  const Gates& p = params.gates;
  for_vectors<C>(p, item, [&](const ScanSequence& s, int64_t n, int64_t c, auto part) {
    scan_rules::GatesState<Vec<C>> m{C(0), C(0)};
    if (p.initial_state != nullptr) {
      m.top = part.load(static_cast<const C*>(p.initial_state) + n * p.channels + c);
    }
    for (int64_t t = s.begin; t < s.begin + s.count; ++t) {
      const int64_t at = (s.batch * p.rows.steps + t) * p.channels + c;
      const auto y = scan_rules::gates_step(m, part.load(p.g.row<C>(s.batch, t) + c),
                                            part.load(p.i.row<C>(s.batch, t) + c));
      part.store(static_cast<C*>(params.decay) + at, y.decay);
      part.store(static_cast<C*>(params.factor) + at, y.factor);
      part.store(static_cast<C*>(params.m) + at, m.top + m.sum);
    }
    part.store(static_cast<C*>(params.final_state) + n * p.channels + c, m.top + m.sum);
  });
}

template <class C>
void backward_item(const GatesBackwardParams& params, int64_t item) {
  const Gates& p = params.gates;
  for_vectors<C>(p, item, [&](const ScanSequence& s, int64_t n, int64_t c, auto part) {
    Vec<C> dm(C(0));
    if (params.grad_final_state != nullptr) {
      dm = part.load(static_cast<const C*>(params.grad_final_state) + n * p.channels + c);
    }
    for (int64_t t = s.begin + s.count - 1; t >= s.begin; --t) {
      const int64_t at = (s.batch * p.rows.steps + t) * p.channels + c;
      const auto of = [&](const ScanView& x) { return part.load(x.row<C>(s.batch, t) + c); };
      const auto d =
          scan_rules::gates_back(of(params.decay), of(params.factor), of(params.grad_decay),
                                 of(params.grad_factor), dm + of(params.grad_m));
      part.store(static_cast<C*>(params.dg) + at, d.dg);
      part.store(static_cast<C*>(params.di) + at, d.di);
      dm = d.dg;
    }
    part.store(static_cast<C*>(params.dinitial_state) + n * p.channels + c, dm);
  });
}

int64_t items(const Gates& p) { return p.rows.sequences * ceil_div(p.channels, p.block); }

void forward(const GatesParams& p, void*, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, items(p.gates));
  dispatch_compute(p.gates.dtype, [&]<class C>(C) {
    for (int64_t i = begin; i < end; ++i) forward_item<C>(p, i);
  });
}
void backward(const GatesBackwardParams& p, void*, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, items(p.gates));
  const FlushDenormals flush;
  dispatch_compute(p.gates.dtype, [&]<class C>(C) {
    for (int64_t i = begin; i < end; ++i) backward_item<C>(p, i);
  });
}

}  // namespace

extern const GatesKernels gates_kernels_table;
const GatesKernels gates_kernels_table{forward, backward};

}  // namespace omniattn::OMNIATTN_ISA
