// Matrix products on the CPU, and linear made of them.
#include "ops/gemm.h"

#include <cmath>
#include <tuple>

#include "ops/parallel.h"
#include "ops/registry.h"
#include "ops/stage.h"
#include "semantics/seqlen.h"

namespace omniattn::ops::gemm {
namespace {

// Elements of a task of column sums, 256 KiB of fp32: the rows of a task are far apart.
constexpr int64_t kColumnTask = 65536;
constexpr int64_t kLineElements = 64;  // at least a cache line

// The dtype that is multiplied. On tiles fp32 rows are narrowed to that of the bf16 matrix, which
// rounds them as a product of bf16 in torch does; elsewhere the matrix is widened.
DType factors(const GemmParams& p) {
  if (p.pieces > 0) return DType::bf16;
  const bool narrowed = p.b_dtype == DType::bf16 && multiplies_on_tiles(active_isa());
  return narrowed ? DType::bf16 : p.a_dtype;
}

void run(const GemmParams& p) {
  const GemmKernels& kernels = gemm_kernels(factors(p));
  const int64_t threads = std::min<int64_t>(kernels.items(p), torch::stable::get_num_threads());
  run_stage(std::span(&p, 1), kernels.items, ThreadMemory(threads, kernels.workspace_bytes(p)),
            kernels.run);
}

// Exponents of the rows or columns of a matrix that is stored in `rows` rows.
Tensor exponents_of(const Operand& x, int64_t rows, int64_t cols, bool of_columns) {
  const auto find = gemm_kernels(DType::bf16).exponents;
  const int64_t count = of_columns ? cols : rows, other = of_columns ? rows : cols;
  const Tensor found = empty_tensor({count}, DType::f32);
  const int64_t grain = round_up(grain_of(other, kColumnTask), kLineElements);
  parallel_ranges(ceil_div(count, grain), 1, [&](int64_t begin, int64_t end) {
    find(static_cast<const float*>(x.data), x.stride, rows, cols, of_columns,
         static_cast<float*>(found.mutable_data_ptr()), begin * grain,
         std::min(end * grain, count));
  });
  return found;
}

bool all_finite(const Tensor& exponents) {
  const auto* const first = static_cast<const float*>(exponents.const_data_ptr());
  return std::all_of(first, first + exponents.numel(), [](float e) { return std::isfinite(e); });
}

// The product in pieces; false where an element is not finite, which fp32 keeps in its place. That
// depends on the data alone.
bool run_in_pieces(GemmParams p, const Operand& a, const Operand& b) {
  const Tensor rows =
      a.transposed ? exponents_of(a, p.k, p.m, true) : exponents_of(a, p.m, p.k, false);
  const Tensor cols =
      b.transposed ? exponents_of(b, p.n, p.k, false) : exponents_of(b, p.k, p.n, true);
  if (!all_finite(rows) || !all_finite(cols)) return false;
  p.a_exponents = static_cast<const float*>(rows.const_data_ptr());
  p.b_exponents = static_cast<const float*>(cols.const_data_ptr());
  run(p);
  return true;
}

}  // namespace

void multiply(const Operand& a, const Operand& b, const void* bias, void* c, DType c_dtype,
              int64_t ldc, int64_t m, int64_t n, int64_t k, bool accumulate, int64_t pieces) {
  GemmParams p{.a_dtype = a.dtype,
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
               .pieces = pieces};
  const bool floats = a.dtype == DType::f32 && b.dtype == DType::f32;
  const bool applies = floats && m > kMaxDotRows && multiplies_on_tiles(active_isa());
  if (pieces > 0 && applies && run_in_pieces(p, a, b)) return;
  p.pieces = 0;
  run(p);
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

// The arguments that forward and backward share, checked.
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

Tensor linear(const Tensor& x, const Tensor& weight, const OptTensor& bias, int64_t pieces) {
  const Problem p("linear", x, weight);
  require_pieces(p.op, pieces);
  const OptTensor shift = as_vector(p.op, "bias", bias, p.dtype, p.n);
  const Tensor y = empty_tensor(sizes_with_last(x, p.n), p.dtype);
  multiply(p.of(p.x), p.of(p.weight, true), data_or_null(shift), y.mutable_data_ptr(), p.dtype, p.n,
           p.m, p.n, p.k, false, pieces);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& grad_y, const Tensor& x,
                                                   const Tensor& weight, int64_t pieces,
                                                   bool x_grad, bool weight_grad, bool bias_grad) {
  const Problem p("linear_backward", x, weight);
  require_pieces(p.op, pieces);
  const Rows grad = as_rows(p.op, "grad_y", grad_y, p.dtype, sizes_with_last(x, p.n));
  const Output dx(x_grad, x.sizes(), p.dtype), dweight(weight_grad, weight.sizes(), p.dtype);
  const Output dbias(bias_grad, {p.n}, p.dtype);
  if (x_grad) {
    multiply(p.of(grad), p.of(p.weight), nullptr, dx.data(), p.dtype, p.k, p.m, p.k, p.n, false,
             pieces);
  }
  if (weight_grad) {
    multiply(p.of(grad, true), p.of(p.x), nullptr, dweight.data(), p.dtype, p.k, p.n, p.k, p.m,
             false, pieces);
  }
  if (bias_grad) sum_columns(grad, p.dtype, dbias.data());
  return {dx.tensor(), dweight.tensor(), dbias.tensor()};
}

const Registry registry([](Registry& ops) {
  ops.implement<linear>("linear", differentiable);
  ops.implement<linear_backward>("linear_backward");
});

}  // namespace
}  // namespace omniattn::ops::gemm
