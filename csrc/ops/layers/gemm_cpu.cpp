// Matrix products on the CPU, and linear on top of them.
#include "ops/layers/gemm.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "ops/layers/linear.h"
#include "ops/parallel.h"
#include "ops/registry.h"
#include "ops/stage.h"
#include "runtime/batch_invariance.h"
#include "semantics/seqlen.h"

namespace omniattn::ops::gemm {
namespace {

// Elements in a task of column sums, 256 KiB of fp32: large, as the rows of a task are far apart.
constexpr int64_t kColumnTask = 65536;
constexpr int64_t kLineElements = 64;  // at least a cache line

// True if tiles multiply the dtype. fp32 rows of A are then narrowed if B is bf16, which rounds as
// torch does in a bf16 product, and split if B is fp16. Elsewhere B is widened.
bool is_on_tiles(DType dtype) {
  bool found = false;
  for (int32_t i = 0; i <= static_cast<int32_t>(active_isa()); ++i) {
    const auto isa = static_cast<Isa>(i);
    found |= has_isa(isa) && multiplies_on_tiles(isa) && multiplies(isa, dtype);
  }
  return found;
}

// The dtype in which a product is multiplied.
DType factors(const GemmParams& p) {
  if (p.split_bf16 > 0) return DType::bf16;
  return is_on_tiles(p.b_dtype) ? p.b_dtype : p.a_dtype;
}

void run(std::vector<GemmParams> products) {
  if (products.empty()) return;
  for (GemmParams& p : products) p.as_many_rows = is_batch_invariant();
  const GemmKernels& kernels = gemm_kernels(factors(products[0]));
  int64_t items = 0, bytes = 0;
  for (const GemmParams& p : products) {
    items += kernels.items(p);
    bytes = std::max(bytes, kernels.workspace_bytes(p));
  }
  const int64_t threads = std::min<int64_t>(items, torch::stable::get_num_threads());
  run_stage(std::span<const GemmParams>(products), kernels.items, ThreadMemory(threads, bytes),
            kernels.run);
}

// Exponents of the rows or columns of a matrix, and the layout of the matrix.
struct Exponents {
  const void* x;
  int64_t stride, rows, cols;
  bool of_columns;
  float* found = nullptr;

  int64_t count() const { return of_columns ? cols : rows; }
  int64_t grain() const {
    return round_up(grain_of(of_columns ? rows : cols, kColumnTask), kLineElements);
  }
  bool all_finite() const {
    return std::all_of(found, found + count(), [](float e) { return std::isfinite(e); });
  }
};
// Exponents of the rows of A, and of the columns of B.
Exponents exponents_of_a(const GemmParams& p) {
  return p.a_transposed ? Exponents{p.a, p.lda, p.k, p.m, true}
                        : Exponents{p.a, p.lda, p.m, p.k, false};
}
Exponents exponents_of_b(const GemmParams& p) {
  return p.b_transposed ? Exponents{p.b, p.ldb, p.n, p.k, false}
                        : Exponents{p.b, p.ldb, p.k, p.n, true};
}

// Computes all exponents in the returned memory.
Tensor find(std::vector<Exponents>& all) {
  int64_t elements = 0;
  for (const Exponents& e : all) elements += round_up(e.count(), kLineElements);
  const Tensor memory = empty_tensor({elements}, DType::f32);
  auto* next = static_cast<float*>(memory.mutable_data_ptr());
  for (Exponents& e : all) e.found = std::exchange(next, next + round_up(e.count(), kLineElements));
  const auto kernel = gemm_kernels(DType::bf16).exponents;
  run_stage(
      std::span(std::as_const(all)),
      [](const Exponents& e) { return ceil_div(e.count(), e.grain()); },
      ThreadMemory(torch::stable::get_num_threads(), 0),
      [kernel](const Exponents& e, void*, int64_t begin, int64_t end) {
        kernel(static_cast<const float*>(e.x), e.stride, e.rows, e.cols, e.of_columns, e.found,
               begin * e.grain(), std::min(end * e.grain(), e.count()));
      });
  return memory;
}

bool takes_pieces(const GemmParams& p) {
  return p.split_bf16 > 0 && p.a_dtype == DType::f32 && p.b_dtype == DType::f32 &&
         (p.m > kMaxDotRows || is_batch_invariant()) && is_on_tiles(DType::bf16);
}

}  // namespace

// Products with a non-finite element are left to fp32, which keeps it in its place. This choice
// depends on the data alone.
std::vector<bool> multiply_in_pieces(std::span<const GemmParams> products) {
  std::vector<bool> made(products.size());
  std::vector<Exponents> exponents;  // of A and B of each product in turn
  for (size_t i = 0; i < products.size(); ++i) {
    made[i] = takes_pieces(products[i]);
    if (!made[i]) continue;
    exponents.push_back(exponents_of_a(products[i]));
    exponents.push_back(exponents_of_b(products[i]));
  }
  if (exponents.empty()) return made;
  const Tensor memory = find(exponents);
  std::vector<GemmParams> finite;
  auto next = exponents.cbegin();
  for (size_t i = 0; i < products.size(); ++i) {
    if (!made[i]) continue;
    const Exponents &a = *next++, &b = *next++;
    made[i] = a.all_finite() && b.all_finite();
    if (!made[i]) continue;
    finite.push_back(products[i]);
    finite.back().a_exponents = a.found;
    finite.back().b_exponents = b.found;
  }
  run(std::move(finite));
  return made;
}

void multiply_each(std::span<const GemmParams> products) {
  const std::vector<bool> made = multiply_in_pieces(products);
  std::vector<GemmParams> others;
  for (size_t i = 0; i < products.size(); ++i) {
    if (made[i]) continue;
    others.push_back(products[i]);
    others.back().split_bf16 = 0;
  }
  run(std::move(others));
}

void multiply(const Operand& a, const Operand& b, const void* bias, void* c, DType c_dtype,
              int64_t ldc, int64_t m, int64_t n, int64_t k, bool accumulate, int64_t split_bf16) {
  const GemmParams p{.a_dtype = a.dtype,
                     .b_dtype = b.dtype,
                     .c_dtype = c_dtype,
                     .m = m,
                     .n = n,
                     .k = k,
                     .a = a.data,
                     .b = b.data,
                     .bias = bias,
                     .c = c,
                     .lda = a.stride,
                     .ldb = b.stride,
                     .ldc = ldc,
                     .a_transposed = a.transposed,
                     .b_transposed = b.transposed,
                     .accumulate = accumulate,
                     .split_bf16 = split_bf16};
  multiply_each({&p, 1});
}

void sum_columns(const Rows& x, DType dtype, void* out) {
  const auto sums = gemm_kernels(dtype).column_sums;
  const int64_t grain =
      std::max(kLineElements, round_up(grain_of(x.rows, kColumnTask), kLineElements));
  parallel_ranges(ceil_div(x.cols, grain), 1, [&](int64_t begin, int64_t end) {
    sums(dtype, x.data(), x.stride, x.rows, out, begin * grain, std::min(end * grain, x.cols));
  });
}

namespace {

// Checked arguments of forward and backward.
struct Problem {
  const char* op;
  DType dtype;
  Rows x, weight;
  int64_t m, n, k;

