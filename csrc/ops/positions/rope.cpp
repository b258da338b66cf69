// apply_rotary and qk_norm_rotary.
#include "kernels/rope/rope.h"

#include "kernels/rope/norm_rope.h"
#include "ops/device.h"
#include "ops/registry.h"
#include "ops/sum_over_rows.h"

namespace omniattn::ops::rope {
namespace {

// Positions (T) or (B, T) select the rows of cos, sin (P, Dr / 2) or (B, P, Dr / 2).
OMNIATTN_FIELDS(Tables, Tensor cos, sin; OptTensor positions);
// Dimensions of D from `start` on are rotated.
OMNIATTN_FIELDS(Place, int64_t start; bool interleaved);

// Positions of `entries` batch entries must be rows of the tables. On CUDA the kernels check this:
// reading positions here would wait for the GPU.
void check_positions(const char* op, const RopeParams& p, int64_t entries) {
  if constexpr (kOnCuda) return;
  for (int64_t b = 0; b < entries; ++b) {
    for (int64_t t = 0; t < p.tokens; ++t) {
      const int64_t row = p.positions[b * p.positions_batch + t * p.positions_token];
      require(row >= 0 && row < p.rows, op, "positions must be in [0, ", p.rows,
              "), the rows of cos and sin, got ", row);
    }
  }
}

// Checked arguments shared by all forms, and the rotated tensors once they have been added.
struct Problem {
  const char* op;
  DType dtype;
  Tensor cos, sin;
  RopeParams params{};
  int64_t batch;

  // x (B, T, H, D) is the first rotated tensor.
  Problem(const OpCall& call, const char* name, const Tensor& x, const Tables& tables, Place place,
          bool inverse)
      : op(call.op),
        dtype(dtype_of(op, name, x)),
        cos(table("cos", tables.cos)),
        sin(table("sin", tables.sin)) {
    require(x.dim() == 4, op, name, " must have 4 dimensions, got ", x.dim());
    require_tensor(op, name, x, dtype);
    require_sizes(op, "sin", sin, cos.sizes());
    const int64_t dims = cos.dim(), half = cos.size(dims - 1), dim = x.size(3);
    batch = x.size(0);
    require(dims == 2 || cos.size(0) == batch || cos.size(0) == 1, op, "cos must have ", batch,
            " batch entries or 1, got ", cos.size(0));
    require(2 * half <= dim, op, "cos must have at most D / 2 columns, got ", half, " for D=", dim);
    require(place.start >= 0 && place.start <= dim - 2 * half, op, "start must be in [0, ",
            dim - 2 * half, "], so that the rotated part lies within D=", dim, ", got ",
            place.start);
    params.dtype = dtype;
    params.tokens = x.size(1);
    params.dim = dim;
    params.start = place.start;
    params.half = half;
    params.rows = cos.size(dims - 2);
    params.cos = cos.const_data_ptr();
    params.sin = sin.const_data_ptr();
    params.cos_row = cos.stride(dims - 2);
    params.sin_row = sin.stride(dims - 2);
    if (dims == 3 && cos.size(0) > 1) {
      params.cos_batch = cos.stride(0);
      params.sin_batch = sin.stride(0);
    }
    params.interleaved = place.interleaved;
    params.inverse = inverse;
    if (tables.positions.has_value()) {
      choose_rows(*tables.positions);
    } else {
      require(params.rows == params.tokens, op,
              "cos must have one row per token, T=", params.tokens, ", got ", params.rows);
    }
  }

  // Requires x to match the first rotated tensor; only the number of heads may differ.
  void require_like_first(const char* name, const Tensor& x) const {
    require_tensor(op, name, x, dtype);
    require(x.dim() == 4, op, name, " must have 4 dimensions, got ", x.dim());
    require_sizes(op, name, x, {batch, params.tokens, x.size(2), params.dim});
  }

  void add(const Tensor& in, const Tensor& out) {
    params.tensors[params.tensor_count++] = {.in = in.const_data_ptr(),
                                             .out = out.mutable_data_ptr(),
                                             .heads = in.size(2),
                                             .in_batch = in.stride(0),
                                             .in_token = in.stride(1),
                                             .in_head = in.stride(2),
                                             .out_batch = out.stride(0),
                                             .out_token = out.stride(1),
                                             .out_head = out.stride(2)};
  }

