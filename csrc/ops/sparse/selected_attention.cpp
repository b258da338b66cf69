// selected_attention: attention over the blocks of keys that lists select.
#include "kernels/selected_attention/selected_attention_cuda.h"

#include <algorithm>
#include <cmath>

#include "kernels/attention/attention_cuda.h"
#include "ops/attention/attention.h"
#include "ops/device.h"
#include "ops/registry.h"
#include "ops/stage.h"
#include "runtime/denormals.h"
#include "runtime/measured_isa.h"

namespace omniattn::ops::attention {
namespace {

// indices (B | 1, 1 | Hkv | Hq, ceil(Tq / query_block), n) int32 or int64: blocks of block_size
// keys, each at most once in a list; -1: none. Other arguments as in attention; softcap 0: none.
OMNIATTN_FIELDS(SelectedInputs, Tensor q, k, v, indices; OptTensor sinks, seed);
OMNIATTN_FIELDS(SelectedOptions, SymInt block_size, query_block; bool causal;
                double scale, softcap, dropout_p);

// First entry of all lists that is neither -1 nor a block number; -1 if there is none.
template <class I>
int64_t wrong_entry(const Tensor& indices, int64_t blocks) {
  const auto* const data = static_cast<const I*>(indices.const_data_ptr());
  const int64_t entries = indices.size(3);  // size() is a call, which the loop would repeat
  const auto count = [&](int64_t dim) { return indices.stride(dim) == 0 ? 1 : indices.size(dim); };
  for (int64_t b = 0; b < count(0); ++b) {
    for (int64_t h = 0; h < count(1); ++h) {
      for (int64_t q = 0; q < count(2); ++q) {
        const I* const list =
            data + b * indices.stride(0) + h * indices.stride(1) + q * indices.stride(2);
        bool wrong = false;
        for (int64_t n = 0; n < entries; ++n) {
          wrong |= list[n] < -1 || list[n] >= blocks;
        }
        if (!wrong) continue;
        return *std::find_if(list, list + entries, [&](I n) { return n < -1 || n >= blocks; });
      }
    }
  }
  return -1;
}

// Checked arguments of forward and backward.
struct SelectedCall {
  const char* op;
  Call call;
  Tensor indices;
  SelectedLists lists;

  SelectedCall(const OpCall& given, const SelectedInputs& in, const SelectedOptions& x)
      : op(given.op), indices(in.indices) {
    const bool capped = x.softcap != 0;
    Ints score;
    Tensors aux;
    Floats params{x.scale, x.dropout_p};
    if (capped) {
      score.insert(score.end(), {static_cast<int64_t>(ScoreKind::softcap), -1, 2});
      params.push_back(x.softcap);
    }
    if (in.sinks.has_value()) {
      score.insert(score.end(), {static_cast<int64_t>(ScoreKind::sinks), 0, -1});
      aux.push_back(*in.sinks);
    }
    call = check({op, in.q, in.k, in.v, aux, in.seed, {}, score, params});
    const AttentionProblem& p = call.problem;
    constexpr int64_t kLimit = int64_t{1} << 40;
    require(x.block_size >= 1 && x.block_size < kLimit, op,
            "block_size must be in [1, 2^40), got block_size=", x.block_size);
    require(x.query_block >= 1 && x.query_block < kLimit, op,
            "query_block must be in [1, 2^40), got query_block=", x.query_block);
    check_indices(x);
    lists = {.indices = indices.const_data_ptr(),
             .wide = scalar_type(indices) == ScalarType::Long,
             .stride_b = indices.size(0) == 1 ? 0 : indices.stride(0),
             .stride_h = indices.size(1) == 1 ? 0 : indices.stride(1),
             .stride_q = indices.stride(2),
             .heads = indices.size(1),
             .count = indices.size(3),
             .query_block = x.query_block,
             .block_size = x.block_size,
             .causal = x.causal,
             .gathered = false,
             .shared = false};
    if (p.hq == 0 || p.tq == 0) return;
    // Packing pays if items read more keys than there are in total.
    const int64_t items = items_per_head(lists, p) * (group_size(p) / list_heads(lists, p));
    const int64_t blocks = std::min(lists.count, ceil_div(p.tk, x.block_size));
    lists.gathered = x.block_size < kGatheredBlock || x.block_size % 2 != 0 ||
                     items * blocks * x.block_size < 2 * p.tk;
    if constexpr (!kOnCuda) lists.shared = shares_items(lists, p);
  }

