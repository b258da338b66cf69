// Where sequences lie, read and checked on the CPU.
#include <algorithm>

#include "ops/sequences.h"
#include "semantics/seqlen.h"

namespace omniattn::ops {
namespace {

using Values = std::vector<int64_t>;

// Element of an int32 or int64 tensor.
int64_t integer_at(const Tensor& t, int64_t offset) {
  const void* const data = t.const_data_ptr();
  return scalar_type(t) == ScalarType::Long ? static_cast<const int64_t*>(data)[offset]
                                            : static_cast<const int32_t*>(data)[offset];
}

RowNumbers numbers(Values values) {
  const auto memory = std::make_shared<const Values>(std::move(values));
  return {memory, memory->data()};
}

}  // namespace

RowNumbers read_rows(const char* op, const char* name, const Tensor& t, int64_t limit) {
  Values rows(static_cast<size_t>(t.size(0)));
  for (size_t n = 0; n < rows.size(); ++n) {
    rows[n] = integer_at(t, static_cast<int64_t>(n) * t.stride(0));
    require(rows[n] >= 0 && rows[n] <= limit, op, name, " must lie in [0, ", limit, "], got ",
            rows[n]);
  }
  return numbers(std::move(rows));
}

RowNumbers read_boundaries(const char* op, const char* name, const Tensor& t, int64_t limit,
                           int64_t longest) {
  const RowNumbers found = read_rows(op, name, t, limit);
  for (int64_t n = 1; n < t.size(0); ++n) {
    const int64_t from = found.data[n - 1], to = found.data[n];
    require(to >= from && to - from <= longest, op, name, " must grow by 0 to ", longest, ", got ",
            from, " then ", to);
  }
  return found;
}

PageNumbers read_pages(const char* op, const Tensor& table, const RowNumbers& lengths,
                       int64_t pages, int64_t page_size) {
  const int64_t batch = table.size(0);
  int64_t longest = 0;
  for (int64_t b = 0; b < batch; ++b) longest = std::max(longest, lengths.data[b]);
  const int64_t width = ceil_div(longest, page_size);
  Values found(static_cast<size_t>(batch * width));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t n = 0; n < ceil_div(lengths.data[b], page_size); ++n) {
      const int64_t page = integer_at(table, b * table.stride(0) + n * table.stride(1));
      require(page >= 0 && page < pages, op, "block_table must name pages in [0, ", pages,
              "), got ", page, " in row ", b);
      found[static_cast<size_t>(b * width + n)] = page;
    }
  }
  return {numbers(std::move(found)), width};
}

}  // namespace omniattn::ops
