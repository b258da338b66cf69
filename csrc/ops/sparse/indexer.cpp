// dsa_indexer: checks, allocation, and the split over threads.
#include "kernels/indexer/indexer.h"

#include <algorithm>

#include "ops/device.h"
#include "ops/registry.h"
#include "ops/stage.h"

namespace omniattn::ops::indexer {
namespace {

constexpr int64_t kMostKeys = (int64_t{1} << 31) - 1;  // indices are int32

// Packs k once if several blocks of queries read it, then finds the lists; with splits, finds the
// candidates of each split and merges them.
void run_cpu(IndexerParams p) {
  const DType acc = accumulator(p.dtype);
  const auto& kernels = indexer_kernels(p.dtype);
  p.splits = indexer_splits(p);
  Tensor packed, parts;
  if (indexer_blocks(p) > 1) {
    packed = scratch(indexer_packed(p), acc);
    p.workspace = packed.mutable_data_ptr();
    parallel_ranges(p.batch * indexer_tiles(p), 1,
                    [&](int64_t begin, int64_t end) { kernels.pack(p, nullptr, begin, end); });
  }
  if (p.splits > 1) {
    parts = scratch(indexer_parts(p), acc);
    p.parts = parts.mutable_data_ptr();
  }
  const auto run = [&](auto kernel, int64_t items, int64_t elements) {
    run_items(p, items, elements * size_of(acc), kernel);
  };
  run(kernels.choose, p.batch * indexer_blocks(p) * p.splits, indexer_scratch(p));
  if (p.splits > 1) run(kernels.merge, p.batch * p.tq, indexer_merge_scratch(p));
}

void run_cuda(IndexerParams p) {
  const Tensor workspace = scratch(indexer_cuda_workspace(p), accumulator(p.dtype));
  p.workspace = workspace.mutable_data_ptr();
  require_launched("dsa_indexer", launch_dsa_indexer(p, stream()));
}

OMNIATTN_FIELDS(Inputs, Tensor q, k; OptTensor w, key_padding);
OMNIATTN_FIELDS(Options, SymInt topk; bool causal, relu, recent, return_scores);
// index (B, Tq, topk) int32 of the largest scores; if wanted, these scores in the compute dtype.
OMNIATTN_FIELDS(Results, Tensor index; Output scores);

Results dsa_indexer(const OpCall& call, const Inputs& in, const Options& options) {
  const char* const op = call.op;
  const auto& [q_given, k_given, w_given, key_padding] = in;
  const int64_t topk = options.topk;
  const DeviceScope scope(q_given);
  const DType dtype = dtype_of(op, "q", q_given), acc = accumulator(dtype);
  require_tensor(op, "q", q_given, dtype);
  require(q_given.dim() == 4, op, "q must have 4 dimensions (B, Tq, H, D), got ", q_given.dim());
  require_tensor(op, "k", k_given, dtype);
  require(k_given.dim() == 3, op, "k must have 3 dimensions (B, Tk, D), got ", k_given.dim());
  const int64_t batch = q_given.size(0), tq = q_given.size(1), heads = q_given.size(2);
  const int64_t tk = k_given.size(1);
  require_sizes(op, "k", k_given, {batch, tk, q_given.size(3)});
  require(topk >= 0 && topk <= kMostKeys, op, "topk must be in [0, 2^31), got topk=", topk);
  require(tk <= kMostKeys, op, "k must have less than 2^31 keys, got Tk=", tk);
  OptTensor w, real;
  if (w_given.has_value()) {
    require_tensor(op, "w", *w_given, acc);
    require_sizes(op, "w", *w_given, {batch, tq, heads});
    w = as_dense(*w_given);
  }
  if (key_padding.has_value()) {
    require_tensor(op, "key_padding", *key_padding, ScalarType::Bool);
    require_sizes(op, "key_padding", *key_padding, {batch, tk});
    real = with_unit_last_stride(*key_padding);
  }
  const Tensor q = with_unit_last_stride(q_given), k = with_unit_last_stride(k_given);
  const Tensor index = torch::stable::new_empty(q, {batch, tq, topk}, ScalarType::Int);
  const Output scores(options.return_scores, {batch, tq, topk}, acc);
  const IndexerParams p{.dtype = dtype,
                        .batch = batch,
                        .tq = tq,
                        .tk = tk,
                        .heads = heads,
                        .d = q.size(3),
                        .count = topk,
                        .q = {q.const_data_ptr(), q.stride(0), q.stride(1), q.stride(2)},
                        .k = {k.const_data_ptr(), k.stride(0), k.stride(1), 0},
                        .w = data_or_null(w),
                        .real = static_cast<const uint8_t*>(data_or_null(real)),
                        .real_stride = real.has_value() ? real->stride(0) : 0,
                        .causal = options.causal,
                        .relu = options.relu,
                        .recent = options.recent,
                        .index = static_cast<int32_t*>(index.mutable_data_ptr()),
                        .scores = scores.data(),
                        .workspace = nullptr,
                        .splits = 1,
                        .parts = nullptr};
  if (index.numel() > 0) {
    if constexpr (kOnCuda) {
      run_cuda(p);
    } else {
      run_cpu(p);
    }
  }
  return {index, scores};
}

const Registry registry([](Registry& ops) { ops.add<dsa_indexer>("dsa_indexer"); });

}  // namespace
}  // namespace omniattn::ops::indexer