  void check_indices(const SelectedOptions& x) {
    const AttentionProblem& p = call.problem;
    const ScalarType type = scalar_type(indices);
    require(type == ScalarType::Int || type == ScalarType::Long, op,
            "indices must be int32 or int64, got ", name_of(type));
    require_tensor(op, "indices", indices, type);
    require(indices.dim() == 4, op,
            "indices must have 4 dimensions (B | 1, 1 | Hkv | Hq, query blocks, n), got ",
            indices.dim());
    const int64_t batch = indices.size(0), heads = indices.size(1);
    require(batch == 1 || batch == p.batch, op,
            "indices must have B or 1 batch entries, got B=", p.batch,
            ", indices.shape[0]=", batch);
    require(heads == 1 || heads == p.hkv || heads == p.hq, op,
            "indices must have 1, Hkv or Hq heads, got Hkv=", p.hkv, ", Hq=", p.hq,
            ", indices.shape[1]=", heads);
    require(indices.size(2) == ceil_div(p.tq, x.query_block), op,
            "indices must have a list for each block of queries, ceil(Tq / query_block), got Tq=",
            p.tq, ", query_block=", x.query_block, ", indices.shape[2]=", indices.size(2));
    indices = with_unit_last_stride(indices);
    if constexpr (!kOnCuda) {  // CUDA kernels ignore entries out of range
      if (indices.numel() == 0) return;
      const int64_t blocks = ceil_div(p.tk, x.block_size);
      const int64_t wrong = type == ScalarType::Long ? wrong_entry<int64_t>(indices, blocks)
                                                     : wrong_entry<int32_t>(indices, blocks);
      require(wrong == -1, op, "indices must be -1 or numbers of blocks in [0, ", blocks, "), got ",
              wrong);
    }
  }
};

bool has_rows(const AttentionProblem& p) { return p.batch > 0 && p.tq > 0 && p.hq > 0; }

// Runs the items of a kernel on the threads, each with scratch memory.
template <class Params>
void run_kernel(AttentionKernel<Params> kernel, const Params& x, int64_t items, int64_t elements) {
  run_items(x, items, elements * size_of(accumulator(x.attention.problem.dtype)),
            [kernel](const Params& params, void* scratch, int64_t begin, int64_t end) {
              const FlushDenormals flush;
              kernel(params, scratch, begin, end);
            });
}

// Few rows leave most of a tile of 16 empty. Tiles still pay where blocks of keys are packed for
// all lists, but not where keys are few or gathered per list. Where rows of several lists share a
// block, vectors and tiles are equally fast at about 32 rows and 64 keys.
Isa isa_of(const SelectedLists& s, const AttentionProblem& p) {
  constexpr int64_t kRows = 8, kKeys = 32, kPairs = 32 * 64;
  const int64_t keys = smaller(smaller(s.count, ceil_div(p.tk, s.block_size)) * s.block_size, p.tk);
  const int64_t all = selected_rows(s, p),
                rows = s.shared ? ceil_div(all * keys, larger(1, p.tk)) : all;
  const bool few = s.shared ? rows * smaller(s.block_size, kKeyBlock) < kPairs
                            : rows < kRows && (s.gathered || s.block_size < kKeys);
  return isa_for(MeasuredOp::attention, few ? accumulator(p.dtype) : p.dtype,
                 rows * keys * (p.d + p.dv));
}

void run_forward_cpu(SelectedForwardParams f) {
  const AttentionProblem& p = f.attention.problem;
  const Isa isa = isa_of(f.lists, p);
  Tensor packed;
  if (!f.lists.gathered) {
    packed = scratch(forward_workspace_elements(p), accumulator(p.dtype));
    f.attention.workspace = packed.mutable_data_ptr();
    const auto pack = attention_forward_kernels_on(isa, p.dtype).pack;
    parallel_ranges(pack_items(p), 1, [&](int64_t begin, int64_t end) {
      const FlushDenormals flush;
      pack(f.attention, nullptr, begin, end);
    });
  }
  run_kernel(selected_forward_kernels_on(isa, p.dtype).forward, f, selected_items(f.lists, p),
             selected_forward_scratch(f));
}

void run_backward_cpu(SelectedBackwardParams b) {
  const AttentionProblem& p = b.attention.problem;
  const auto& kernels = selected_backward_kernels_on(isa_of(b.lists, p), p.dtype);
  const DType acc = accumulator(p.dtype);
  b.attention.splits = selected_splits(b.lists, p);
  Tensor packed, sink_parts;
  if (!b.lists.gathered) {
    packed = scratch(selected_packed_elements(p), acc);
    b.packed = packed.mutable_data_ptr();
    run_kernel(kernels.pack, b, pack_items(p), 0);
  }
  if (b.attention.grad_sinks != nullptr) {
    sink_parts = scratch(p.batch * p.hq * p.tq, acc);
    b.attention.part_sinks = sink_parts.mutable_data_ptr();
  }
  const Tensor sums = scratch(b.attention.splits * selected_sums_elements(p), acc);
  b.attention.workspace = sums.mutable_data_ptr();
  run_kernel(kernels.backward, b, kv_head_items(p) * b.attention.splits,
             selected_backward_scratch(b));
  run_kernel(kernels.finish, b, pack_items(p), 0);
  if (b.attention.grad_sinks != nullptr) kernels.sum_sinks(b, nullptr, 0, p.hq);
}

void run_backward_cuda(const char* op, SelectedBackwardParams b) {
  const AttentionProblem& p = b.attention.problem;
  const SelectedLists& s = b.lists;
  const auto run = [op](Status status) { require_launched(op, status); };
  const Tensor delta = scratch(stat_rows(p), accumulator(p.dtype));
  b.attention.workspace = delta.mutable_data_ptr();
  Tensor sink_parts;
  if (b.attention.grad_sinks != nullptr) {
    sink_parts = scratch(stat_rows(p), accumulator(p.dtype));
    b.attention.part_sinks = sink_parts.mutable_data_ptr();
  }
  run(launch_attention_delta(b.attention, stream()));
  if (b.attention.grad_sinks != nullptr) {
    run(launch_attention_sum_rows(p, b.attention.part_sinks, 1, b.attention.grad_sinks, stream()));
  }
  // Lists of 32-bit numbers have half the size of int64 indices.
  const int64_t owners = p.batch * s.heads, blocks = selected_blocks(s, p);
  const int64_t entries = list_count(s, p) * s.count;
  require(entries < (int64_t{1} << 31), op,
          "the lists of a head must have less than 2^31 entries, got ", entries);
  const auto numbers = [&](int64_t count) {
    return torch::stable::new_zeros(delta, {count}, ScalarType::Int);
  };
  const Tensor offsets = numbers(owners * inverted_parts(s, p) * blocks);
  const Tensor starts = numbers(owners * (blocks + 1)), lists = numbers(owners * entries);
  const auto data = [](const Tensor& t) { return static_cast<int32_t*>(t.mutable_data_ptr()); };
  const InvertedLists inverted{data(offsets), data(starts), data(lists)};
  run(launch_invert_lists(s, p, inverted, stream()));
  run(launch_selected_gradients(b, inverted, stream()));
}

OMNIATTN_FIELDS(SelectedResults, Tensor out, lse; Output lse_tail);

SelectedResults selected_attention(const OpCall& given, const SelectedInputs& in,
                                   const SelectedOptions& options) {
  const DeviceScope scope(in.q);
  const SelectedCall x(given, in, options);
  const AttentionProblem& p = x.call.problem;
  const Tensor out = empty_tensor(x.call.out_sizes, p.dtype);
  const Tensor lse = empty_tensor(x.call.lse_sizes, accumulator(p.dtype));
  const Output lse_tail(given.saves, x.call.lse_sizes, accumulator(p.dtype));
  if (!has_rows(p)) return {out, lse, lse_tail};
  const SelectedForwardParams params{
      {p, mutable_view_of(out), lse.mutable_data_ptr(), lse_tail.data(), nullptr}, x.lists};
  if constexpr (kOnCuda) {
    require_launched(x.op, launch_selected_forward(params, stream()));
  } else {
    run_forward_cpu(params);
  }
  return {out, lse, lse_tail};
}

OMNIATTN_FIELDS(SelectedIncoming, OptTensor grad_out, grad_lse);
OMNIATTN_FIELDS(SelectedSaved, Tensor out, lse, lse_tail);
OMNIATTN_FIELDS(SelectedWanted, bool sinks_grad);
OMNIATTN_FIELDS(SelectedGradients, Tensor dq, dk, dv, dsinks);

SelectedGradients selected_attention_backward(const OpCall& given, const SelectedIncoming& grads,
                                              const SelectedInputs& in, const SelectedSaved& saved,
                                              const SelectedOptions& options,
                                              const SelectedWanted& wanted) {
  const char* const op = given.op;
  const DeviceScope scope(in.q);
  const SelectedCall x(given, in, options);
  const AttentionProblem& p = x.call.problem;
  const DType acc = accumulator(p.dtype);
  const auto rows = [&](const char* name, const Tensor& t) {
    require_tensor(op, name, t, p.dtype);
    require_sizes(op, name, t, x.call.out_sizes);
    return with_unit_last_stride(t);
  };
  const auto statistics = [&](const char* name, const Tensor& t) {
    require_tensor(op, name, t, acc);
    require_sizes(op, name, t, x.call.lse_sizes);
    return as_dense(t);
  };
  const Tensor out_rows = rows("out", saved.out);
  const Tensor grad_rows = grads.grad_out.has_value()
                               ? rows("grad_out", *grads.grad_out)
                               : torch::stable::new_zeros(saved.out, saved.out.sizes());
  const Tensor lse_rows = statistics("lse", saved.lse);
  const Tensor tail_rows = statistics("lse_tail", saved.lse_tail);
  OptTensor grad_lse_rows;
  if (grads.grad_lse.has_value()) grad_lse_rows = statistics("grad_lse", *grads.grad_lse);
  const Tensor dq = empty_tensor(in.q.sizes(), p.dtype), dk = empty_tensor(in.k.sizes(), p.dtype);
  const Tensor dv = empty_tensor(in.v.sizes(), p.dtype);
  const Output dsinks(wanted.sinks_grad && in.sinks.has_value(), {p.hq}, acc);
  SelectedBackwardParams b{};
  b.lists = x.lists;
  b.attention.problem = p;
  b.attention.out = view_of(out_rows);
  b.attention.grad_out = view_of(grad_rows);
  b.attention.lse = lse_rows.const_data_ptr();
  b.attention.lse_tail = tail_rows.const_data_ptr();
  b.attention.grad_lse = data_or_null(grad_lse_rows);
  b.attention.grad_q = mutable_view_of(dq);
  b.attention.grad_k = mutable_view_of(dk);
  b.attention.grad_v = mutable_view_of(dv);
  b.attention.grad_sinks = dsinks.data();
  if (has_rows(p)) {
    if constexpr (kOnCuda) {
      run_backward_cuda(x.op, b);
    } else {
      run_backward_cpu(b);
    }
  } else {
    for (const Tensor* t : {&dk, &dv}) torch::stable::fill_(*t, 0);
    if (dsinks.data() != nullptr) torch::stable::fill_(dsinks.tensor(), 0);
  }
  const Tensor sums = dsinks.tensor();
  return {dq, dk, dv,
          in.sinks.has_value() ? torch::stable::to(sums, scalar_type(*in.sinks)) : sums};
}

const Registry registry([](Registry& ops) {
  ops.add<selected_attention>("selected_attention", saves_last);
  ops.add<selected_attention_backward>("selected_attention_backward");
});

}  // namespace
}  // namespace omniattn::ops::attention