 private:
  Tensor table(const char* name, const Tensor& t) const {
    require_tensor(op, name, t, accumulator(dtype));
    require(t.dim() == 2 || t.dim() == 3, op, name, " must have 2 or 3 dimensions, got ", t.dim());
    return with_unit_last_stride(t);
  }

  void choose_rows(const Tensor& positions) {
    require_tensor(op, "positions", positions, ScalarType::Long);
    require(cos.dim() == 2, op,
            "cos must have 2 dimensions where positions choose its rows, got 3");
    const int64_t dims = positions.dim();
    require(dims == 1 || dims == 2, op, "positions must have 1 or 2 dimensions, got ", dims);
    require(positions.size(dims - 1) == params.tokens, op, "positions must have T=", params.tokens,
            " columns, got ", positions.size(dims - 1));
    require(dims == 1 || positions.size(0) == batch || positions.size(0) == 1, op,
            "positions must have ", batch, " rows or 1, got ", positions.size(0));
    params.positions = static_cast<const int64_t*>(positions.const_data_ptr());
    params.positions_token = positions.stride(dims - 1);
    params.positions_batch = dims == 2 && positions.size(0) > 1 ? positions.stride(0) : 0;
    check_positions(op, params, dims == 2 ? positions.size(0) : 1);
  }
};

void run(const Problem& p) {
  const RopeParams& params = p.params;
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_rope(params, p.batch, stream()));
  } else {
    int64_t elements = 0;  // elements of one token
    for (int32_t k = 0; k < params.tensor_count; ++k) {
      elements += params.tensors[k].heads * params.dim;
    }
    if (elements == 0) return;
    run_items(params, p.batch * params.tokens, elements, rope_kernels(params.dtype).rotate);
  }
}

OMNIATTN_FIELDS(Heads, Tensor q; OptTensor k);
OMNIATTN_FIELDS(Direction, bool inverse);
OMNIATTN_FIELDS(Rotated, Tensor q_out, k_out);

// Without k the second result is empty.
Rotated rope(const OpCall& call, const Heads& x, const Tables& tables, const Place& place,
             const Direction& direction) {
  const auto& [q, k] = x;
  const DeviceScope scope(q);
  Problem p(call, "q", q, tables, place, direction.inverse);
  const Tensor q_in = with_unit_last_stride(q);
  const Tensor q_out = empty_tensor(q.sizes(), p.dtype);
  p.add(q_in, q_out);
  const int64_t elements = q.numel() + (k.has_value() ? k->numel() : 0);
  p.params.past_caches = elements * size_of(p.dtype) >= kLargeBytes;
  if (!k.has_value()) {
    run(p);
    return {q_out, empty_tensor({0}, p.dtype)};
  }
  p.require_like_first("k", *k);
  const Tensor k_in = with_unit_last_stride(*k);
  const Tensor k_out = empty_tensor(k->sizes(), p.dtype);
  p.add(k_in, k_out);
  run(p);
  return {q_out, k_out};
}

void require_writable(const char* op, const char* name, const Tensor& x) {
  if (x.numel() == 0) return;  // strides of an empty tensor mean nothing
  require(has_unit_last_stride(x), op, name, " must have unit stride in its last dimension to be ",
          "rotated in place, got ", x.stride(3));
  for (int64_t i = 0; i < 3; ++i) {
    require(x.size(i) <= 1 || x.stride(i) != 0, op, name,
            " must not be an expanded tensor to be rotated in place");
  }
}

OMNIATTN_FIELDS(WrittenHeads, Written q; OptWritten k);

void rope_inplace(const OpCall& call, const WrittenHeads& x, const Tables& tables,
                  const Place& place, const Direction& direction) {
  const auto& [q, k] = x;
  const DeviceScope scope(q);
  Problem p(call, "q", q, tables, place, direction.inverse);
  require_writable(p.op, "q", q);
  p.add(q, q);
  if (k.has_value()) {
    p.require_like_first("k", *k);
    require_writable(p.op, "k", *k);
    require(k->const_data_ptr() != q.const_data_ptr() || k->numel() == 0, p.op,
            "q and k must not share memory to be rotated in place");
    p.add(*k, *k);
  }
  run(p);
}

OMNIATTN_FIELDS(Normed, Tensor x; OptTensor weight);
OMNIATTN_FIELDS(NormOptions, double eps, offset; bool cast_first);
OMNIATTN_FIELDS(NormResults, Tensor y, rstd);

