// mamba3_inputs on the CPU.
#include "ops/state_space/mamba3.h"

#include "kernels/scan/mamba3.h"

#include <algorithm>
#include <vector>

#include "ops/registry.h"
#include "ops/shards.h"
#include "ops/stage.h"

namespace omniattn::ops::mamba3 {
namespace {

using SizeList = std::vector<int64_t>;

Sizes view_of(const SizeList& sizes) { return {sizes.data(), sizes.size()}; }

// Checked arguments of forward and backward.
struct Problem : SequenceProblem {
  Mamba3 shared{};
  SizeList of_heads, rows, pairs, reads, bias, state;
  std::vector<Tensor> copies;  // of arguments that kernels cannot read in place

  Problem(const OpCall& call, const Inputs& in, const SequenceArguments& given,
          const Options& options)
      : SequenceProblem(call.op, "q", in.q, 5, given.cu_seqlens) {
    Mamba3& p = shared;
    p.dtype = dtype;
    p.rows = {sequences, steps, packed.rows.q};
    p.rank = in.q.size(2), p.groups = in.q.size(3), p.width = in.q.size(4);
    p.heads = with_dims("dt", in.dt, 3).size(2);
    p.block = heads_of_item();
    p.pairs = with_dims("angles", in.angles, 4).size(3);
    p.interleaved = options.interleaved;
    require(p.groups > 0 ? p.heads % p.groups == 0 : p.heads == 0, op,
            "the heads of dt must be a multiple of the groups of q, got ", p.heads, " and ",
            p.groups);
    require(p.width % 2 == 0 && p.pairs <= p.width / 2, op,
            "angles must have at most N / 2 pairs of an even N, got ", p.pairs, " and N=", p.width);
    of_heads = {batch, steps, p.heads};
    rows = {batch, steps, p.rank, p.heads, p.width};
    pairs = {batch, steps, p.heads, p.pairs};
    reads = {batch, steps, p.rank, p.heads, p.rank};
    bias = {p.heads, p.rank, p.width};
    state = {sequences, p.heads, p.pairs};
    p.q = ranks("q", in.q, in.q.sizes());
    p.k = ranks("k", in.k, in.q.sizes());
    p.dt = kept("dt", in.dt, of_heads);
    p.trap = kept("trap", in.trap, of_heads);
    p.q_bias = kept("q_bias", in.q_bias, bias);
    p.k_bias = kept("k_bias", in.k_bias, bias);
    require_tensor(op, "angles", in.angles, acc);
    require_sizes(op, "angles", in.angles, view_of(pairs));
    const Tensor& angles = copies.emplace_back(with_unit_last_stride(in.angles));
    p.angles = {angles.const_data_ptr(), angles.stride(0), angles.stride(1), angles.stride(2)};
    p.initial_state = kept("initial_state", given.initial_state, state);
  }

  // A contiguous tensor in A, or null.
  const void* kept(const char* name, const OptTensor& given, const SizeList& want) {
    if (!given.has_value()) return nullptr;
    return copies.emplace_back(*dense(name, given, view_of(want))).const_data_ptr();
  }

 private:
  // As many heads as leave each thread a few items, since rows of neighbouring heads lie together.
  int64_t heads_of_item() const {
    constexpr int64_t kItems = 2, kMost = 8;
    const int64_t threads = torch::stable::get_num_threads();
    return std::clamp<int64_t>(sequences * shared.heads / (kItems * threads), 1, kMost);
  }
  RankView ranks(const char* name, const Tensor& given, Sizes want) {
    require_tensor(op, name, given, dtype);
    require_sizes(op, name, given, want);
    const Tensor& t = copies.emplace_back(with_unit_last_stride(given));
    return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
  }
};

}  // namespace

Results mamba3_inputs(const OpCall& call, const Inputs& in, const SequenceArguments& sequences,
                      const Options& options) {
  const Problem p(call, in, sequences, options);
  Results r{.queries = {true, view_of(p.rows), p.acc},
            .keys = {true, view_of(p.rows), p.acc},
            .weights = {true, view_of(p.of_heads), p.acc},
            .reads = {true, view_of(p.reads), p.acc},
            .phases = {true, view_of(p.pairs), p.acc}};
  const Mamba3Params params{.problem = p.shared,
                            .queries = r.queries.data(),
                            .keys = r.keys.data(),
                            .weights = r.weights.data(),
                            .reads = r.reads.data(),
                            .phases = r.phases.data()};
  const Mamba3Kernels& kernels = mamba3_kernels(p.dtype);
  run_items(params, p.shared.items(), kernels.bytes(p.shared), kernels.forward);
  return r;
}

Gradients mamba3_inputs_backward(const OpCall& call, const Incoming& grads, const Inputs& in,
                                 const SequenceArguments& sequences, const Saved& saved,
                                 const Options& options) {
  Problem p(call, in, sequences, options);
  require_dense(p.op, "phases", saved.phases, p.acc, view_of(p.pairs));
  Gradients d{.dq = {true, in.q.sizes(), p.dtype},
              .dk = {true, in.q.sizes(), p.dtype},
              .ddt = {true, view_of(p.of_heads), p.acc},
              .dtrap = {true, view_of(p.of_heads), p.acc},
              .dq_bias = {true, view_of(p.bias), p.acc},
              .dk_bias = {true, view_of(p.bias), p.acc},
              .dangles = {true, view_of(p.pairs), p.acc},
              .dinitial_state = {sequences.initial_state.has_value(), view_of(p.state), p.acc}};
  Shards of_groups(p.dtype, p.shared.group_heads());
  Shards of_sequences(p.acc, std::max<int64_t>(1, p.sequences));
  const Mamba3BackwardParams params{
      .problem = p.shared,
      .phases = saved.phases.const_data_ptr(),
      .grad_queries = p.kept("grad_queries", grads.grad_queries, p.rows),
      .grad_keys = p.kept("grad_keys", grads.grad_keys, p.rows),
      .grad_weights = p.kept("grad_weights", grads.grad_weights, p.of_heads),
      .grad_reads = p.kept("grad_reads", grads.grad_reads, p.reads),
      .grad_phases = p.kept("grad_phases", grads.grad_phases, p.pairs),
      .row_dtype = of_groups.count() == 1 ? p.dtype : p.acc,
      .dq = of_groups.parts_of(d.dq),
      .dk = of_groups.parts_of(d.dk),
      .ddt = d.ddt.data(),
      .dtrap = d.dtrap.data(),
      .dq_bias = of_sequences.parts_of(d.dq_bias),
      .dk_bias = of_sequences.parts_of(d.dk_bias),
      .dangles = d.dangles.data(),
      .dinitial_state = d.dinitial_state.data()};
  if (p.sequences == 0) {
    for (const Output* each : {&d.dq_bias, &d.dk_bias}) {
      Tensor zeros = each->tensor();
      torch::stable::zero_(zeros);
    }
  }
  const Mamba3Kernels& kernels = mamba3_kernels(p.dtype);
  run_items(params, p.shared.items(), kernels.backward_bytes(p.shared), kernels.backward);
  of_groups.sum();
  of_sequences.sum();
  return d;
}

namespace {

const Registry registry([](Registry& ops) {
  ops.name("mamba3_inputs", {{"mamba3"}});
  ops.implement<mamba3_inputs>("mamba3_inputs", differentiable);
  ops.implement<mamba3_inputs_backward>("mamba3_inputs_backward");
});

}  // namespace
}  // namespace omniattn::ops::mamba3