  Problem(const char* op_, const Tensor& x_, const Tensor& weight_)
      : op(op_),
        dtype(dtype_of(op, "x", x_)),
        x(as_rows(op, "x", x_, dtype)),
        weight(as_rows(op, "weight", weight_, dtype)),
        m(x.rows),
        n(weight.rows),
        k(x.cols) {
    require(weight_.dim() == 2, op, "weight must have 2 dimensions, got ", weight_.dim());
    require(k == weight.cols, op, "x and weight must have the same last size, got K=", k, " and ",
            weight.cols);
  }

  Operand of(const Rows& rows, bool transposed = false) const {
    return {rows.data(), dtype, rows.stride, transposed};
  }
};

Tensor linear(const OpCall& call, const Layer& in, const LayerOptions& options) {
  const int64_t split_bf16 = options.split_bf16;
  const Problem p(call.op, in.x, in.weight);
  require_split_bf16(p.op, split_bf16);
  const OptTensor shift = as_vector(p.op, "bias", in.bias, p.dtype, p.n);
  const Tensor y = empty_tensor(sizes_with_last(in.x, p.n), p.dtype);
  multiply(p.of(p.x), p.of(p.weight, true), data_or_null(shift), y.mutable_data_ptr(), p.dtype, p.n,
           p.m, p.n, p.k, false, split_bf16);
  return y;
}

LayerGradients linear_backward(const OpCall& call, const LayerBackward& in,
                               const LayerOptions& options, const Wanted& wanted) {
  const auto& [grad_y, x, weight] = in;
  const int64_t split_bf16 = options.split_bf16;
  const Problem p(call.op, x, weight);
  require_split_bf16(p.op, split_bf16);
  const Rows grad = as_rows(p.op, "grad_y", grad_y, p.dtype, sizes_with_last(x, p.n));
  const Output dx(wanted.x_grad, x.sizes(), p.dtype);
  const Output dweight(wanted.weight_grad, weight.sizes(), p.dtype);
  const Output dbias(wanted.bias_grad, {p.n}, p.dtype);
  if (wanted.x_grad) {
    multiply(p.of(grad), p.of(p.weight), nullptr, dx.data(), p.dtype, p.k, p.m, p.k, p.n, false,
             split_bf16);
  }
  if (wanted.weight_grad) {
    multiply(p.of(grad, true), p.of(p.x), nullptr, dweight.data(), p.dtype, p.k, p.n, p.k, p.m,
             false, split_bf16);
  }
  if (wanted.bias_grad) sum_columns(grad, p.dtype, dbias.data());
  return {dx.tensor(), dweight.tensor(), dbias.tensor()};
}

// Sum of the two products in the compute type, rounded once.
Tensor sum_of_input_gradients(const Tensor& grad_a, const Tensor& weight_a, const Tensor& grad_b,
                              const Tensor& weight_b, int64_t split_bf16) {
  constexpr const char* op = "linear_backward";
  const DType dtype = dtype_of(op, "grad_y", grad_a), compute = accumulator(dtype);
  const Rows a = as_rows(op, "grad_y", grad_a), b = as_rows(op, "grad_y", grad_b);
  const Rows of_a = as_rows(op, "weight", weight_a), of_b = as_rows(op, "weight", weight_b);
  const Tensor sums = empty_tensor(sizes_with_last(grad_a, of_a.cols), compute);
  const auto add = [&](const Rows& grad, const Rows& weight, bool accumulate) {
    multiply({grad.data(), dtype, grad.stride}, {weight.data(), dtype, weight.stride}, nullptr,
             sums.mutable_data_ptr(), compute, weight.cols, grad.rows, weight.cols, grad.cols,
             accumulate, split_bf16);
  };
  add(a, of_a, false);
  add(b, of_b, true);
  return dtype == compute ? sums : torch::stable::to(sums, scalar_type(dtype));
}

const Registry registry([](Registry& ops) {
  ops.implement<linear>("linear", differentiable);
  ops.implement<linear_backward>("linear_backward");
});

}  // namespace

constinit const LinearProducts kNativeProducts{linear, linear_backward, sum_of_input_gradients};

}  // namespace omniattn::ops::gemm
