// mesa_step on the CPU.
#include "ops/recurrences/least_squares.h"

#include "kernels/recurrence/conjugate_gradients.h"
#include "ops/registry.h"
#include "ops/sequence_problem.h"
#include "ops/stage.h"

namespace omniattn::ops::least_squares {

Tensor mesa_step(const OpCall& call, const Inputs& in, const Options& options) {
  const SequenceProblem p(call.op, "q", in.q, 4, std::nullopt);
  require_tensor(p.op, "q", in.q, p.acc);
  require(p.steps == 1, p.op, "q must have T=1 for a step, got T=", p.steps);
  const int64_t heads = in.q.size(2), width = in.q.size(3);
  const Tensor q = *p.dense("q", in.q, in.q.sizes());
  const Tensor lamb = *p.dense("lamb", in.lamb, in.q.sizes());
  const Tensor state = *p.dense("initial_state", in.initial_state, {p.batch, heads, width, width});
  const Tensor x = empty_tensor(in.q.sizes(), p.acc);
  const ConjugateGradients params{.dtype = p.acc,
                                  .systems = p.batch * heads,
                                  .width = width,
                                  .iterations = options.max_iterations,
                                  .tolerance = options.tolerance,
                                  .state = state.const_data_ptr(),
                                  .lamb = lamb.const_data_ptr(),
                                  .q = q.const_data_ptr(),
                                  .x = x.mutable_data_ptr()};
  run_items(params, params.systems, params.bytes(), conjugate_gradients_kernels(p.acc).solve);
  return x;
}

namespace {

const Registry registry([](Registry& ops) {
  ops.name("mesa_step", {{"mesa_net"}});
  ops.implement<mesa_step>("mesa_step");
});

}  // namespace
}  // namespace omniattn::ops::least_squares
