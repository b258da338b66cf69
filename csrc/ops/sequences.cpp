// Shapes of the side tensors of a layout, and lists of sequences.
#include "ops/sequences.h"

#include "semantics/mask.h"
#include "semantics/seqlen.h"

namespace omniattn::ops {
namespace {

void require_integers(const char* op, const char* name, const Tensor& t) {
  const ScalarType type = scalar_type(t);
  require(is_here(t) && (type == ScalarType::Long || type == ScalarType::Int), op, name,
          " must be int32 or int64 on ", kDeviceName);
}

RowNumbers boundaries_of(const char* op, const PackedRows& x) {
  require_integers(op, x.name, x.boundaries);
  require(x.boundaries.dim() == 1 && x.boundaries.size(0) >= 1, op, x.name,
          " must have shape (N + 1,)");
  return read_boundaries(op, x.name, x.boundaries, x.rows, x.longest);
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
  const RowNumbers of_q = boundaries_of(op, q), of_k = boundaries_of(op, k);
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
  require(page_size > 0 && width <= kMaskParamLimit / page_size, op,
          "pages must hold tokens, and those of a sequence less than 2^40, got page size ",
          page_size, " and N=", width);
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
