// Where sequences lie, for CUDA kernels, which read and check it themselves.
#include "ops/sequences.h"

namespace omniattn::ops {
namespace {

RowNumbers numbers(const Tensor& t) {
  const auto memory = std::make_shared<const Tensor>(
      torch::stable::contiguous(torch::stable::to(t, ScalarType::Long)));
  return {memory, static_cast<const int64_t*>(memory->const_data_ptr())};
}

}  // namespace

RowNumbers read_rows(const char*, const char*, const Tensor& t, int64_t) { return numbers(t); }

RowNumbers read_boundaries(const char*, const char*, const Tensor& t, int64_t, int64_t) {
  return numbers(t);
}

PageNumbers read_pages(const char*, const Tensor& table, const RowNumbers&, int64_t, int64_t) {
  return {numbers(table), table.size(1)};
}

}  // namespace omniattn::ops
