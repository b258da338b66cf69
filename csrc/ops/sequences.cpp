// Checks the side tensors of a layout and lists its sequences. The CPU reads their values and
// checks them here; CUDA kernels check them, since reading them here would wait for the GPU.
#include "ops/sequences.h"

#include <algorithm>

#include "ops/device.h"
#include "semantics/mask.h"
#include "semantics/seqlen.h"

namespace omniattn::ops {
namespace {

// Integers that the kernels of this device can read, and the owner of their memory.
struct RowNumbers {
  std::shared_ptr<const void> memory;
  const int64_t* data = nullptr;
};
using Values = std::vector<int64_t>;

RowNumbers numbers(Values values) {
  const auto memory = std::make_shared<const Values>(std::move(values));
  return {memory, memory->data()};
}
RowNumbers numbers(const Tensor& t) {
  const auto memory = std::make_shared<const Tensor>(
      torch::stable::contiguous(torch::stable::to(t, ScalarType::Long)));
  return {memory, static_cast<const int64_t*>(memory->const_data_ptr())};
}

// An element of an int32 or int64 tensor.
int64_t integer_at(const Tensor& t, int64_t offset) {
  const void* const data = t.const_data_ptr();
  return scalar_type(t) == ScalarType::Long ? static_cast<const int64_t*>(data)[offset]
                                            : static_cast<const int32_t*>(data)[offset];
}

void require_integers(const char* op, const char* name, const Tensor& t) {
  require(is_here(t), op, name, " must be on ", kDeviceName);
  const ScalarType type = scalar_type(t);
  require(type == ScalarType::Long || type == ScalarType::Int, op, name,
          " must be int32 or int64, got ", name_of(type));
}

// Reads row numbers (N,), each in [0, limit].
RowNumbers read_rows(const char* op, const char* name, const Tensor& t, int64_t limit) {
  if constexpr (kOnCuda) return numbers(t);
  Values rows(static_cast<size_t>(t.size(0)));
  for (size_t n = 0; n < rows.size(); ++n) {
    rows[n] = integer_at(t, static_cast<int64_t>(n) * t.stride(0));
    require(rows[n] >= 0 && rows[n] <= limit, op, name, " must lie in [0, ", limit, "], got ",
            rows[n]);
  }
  return numbers(std::move(rows));
}

// Reads boundaries (N + 1,): row numbers from 0 to x.rows that grow by 0 to x.longest from one to
// the next. Without sequences there must be no rows: CUDA kernels, which check the values, are not
// launched then.
RowNumbers read_boundaries(const char* op, const PackedRows& x) {
  require_integers(op, x.name, x.boundaries);
  require(x.boundaries.dim() == 1 && x.boundaries.size(0) >= 1, op, x.name,
          " must have shape (N + 1,)");
  const RowNumbers found = read_rows(op, x.name, x.boundaries, x.rows);
  const int64_t count = x.boundaries.size(0) - 1;
  require(count > 0 || x.rows == 0, op, x.name, " must grow from 0 to the number of rows, ", x.rows,
          ", got no sequence");
  if constexpr (kOnCuda) return found;
  for (int64_t n = 1; n <= count; ++n) {
    const int64_t from = found.data[n - 1], to = found.data[n];
    require(to >= from && to - from <= x.longest, op, x.name, " must grow by 0 to ", x.longest,
            ", got ", from, " then ", to);
  }
  require(found.data[0] == 0 && found.data[count] == x.rows, op, x.name,
          " must grow from 0 to the number of rows, ", x.rows, ", got ", found.data[0], " to ",
          found.data[count]);
  return found;
}

// A table (B, N) of pages. The CPU reads only entries of existing keys, so `width` may be below N.
struct PageNumbers {
  RowNumbers numbers;
  int64_t width;
};
PageNumbers read_pages(const char* op, const Tensor& table, const RowNumbers& lengths,
                       int64_t pages, int64_t page_size) {
  if constexpr (kOnCuda) return {numbers(table), table.size(1)};
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

RowNumbers lengths_of(const char* op, const Tensor& t, int64_t batch, int64_t limit) {
  constexpr const char* name = "cache_seqlens";
  require_integers(op, name, t);
  require_sizes(op, name, t, {&batch, 1});
  return read_rows(op, name, t, limit);
}

}  // namespace

std::vector<Sequence> Sequences::list() const {
  std::vector<Sequence> found;
  found.reserve(static_cast<size_t>(count));
  for (int64_t b = 0; b < count; ++b) {
    if (rows.q == nullptr) {
      found.push_back({b, b, 0, longest_q, 0, rows.k[b]});
    } else {
      const int64_t q = rows.q[b], k = rows.k[b];
      found.push_back({b, 0, q, rows.q[b + 1] - q, k, rows.k[b + 1] - k});
    }
  }
  return found;
}

Sequences packed_sequences(const char* op, const PackedRows& q, const PackedRows& k) {
  const RowNumbers of_q = read_boundaries(op, q), of_k = read_boundaries(op, k);
  const int64_t ends_q = q.boundaries.size(0), ends_k = k.boundaries.size(0);
  require(ends_q == ends_k, op, q.name, " and ", k.name, " must have the same length, got ", ends_q,
          " and ", ends_k);
  Sequences found;
  found.count = ends_q - 1;
  found.longest_q = q.longest;
  found.longest_k = k.longest;
  found.rows = {of_q.data, of_k.data, q.rows, k.rows};
  found.memory = {of_q.memory, of_k.memory};
  return found;
}

Sequences cached_sequences(const char* op, const Tensor& lengths, int64_t batch, int64_t tq,
                           int64_t tk) {
  const RowNumbers of_k = lengths_of(op, lengths, batch, tk);
  Sequences found;
  found.count = batch;
  found.longest_q = tq;
  found.longest_k = tk;
  found.rows = {nullptr, of_k.data, tq, tk};
  found.memory = {of_k.memory};
  return found;
}

Sequences paged_sequences(const char* op, const Tensor& table, const Tensor& lengths, int64_t batch,
                          int64_t tq, int64_t pages, int64_t page_size) {
  require_integers(op, "block_table", table);
  require(table.dim() == 2 && table.size(0) == batch, op,
          "block_table must have shape (B, N) with B=", batch, ", got ", table.dim(),
          " dimensions");
  const int64_t width = table.size(1);
  require(page_size > 0, op, "pages must hold at least one token, got page size ", page_size);
  require(width <= kMaskParamLimit / page_size, op,
          "block_table must list pages for at most 2^40 tokens a sequence, got ", width,
          " pages of ", page_size, " tokens");
  const int64_t tk = width * page_size;
  const RowNumbers of_k = lengths_of(op, lengths, batch, tk);
  const PageNumbers listed = read_pages(op, table, of_k, pages, page_size);
  Sequences found;
  found.count = batch;
  found.longest_q = tq;
  found.longest_k = tk;
  found.rows = {nullptr, of_k.data, tq, pages};
  found.pages = {listed.numbers.data, listed.width, page_size};
  found.memory = {of_k.memory, listed.numbers.memory};
  return found;
}

}  // namespace omniattn::ops
