// top_k on the CPU: split over threads.
#include "ops/parallel.h"
#include "ops/tensor.h"
#include "ops/topk.h"

namespace omniattn::ops::topk {

void run(const char*, const TopKParams& p, int64_t rows) {
  const int64_t work = rows * (p.n + 64 * p.k);
  const int64_t shards = std::max<int64_t>(
      1, std::min({rows, work / kTaskElements, int64_t{torch::stable::get_num_threads()}}));
  const int64_t elements = top_k_scratch(p.n);
  const DType dtype = accumulator(p.dtype);
  const Tensor all = scratch(shards * elements, dtype);
  char* const memory = static_cast<char*>(all.mutable_data_ptr());
  parallel_shards(rows, shards, [&](int64_t s, int64_t begin, int64_t end) {
    topk_kernels().top_k(p, memory + s * elements * size_of(dtype), begin, end);
  });
}

}  // namespace omniattn::ops::topk