// Normalizes the heads of x (B, T, H, D) by their mean square, multiplies by weight + offset and
// rotates as rope does. cast_first: as in norm; the product with the weight is rounded, too.
NormResults norm_rope(const OpCall& call, const Normed& in_, const Tables& tables,
                      const Place& place, const NormOptions& options) {
  const auto& [x, weight] = in_;
  const DeviceScope scope(x);
  Problem p(call, "x", x, tables, place, false);
  const OptTensor scale = as_vector(p.op, "weight", weight, p.dtype, x.size(3));
  const Tensor in = with_unit_last_stride(x);
  const Tensor y = empty_tensor(x.sizes(), p.dtype);
  const Tensor rstd = empty_tensor({x.size(0), x.size(1), x.size(2)}, accumulator(p.dtype));
  p.add(in, y);
  const NormRopeParams params{.rope = p.params,
                              .weight = data_or_null(scale),
                              .rstd = rstd.mutable_data_ptr(),
                              .eps = options.eps,
                              .offset = options.offset,
                              .cast_first = options.cast_first};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_norm_rope(params, p.batch, stream()));
  } else {
    run_items(params, x.size(0) * x.size(1), x.size(2) * x.size(3),
              norm_rope_kernels(p.dtype).forward);
  }
  return {y, rstd};
}

OMNIATTN_FIELDS(NormGradient, Tensor grad_y, x; OptTensor weight);
OMNIATTN_FIELDS(Saved, Tensor rstd);
OMNIATTN_FIELDS(NormBackward, double offset; bool weight_grad);
OMNIATTN_FIELDS(NormGradients, Tensor dx; Output dweight);

// dweight is in the accumulator type, and empty if it is not wanted.
NormGradients norm_rope_backward(const OpCall& call, const NormGradient& given,
                                 const Tables& tables, const Saved& saved, const Place& place,
                                 const NormBackward& options) {
  const auto& [grad_y, x, weight] = given;
  const Tensor& rstd = saved.rstd;
  const DeviceScope scope(x);
  Problem p(call, "grad_y", grad_y, tables, place, true);
  const DType acc = accumulator(p.dtype);
  require_tensor(p.op, "x", x, p.dtype);
  require_sizes(p.op, "x", x, grad_y.sizes());
  require_dense(p.op, "rstd", rstd, acc, {x.size(0), x.size(1), x.size(2)});
  const OptTensor scale = as_vector(p.op, "weight", weight, p.dtype, x.size(3));
  const Tensor grad = with_unit_last_stride(grad_y), in = with_unit_last_stride(x);
  const Tensor dx = empty_tensor(x.sizes(), p.dtype);
  const Output dweight(options.weight_grad, {x.size(3)}, acc);
  p.add(grad, dx);
  const NormRopeBackwardParams params{.rope = p.params,
                                      .x = in.const_data_ptr(),
                                      .x_batch = in.stride(0),
                                      .x_token = in.stride(1),
                                      .x_head = in.stride(2),
                                      .weight = data_or_null(scale),
                                      .rstd = rstd.const_data_ptr(),
                                      .offset = options.offset};
  if constexpr (kOnCuda) {
    const int64_t shards = options.weight_grad ? norm_rope_backward_shards(params, p.batch) : 0;
    const Tensor partial = scratch(shards * x.size(3), acc);
    void* const sums = options.weight_grad ? partial.mutable_data_ptr() : nullptr;
    require_launched(p.op,
                     launch_norm_rope_backward(params, p.batch, sums, dweight.data(), stream()));
  } else {
    const auto backward = norm_rope_kernels(p.dtype).backward;
    // The sums are in element order, which sum_over_rows assumes for the accumulator type.
    sum_over_rows(acc, x.size(0) * x.size(1), x.size(3), {dweight, 1}, {},
                  [&](void* dw, void*, int64_t a, int64_t b) { backward(params, dw, a, b); });
  }
  return {dx, dweight};
}

const Registry registry([](Registry& ops) {
  ops.name("rope", {{"apply_rotary"}});
  ops.add<rope>("rope", differentiable);
  ops.add<rope_inplace>("rope_");
  ops.name("norm_rope", {{"qk_norm_rotary"}});
  ops.add<norm_rope>("norm_rope", differentiable);
  ops.add<norm_rope_backward>("norm_rope_backward");
});

}  // namespace
}  // namespace omniattn::ops::rope
