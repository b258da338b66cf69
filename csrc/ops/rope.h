// rope, rope_: checks and allocation for either device. Included by rope_cpu.cpp and rope_cuda.cpp,
// each of which defines run() and check_positions().
#pragma once
#include "kernels/rope/rope.h"

#include <tuple>

#include "ops/tensor.h"

namespace {

using namespace omniattn;
using namespace omniattn::ops;

void run(const RopeParams& p, int64_t batch);
// Positions of `entries` batch entries must be rows of the tables.
void check_positions(const char* op, const RopeParams& p, int64_t entries);

bool unit_last_stride(const Tensor& t) {
  return t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1;
}

Tensor with_unit_last_stride(const Tensor& t) {
  return unit_last_stride(t) ? t : torch::stable::contiguous(t);
}

// Checks shared by both forms and fills in all but the tensors. `tables` keeps copies alive.
RopeParams common(const char* op, const Tensor& q, const Tensor& cos, const Tensor& sin,
                  const OptTensor& positions, int64_t start, bool interleaved, bool inverse,
                  std::array<Tensor, 2>& tables) {
  require(q.dim() == 4, op, "q must have 4 dimensions, got ", q.dim());
  const DType dtype = dtype_of(op, "q", q);
  const int64_t batch = q.size(0), tokens = q.size(1), dim = q.size(3);
  require_tensor(op, "cos", cos, accumulator(dtype));
  require_tensor(op, "sin", sin, accumulator(dtype));
  require_sizes(op, "sin", sin, cos.sizes());
  const int64_t table_dims = cos.dim();
  require(table_dims == 2 || table_dims == 3, op, "cos must have 2 or 3 dimensions, got ",
          table_dims);
  const int64_t rows = cos.size(table_dims - 2), half = cos.size(table_dims - 1);
  require(table_dims == 2 || cos.size(0) == batch || cos.size(0) == 1, op, "cos must have ", batch,
          " batch entries or 1, got ", cos.size(0));
  require(2 * half <= dim, op, "cos must have at most D / 2 columns, got ", half, " for D=", dim);
  require(start >= 0 && start <= dim - 2 * half, op, "start must be in [0, ", dim - 2 * half,
          "], so that what turns lies within D=", dim, ", got ", start);
  tables = {with_unit_last_stride(cos), with_unit_last_stride(sin)};

  RopeParams p{};
  p.dtype = dtype;
  p.tokens = tokens;
  p.dim = dim;
  p.start = start;
  p.half = half;
  p.rows = rows;
  p.cos = tables[0].const_data_ptr();
  p.sin = tables[1].const_data_ptr();
  p.cos_row = tables[0].stride(table_dims - 2);
  p.sin_row = tables[1].stride(table_dims - 2);
  if (table_dims == 3 && cos.size(0) > 1) {
    p.cos_batch = tables[0].stride(0);
    p.sin_batch = tables[1].stride(0);
  }
  p.interleaved = interleaved;
  p.inverse = inverse;

  if (!positions.has_value()) {
    require(rows == tokens, op, "cos must have one row per token, T=", tokens, ", got ", rows);
    return p;
  }
  require(is_here(*positions) && positions->scalar_type() == ScalarType::Long, op,
          "positions must be int64 on ", kDeviceName);
  require(table_dims == 2, op, "cos must have 2 dimensions where positions choose its rows, got 3");
  const int64_t dims = positions->dim();
  require(dims == 1 || dims == 2, op, "positions must have 1 or 2 dimensions, got ", dims);
  require(positions->size(dims - 1) == tokens, op, "positions must have T=", tokens,
          " columns, got ", positions->size(dims - 1));
  require(dims == 1 || positions->size(0) == batch || positions->size(0) == 1, op,
          "positions must have ", batch, " rows or 1, got ", positions->size(0));
  p.positions = static_cast<const int64_t*>(positions->const_data_ptr());
  p.positions_token = positions->stride(dims - 1);
  p.positions_batch = dims == 2 && positions->size(0) > 1 ? positions->stride(0) : 0;
  check_positions(op, p, dims == 2 ? positions->size(0) : 1);
  return p;
}

void check_like_q(const char* op, const char* name, const Tensor& x, const Tensor& q, DType dtype) {
  require_tensor(op, name, x, dtype);
  require(x.dim() == 4, op, name, " must have 4 dimensions, got ", x.dim());
  const int64_t want[] = {q.size(0), q.size(1), x.size(2), q.size(3)};
  require_sizes(op, name, x, {want, 4});
}

void add_tensor(RopeParams& p, const Tensor& in, const Tensor& out) {
  p.tensors[p.tensor_count++] = {in.const_data_ptr(), out.mutable_data_ptr(), in.size(2),
                                 in.stride(0),        in.stride(1),           in.stride(2),
                                 out.stride(0),       out.stride(1),          out.stride(2)};
}

std::tuple<Tensor, Tensor> rope(const Tensor& q, const OptTensor& k, const Tensor& cos,
                                const Tensor& sin, const OptTensor& positions, int64_t start,
                                bool interleaved, bool inverse) {
  constexpr const char* op = "apply_rotary";
  const DeviceScope scope(q);
  std::array<Tensor, 2> tables;
  RopeParams p = common(op, q, cos, sin, positions, start, interleaved, inverse, tables);
  check_like_q(op, "q", q, q, p.dtype);
  const Tensor q_in = with_unit_last_stride(q);
  const Tensor q_out = empty_tensor(q.sizes(), p.dtype);
  add_tensor(p, q_in, q_out);
  const int64_t k_numel = k.has_value() ? k->numel() : 0;
  p.past_caches = (q.numel() + k_numel) * size_of(p.dtype) >= kLargeBytes;
  if (!k.has_value()) {
    run(p, q.size(0));
    const int64_t none = 0;
    return {q_out, empty_tensor({&none, 1}, p.dtype)};
  }
  check_like_q(op, "k", *k, q, p.dtype);
  const Tensor k_in = with_unit_last_stride(*k);
  const Tensor k_out = empty_tensor(k->sizes(), p.dtype);
  add_tensor(p, k_in, k_out);
  run(p, q.size(0));
  return {q_out, k_out};
}

void check_writable(const char* op, const char* name, const Tensor& x) {
  if (x.numel() == 0) return;  // its strides mean nothing
  require(unit_last_stride(x), op, name, " must have unit stride in its last dimension to be ",
          "turned in place, got ", x.stride(3));
  for (int64_t i = 0; i < 3; ++i) {
    require(x.size(i) <= 1 || x.stride(i) != 0, op, name,
            " must not be an expanded tensor to be turned in place");
  }
}

void rope_inplace(Tensor q, OptTensor k, const Tensor& cos, const Tensor& sin,
                  const OptTensor& positions, int64_t start, bool interleaved, bool inverse) {
  constexpr const char* op = "apply_rotary";
  const DeviceScope scope(q);
  std::array<Tensor, 2> tables;
  RopeParams p = common(op, q, cos, sin, positions, start, interleaved, inverse, tables);
  check_like_q(op, "q", q, q, p.dtype);
  check_writable(op, "q", q);
  add_tensor(p, q, q);
  if (k.has_value()) {
    check_like_q(op, "k", *k, q, p.dtype);
    check_writable(op, "k", *k);
    require(k->const_data_ptr() != q.const_data_ptr() || k->numel() == 0, op,
            "q and k must not share memory to be turned in place");
    add_tensor(p, *k, *k);
  }
  run(p, q.size(0));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, OMNIATTN_DISPATCH_KEY, m) {
  OMNIATTN_IMPL(m, "rope", rope);
  m.impl("rope_", TORCH_BOX(&rope_inplace));
}
