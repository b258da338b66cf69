// Gradients of the tables of a score_mod's program, see attention_params.h, in one pass for each
// step that adds to a table's gradient. A block walks its tiles and computes for each pair the
// value and the element that it is added to; then each thread adds the values of its own elements,
// in the order of the pairs, so that sums have a fixed order without atomics.
//
//   pairs of a grid   every pair has its element: a block per 64 queries and the pairs sharing them
//   other tables      program_parts blocks with one part each, which are summed later
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_gradient_tile_cuda.h"
#include "runtime/dispatch.h"
#include "semantics/block_schedule.h"

namespace omniattn {
namespace {

using namespace gpu;

constexpr int kThreads = 256;
constexpr int64_t kUploadBytes = 2048;

struct Bytes {
  unsigned char data[kUploadBytes];
};
__global__ void __launch_bounds__(kThreads)
    attention_upload_kernel(const __grid_constant__ Bytes bytes, unsigned char* to, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) to[i] = bytes.data[i];
}

// Number of tiles of 64 queries.
OMNIATTN_FN int64_t query_tiles(const AttentionProblem& p) {
  return p.batch * p.hq * ceil_div(p.tq, kTile);
}
OMNIATTN_FN int64_t program_parts(const AttentionProblem& p) {
  constexpr int64_t kParts = 64;
  return query_tiles(p) < kParts ? query_tiles(p) : kParts;
}
OMNIATTN_FN int64_t program_blocks(const AttentionProblem& p, const ProgramGradients::Table& t) {
  if (t.elements > 0) return program_parts(p);
  const int64_t batches = t.whole.places.stride_b == 0 ? 1 : p.batch;
  return batches * (t.whole.places.stride_h == 0 ? 1 : p.hq) * ceil_div(p.tq, kTile);
}

// Value that a step adds to element `at` of a table's gradient; at < 0: adds nothing.
template <class A>
struct Given {
  A value;
  int64_t at;
};
template <class A>
GPU_NOINLINE Given<A> given_by(const AttentionProblem& p, int64_t step, const ProgramPlaces& places,
                               const ProgramPlace& place, Logit<A> logit, A z, A dp,
                               RowStats<A> stats) {
  const ScoreProgram& program = *p.program;
  ProgramPair<A> pair(program, place);
  const auto weight = weigh(p, pair.run(program.value, 0, logit.value), z, dp, stats);
  ProgramRun before = program.gradient;
  before.count = step;
  before.result = 1;
  pair.run(before, 1, weight.slope);
  const ProgramStep& s = program.gradient.steps[step];
  const A value = pair.number(s.a);
  if (s.op == ProgramOp::give) return {value, places.at(place.b, place.h, place.q, place.k)};
  const int64_t at = pair.integer(s.b);
  return {value, at < program_ops::elements_of(program.tables[s.c]) ? at : -1};
}

// Adds the values of a tile's pairs; their places are relative to element `first`.
template <class T>
__device__ void add_tile(const AttentionBackwardParams& params, const Tile& tile, int64_t step,
                         const ProgramPlaces& places, int64_t first,
                         GradientShared<compute_t<T>>& shared, compute_t<T>* to) {
  using A = compute_t<T>;
  using I = program_ops::int_of<A>;
  const AttentionProblem& p = params.problem;
  I* const at_of = reinterpret_cast<I*>(shared.other);
  pairs_of_tile<T, Sum::queries>(
      params, tile, shared, [&](int at, int r, int c, const RowStats<A>& stats) {
        Given<A> found{A(0), -1};
        if (shared.bits.sees(tile, r, c)) {
          found = given_by(p, step, places, program_place(p, tile, r, c),
                           logit_of(p, tile, r, c, shared.tile[at], true),
                           shared.bits.template factor<A>(p, r, c), shared.other[at], stats);
        }
        shared.tile[at] = found.value;
        at_of[at] = found.at < 0 ? I(-1) : static_cast<I>(found.at - first);
      });
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  for (int n = 0; n < kTile * kTile; ++n) {
    const int at = place<Sum::queries>(n / kTile, n % kTile);
    const I element = at_of[at];
    if (element >= 0 && element % kFmaThreads == thread) to[element] += shared.tile[at];
  }
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_dprogram_fma_kernel(const __grid_constant__ AttentionBackwardParams params,
                                  const __grid_constant__ ProgramGradients::Table table,
                                  int64_t step) {
  using A = compute_t<T>;
  auto& shared = *dynamic_shared<GradientShared<A>>();
  const AttentionProblem& p = params.problem;
  const ProgramPlaces& places = table.whole.places;
  const int64_t query_blocks = ceil_div(p.tq, kTile), blocks = program_blocks(p, table);
  const bool in_place = table.elements == 0;
  const int64_t heads = in_place && places.stride_h != 0 ? p.hq : 1;
  for (int64_t item = blockIdx.x; item < blocks; item += gridDim.x) {
    // In place, a block takes the batch entries and heads that share its elements;
    // in parts, every blocks-th tile.
    const int64_t owned = item / query_blocks;
    for (int64_t n = in_place ? 0 : item; n < query_tiles(p); n += in_place ? 1 : blocks) {
      const int64_t block_n = n % query_blocks, h = n / query_blocks % p.hq,
                    b = n / query_blocks / p.hq;
      if (in_place) {
        const bool is_mine = block_n == item % query_blocks &&
                             (places.stride_h == 0 || h == owned % heads) &&
                             (places.stride_b == 0 || b == owned / heads);
        if (!is_mine) continue;
      }
      const Sequence s = sequence_of(p, b);
      Tile tile{s, b, h, block_n * kTile, 0, false};
      if (tile.q >= s.tq) continue;
      const ProgramPlace corner = program_place(p, tile, 0, 0);
      const int64_t first = in_place ? places.at(b, h, corner.q, 0) : 0;
      A* const to = static_cast<A*>(table.whole.data) + (in_place ? first : item * table.elements);
      for (Tiles<Along::keys> tiles(p, tile); tiles.next(tile);) {
        add_tile<T>(params, tile, step, places, first, shared, to);
      }
    }
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    attention_sum_parts_kernel(const A* parts, int64_t count, int64_t elements, A* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < elements; i += step) {
    double sum = 0;
    for (int64_t n = 0; n < count; ++n) sum += parts[n * elements + i];
    out[i] = static_cast<A>(sum);
  }
}

}  // namespace

int64_t attention_program_parts(const AttentionProblem& p) { return program_parts(p); }

Status launch_attention_upload(const void* from, int64_t bytes, void* to, Stream stream) {
  for (int64_t first = 0; first < bytes; first += kUploadBytes) {
    const int64_t count = bytes - first < kUploadBytes ? bytes - first : kUploadBytes;
    Bytes chunk{};
    __builtin_memcpy(chunk.data, static_cast<const char*>(from) + first,
                     static_cast<size_t>(count));
    GPU_LAUNCH(attention_upload_kernel, 1u, kThreads, 0, stream, chunk,
               static_cast<unsigned char*>(to) + first, static_cast<int>(count));
  }
  return launch_status();
}

Status launch_attention_program_gradient(const AttentionBackwardParams& params,
                                         const ProgramGradients::Table& table, int64_t step,
                                         Stream stream) {
  dispatch(params.problem.dtype, [&]<class T>(T) {
    GPU_LAUNCH(attention_dprogram_fma_kernel<T>, item_grid(program_blocks(params.problem, table)),
               kFmaThreads, sizeof(GradientShared<compute_t<T>>), stream, params, table, step);
  });
  return launch_status();
}

Status launch_attention_sum_parts(const AttentionProblem& p, const void* parts, int64_t elements,
                                  void* out, Stream stream) {
  dispatch_compute(p.dtype, [&]<class A>(A) {
    GPU_LAUNCH(attention_sum_parts_kernel<A>, item_grid(ceil_div(elements, kThreads)), kThreads, 0,
               stream, static_cast<const A*>(parts), attention_program_parts(p), elements,
               static_cast<A*>(out));
  });
  return launch_status();
}

}  // namespace omniattn
