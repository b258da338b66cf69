// dsa_indexer_loss on the CPU: the split over threads.
#include "ops/sparse/indexer_loss.h"

#include "ops/stage.h"
#include "runtime/denormals.h"

namespace omniattn::ops::indexer_loss {
namespace {

template <class Params>
void run(AttentionKernel<Params> kernel, const Params& x, int64_t items, int64_t elements) {
  run_items(x, items, elements * size_of(accumulator(x.problem.dtype)),
            [kernel](const Params& params, void* scratch, int64_t begin, int64_t end) {
              const FlushDenormals flush;
              kernel(params, scratch, begin, end);
            });
}

}  // namespace

void forward(const Call& call, const Tensor& loss, const Output& kept) {
  const IndexerLossParams& p = call.p;
  const IndexerLossForwardParams x{p, loss.mutable_data_ptr(), kept.data()};
  run(indexer_loss_kernels(p.dtype).forward, x, p.batch * loss_blocks(p), loss_forward_scratch(p));
}

Gradients backward(const Call& call, const Tensor& grad, const Tensor& kept) {
  const IndexerLossParams& p = call.p;
  const Tensor dq = empty_tensor(call.q_idx.sizes(), p.dtype);
  const Tensor dk = empty_tensor(call.k_idx.sizes(), p.dtype);
  const Output dw(call.w.has_value(), {p.batch, p.tq, p.heads}, call.acc);
  const int64_t splits = loss_splits(p);
  const Tensor sums = scratch(splits * loss_sums(p), call.acc);
  const IndexerLossBackwardParams x{
      .problem = p,
      .grad = grad.const_data_ptr(),
      .kept = kept.const_data_ptr(),
      .q_grad = {dq.mutable_data_ptr(), dq.stride(0), dq.stride(1), dq.stride(2)},
      .k_grad = {dk.mutable_data_ptr(), dk.stride(0), dk.stride(1), 0},
      .w_grad = dw.data(),
      .splits = splits,
      .sums = sums.mutable_data_ptr()};
  const auto& kernels = indexer_loss_kernels(p.dtype);
  run(kernels.backward, x, p.batch * splits, loss_backward_scratch(p));
  parallel_ranges(p.batch * p.tk, grain_of(splits * p.d),
                  [&](int64_t begin, int64_t end) { kernels.finish(x, nullptr, begin, end); });
  return {dq, dk, dw};
}

}  // namespace omniattn::ops::indexer_loss
