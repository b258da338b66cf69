// moe, moe_backward on the CPU: checks, sorting, allocation, phases.
#include "kernels/moe/moe.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "ops/gemm.h"

namespace {

using namespace omniattn;
using namespace omniattn::ops;

// Intermediate arrays of the experts that are worked on together; more only costs memory.
constexpr int64_t kWaveBytes = int64_t{128} << 20;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Weights of all experts, logically (E, out, in): with unit stride along `in`, or along `out`.
struct Experts {
  Tensor tensor;
  int64_t experts, out, in;
  int64_t expert_stride, out_stride, in_stride;
  bool transposed;  // unit stride along `out`

  const void* data() const { return tensor.const_data_ptr(); }
  // As B of x W^T and of y W.
  MoeMatrix forward() const { return {data(), expert_stride, in_stride, out_stride}; }
  MoeMatrix backward() const { return {data(), expert_stride, out_stride, in_stride}; }
};

Experts as_experts(const char* op, const char* name, const Tensor& t, DType dtype) {
  require_cpu(op, name, t, dtype);
  require(t.dim() == 3, op, name, " must have 3 dimensions, got ", t.dim());
  const Sizes sizes = t.sizes();
  const auto fits = [&](int64_t dim) { return sizes[dim] <= 1 || t.strides()[dim] == 1; };
  const bool transposed = t.strides()[2] != 1 && t.strides()[1] == 1;
  const Tensor dense = transposed || fits(2) ? t : torch::stable::contiguous(t);
  const Sizes strides = dense.strides();
  return {dense,
          sizes[0],
          sizes[1],
          sizes[2],
          strides[0],
          transposed ? 1 : strides[1],
          transposed ? strides[2] : 1,
          transposed};
}

// A gradient in the layout of its weights; empty if not wanted.
Tensor empty_like(const Experts& w, DType dtype, bool wanted) {
  if (!wanted) {
    const int64_t none = 0;
    return empty_cpu({&none, 1}, dtype);
  }
  const std::array<int64_t, 3> sizes{w.experts, w.transposed ? w.in : w.out,
                                     w.transposed ? w.out : w.in};
  const Tensor t = empty_cpu({sizes.data(), 3}, dtype);
  return w.transposed ? torch::stable::transpose(t, 1, 2) : t;
}

// The arguments that forward and backward share, checked.
struct Problem {
  DType dtype, compute, operand;
  Rows x;
  int64_t tokens, slots, experts, dim;
  Tensor index, weights;  // contiguous (tokens, slots)
  Experts up, down;
  OptTensor up_bias, down_bias;
  MoeHidden hidden;
  int64_t columns;  // of pre

  // The (token, slot) pairs by expert, stable: rows offsets[e] to offsets[e + 1] are of expert e.
  std::vector<int64_t> offsets, token_of_row, slot_of_row, row_of_slot;

  Problem(const char* op, const Tensor& x_, const Tensor& index_, const Tensor& weights_,
          const Tensor& up_, const OptTensor& up_bias_, const Tensor& down_,
          const OptTensor& down_bias_, int64_t act, int64_t gate, const std::vector<double>& clamp)
      : dtype(dtype_of(op, "x", x_)),
        compute(accumulator(dtype)),
        operand(moe_kernels().operand(dtype)),
        x(checked_rows(op, x_, dtype)),
        tokens(x.rows),
        dim(x.cols),
        index(index_),
        weights(weights_),
        up(as_experts(op, "up", up_, dtype)),
        down(as_experts(op, "down", down_, dtype)) {
    require(act >= 0 && act < kActivationCount, op, "act must be in [0, ", kActivationCount,
            "), got act=", act);
    require(gate >= 0 && gate < kMoeGateCount, op, "gate must be in [0, ", kMoeGateCount,
            "), got gate=", gate);
    require(clamp.empty() || clamp.size() == 2, op, "clamp must hold alpha and limit, got ",
            clamp.size(), " numbers");
    hidden = {static_cast<Activation>(act), static_cast<MoeGate>(gate), 0, 0, down.in};
    if (!clamp.empty()) {
      require(clamp[0] > 0 && clamp[1] > 0 && hidden.gate != MoeGate::none, op,
              "clamp must have alpha > 0 and limit > 0 and needs a gate, got alpha=", clamp[0],
              ", limit=", clamp[1]);
      hidden.alpha = clamp[0];
      hidden.limit = clamp[1];
    }
    experts = up.experts;
    columns = hidden.columns();
    require(up.out == columns && up.in == dim, op, "up must have shape (E, ", columns, ", ", dim,
            ") to fit x and down, got (", experts, ", ", up.out, ", ", up.in, ")");
    require(down.experts == experts && down.out == dim, op, "down must have shape (", experts, ", ",
            dim, ", F), got (", down.experts, ", ", down.out, ", ", down.in, ")");
    up_bias = bias(op, "up_bias", up_bias_, columns);
    down_bias = bias(op, "down_bias", down_bias_, dim);

    require(index.is_cpu() && index.scalar_type() == ScalarType::Long && index.dim() == 2 &&
                index.size(0) == tokens,
            op, "index must be int64 of shape (", tokens, ", k) on the CPU");
    slots = index.size(1);
    require_cpu(op, "weights", weights, compute);
    require_sizes(op, "weights", weights, index.sizes());
    if (!index.is_contiguous()) index = torch::stable::contiguous(index);
    if (!weights.is_contiguous()) weights = torch::stable::contiguous(weights);
    sort(op);
  }

  int64_t rows() const { return offsets[experts]; }

 private:
  static Rows checked_rows(const char* op, const Tensor& t, DType dtype) {
    require_cpu(op, "x", t, dtype);
    require(t.dim() == 2, op, "x must have 2 dimensions, got ", t.dim());
    return as_rows(op, "x", t);
  }

  OptTensor bias(const char* op, const char* name, const OptTensor& t, int64_t cols) const {
    if (!t.has_value()) return t;
    const std::array<int64_t, 2> sizes{experts, cols};
    require_cpu(op, name, *t, dtype);
    require_sizes(op, name, *t, {sizes.data(), 2});
    return contiguous(t);
  }

  void sort(const char* op) {
    const auto* const experts_of = static_cast<const int64_t*>(index.const_data_ptr());
    const int64_t count = tokens * slots;
    offsets.assign(static_cast<size_t>(experts) + 1, 0);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t e = experts_of[i];
      require(e >= -1 && e < experts, op, "index must be in [0, ", experts,
              ") or -1 for none, got index=", e, " at flat position ", i);
      if (e >= 0) ++offsets[e + 1];
    }
    for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
    std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
    token_of_row.resize(rows());
    slot_of_row.resize(rows());
    row_of_slot.assign(count, -1);
    for (int64_t i = 0; i < count; ++i) {
      if (experts_of[i] < 0) continue;
      const int64_t row = next[experts_of[i]]++;
      token_of_row[row] = i / slots;
      slot_of_row[row] = i;
      row_of_slot[i] = row;
    }
  }
};

// Consecutive experts whose intermediate arrays fit into kWaveBytes, one expert at least.
struct Wave {
  int64_t first_expert, experts;
  int64_t row, rows;
  std::vector<MoeBlock> blocks;  // rows counted from `row`, largest block first

  const int64_t* offsets(const Problem& p) const { return p.offsets.data() + first_expert; }
};

std::vector<Wave> waves(const Problem& p, int64_t bytes_per_row) {
  const int64_t limit = std::max<int64_t>(1, kWaveBytes / std::max<int64_t>(1, bytes_per_row));
  std::vector<Wave> result;
  for (int64_t e = 0; e < p.experts; ++e) {
    const int64_t begin = p.offsets[e], rows = p.offsets[e + 1] - begin;
    if (result.empty() || begin + rows - result.back().row > limit) {
      result.push_back({e, 0, begin, 0, {}});
    }
    Wave& wave = result.back();
    const int64_t pieces = divide_up(rows, kMoeBlockRows);
    for (int64_t i = 0; i < pieces; ++i) {
      const int64_t from = rows * i / pieces, to = rows * (i + 1) / pieces;
      wave.blocks.push_back({e, begin + from - wave.row, to - from});
    }
    ++wave.experts;
    wave.rows += rows;
  }
  for (Wave& wave : result) {
    std::stable_sort(wave.blocks.begin(), wave.blocks.end(),
                     [](const MoeBlock& a, const MoeBlock& b) { return a.rows > b.rows; });
  }
  return result;
}

int64_t most_rows(const std::vector<Wave>& all) {
  int64_t rows = 0;
  for (const Wave& wave : all) rows = std::max(rows, wave.rows);
  return rows;
}

// One at least: experts without features still add their bias.
int64_t feature_groups(const Problem& p) {
  return std::max<int64_t>(1, divide_up(p.hidden.features, kMoeFeatures));
}

// Memory for (rows, cols) of a dtype.
struct Buffer {
  Tensor tensor;
  int64_t cols, item;

  Buffer(int64_t rows, int64_t cols_, DType dtype) : cols(cols_), item(size_of(dtype)) {
    const int64_t count = rows * cols;
    tensor = empty_cpu({&count, 1}, dtype);
  }
  void* row(int64_t r) const {
    return static_cast<char*>(tensor.mutable_data_ptr()) + r * cols * item;
  }
};

// Runs the products of a wave, whose items are blocks times groups of columns.
class Products {
 public:
  explicit Products(DType dtype)
      : bytes_(moe_kernels().workspace_bytes(dtype)),
        threads_(torch::stable::get_num_threads()),
        memory_(bytes_ * threads_ / 4, 1, DType::f32) {}

  template <class Params>
  void run(const Params& p, int64_t groups,
           void (*kernel)(const Params&, void*, int64_t, int64_t)) const {
    const int64_t items = p.block_count * groups;
    parallel_queue(items, std::min<int64_t>(items, threads_), [&](int64_t thread, int64_t item) {
      kernel(p, static_cast<char*>(memory_.row(0)) + thread * bytes_, item, item + 1);
    });
  }

 private:
  int64_t bytes_, threads_;
  Buffer memory_;
};

// out (wave rows, cols) = the rows of x that the wave's rows stand for.
void gather(const Problem& p, const Wave& wave, const Rows& x, void* out) {
  const MoeGatherParams g{p.dtype,  x.cols, x.stride, p.token_of_row.data() + wave.row,
                          x.data(), out};
  parallel_ranges(wave.rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, x.cols)),
                  [&](int64_t a, int64_t b) { moe_kernels().gather(g, a, b); });
}

void up(const Problem& p, const Wave& wave, const Products& products, const void* x, void* pre,
        void* hidden) {
  const MoeUpParams u{p.dtype,
                      p.hidden,
                      p.dim,
                      wave.blocks.data(),
                      static_cast<int64_t>(wave.blocks.size()),
                      x,
                      p.up.forward(),
                      data_or_null(p.up_bias),
                      pre,
                      hidden};
  products.run(u, feature_groups(p), moe_kernels().up);
}

void project(const Problem& p, const Wave& wave, const Products& products, const void* a, int64_t k,
             const MoeMatrix& b, const OptTensor& bias, void* out) {
  const MoeProjectParams q{p.dtype,
                           k,
                           p.dim,
                           wave.blocks.data(),
                           static_cast<int64_t>(wave.blocks.size()),
                           a,
                           b,
                           data_or_null(bias),
                           out};
  products.run(q, divide_up(p.dim, 2 * kMoeFeatures), moe_kernels().project);
}

void combine(const Problem& p, const Buffer& rows, const void* weight, void* y) {
  const MoeCombineParams c{p.dtype, p.dim, p.slots, rows.row(0), p.row_of_slot.data(), weight, y};
  const int64_t cost = std::max<int64_t>(1, p.dim * std::max<int64_t>(1, p.slots));
  parallel_ranges(p.tokens, std::max<int64_t>(1, 32768 / cost),
                  [&](int64_t a, int64_t b) { moe_kernels().combine(c, a, b); });
}

std::tuple<Tensor, Tensor> moe(const Tensor& x, const Tensor& index, const Tensor& weights,
                               const Tensor& up_weight, const OptTensor& up_bias,
                               const Tensor& down_weight, const OptTensor& down_bias, int64_t act,
                               int64_t gate, std::vector<double> clamp, bool keep) {
  const Problem p("moe", x, index, weights, up_weight, up_bias, down_weight, down_bias, act, gate,
                  clamp);
  const int64_t features = p.hidden.features, item = size_of(p.operand);
  const std::vector<Wave> all = waves(p, (p.dim + features) * item);
  const Buffer gathered(most_rows(all), p.dim, p.operand);
  const Buffer hidden(most_rows(all), features, p.operand);
  const Buffer rows(p.rows(), p.dim, p.compute);
  const std::array<int64_t, 2> pre_sizes{keep ? p.tokens * p.slots : 0, p.columns};
  const Tensor pre = empty_cpu({pre_sizes.data(), 2}, p.dtype);
  const Tensor y = empty_cpu(x.sizes(), p.dtype);
  char* const kept = static_cast<char*>(pre.mutable_data_ptr());
  const int64_t pre_row = p.columns * size_of(p.dtype);
  if (keep) std::memset(kept + p.rows() * pre_row, 0, (p.tokens * p.slots - p.rows()) * pre_row);
  const Products products(p.dtype);
  for (const Wave& wave : all) {
    gather(p, wave, p.x, gathered.row(0));
    up(p, wave, products, gathered.row(0), keep ? kept + wave.row * pre_row : nullptr,
       hidden.row(0));
    project(p, wave, products, hidden.row(0), features, p.down.forward(), p.down_bias,
            rows.row(wave.row));
  }
  combine(p, rows, p.weights.const_data_ptr(), y.mutable_data_ptr());
  return {y, pre};
}

// Gradient of weights w (E, out, in) = sum over rows of grad (rows, out)^T in (rows, in).
void weight_grad(const Problem& p, const Wave& wave, const Experts& w, const Buffer& grad,
                 const Buffer& in, const Tensor& result) {
  const GemmKernels& kernels = gemm_kernels();
  std::vector<GemmParams> products;
  for (int64_t e = wave.first_expert; e < wave.first_expert + wave.experts; ++e) {
    const int64_t row = p.offsets[e] - wave.row;
    const Buffer& a = w.transposed ? in : grad;
    const Buffer& b = w.transposed ? grad : in;
    GemmParams g{};
    g.a_dtype = g.b_dtype = p.operand;
    g.c_dtype = p.dtype;
    g.m = a.cols;
    g.n = b.cols;
    g.k = p.offsets[e + 1] - p.offsets[e];
    g.a = a.row(row);
    g.b = b.row(row);
    g.c = static_cast<char*>(result.mutable_data_ptr()) + e * g.m * g.n * size_of(p.dtype);
    g.lda = g.m;
    g.ldb = g.ldc = g.n;
    g.a_transposed = true;
    products.push_back(g);
  }
  // Sizes but for k, and with them items and workspace, are the same for all.
  const int64_t items = kernels.items(products[0]);
  const int64_t bytes = kernels.workspace_bytes(products[0]);
  const int64_t threads = std::min<int64_t>(items * wave.experts, torch::stable::get_num_threads());
  const Buffer memory(threads, bytes / 4, DType::f32);
  parallel_queue(items * wave.experts, threads, [&](int64_t thread, int64_t i) {
    kernels.run(products[i / items], memory.row(thread), i % items, i % items + 1);
  });
}

void bias_grad(const Problem& p, const Wave& wave, const Buffer& x, const void* weight,
               const Tensor& result) {
  std::vector<int64_t> offsets(wave.offsets(p), wave.offsets(p) + wave.experts + 1);
  for (int64_t& offset : offsets) offset -= wave.row;
  char* const out = static_cast<char*>(result.mutable_data_ptr());
  const MoeBiasGradParams g{p.dtype,  x.cols, offsets.data(),
                            x.row(0), weight, out + wave.first_expert * x.cols * size_of(p.dtype)};
  parallel_ranges(wave.experts, 1, [&](int64_t a, int64_t b) { moe_kernels().bias_grad(g, a, b); });
}

template <class F>
void with_compute_type(DType dtype, const F& f) {
  if (dtype == DType::f64) {
    f(double{});
  } else {
    f(float{});
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> moe_backward(
    const Tensor& grad_y, const Tensor& x, const Tensor& index, const Tensor& weights,
    const Tensor& up_weight, const OptTensor& up_bias, const Tensor& down_weight,
    const OptTensor& down_bias, const Tensor& pre, int64_t act, int64_t gate,
    std::vector<double> clamp, bool x_grad, bool weights_grad, bool up_grad, bool up_bias_grad,
    bool down_grad, bool down_bias_grad) {
  constexpr const char* op = "moe_backward";
  const Problem p(op, x, index, weights, up_weight, up_bias, down_weight, down_bias, act, gate,
                  clamp);
  require_cpu(op, "grad_y", grad_y, p.dtype);
  require_sizes(op, "grad_y", grad_y, x.sizes());
  const Rows grad_rows = as_rows(op, "grad_y", grad_y);
  require_cpu(op, "pre", pre, p.dtype);
  const bool kept = pre.dim() != 2 || pre.size(0) != 0;
  const std::array<int64_t, 2> pre_sizes{kept ? p.tokens * p.slots : 0, p.columns};
  require_sizes(op, "pre", pre, {pre_sizes.data(), 2});
  const Tensor dense_pre = pre.is_contiguous() ? pre : torch::stable::contiguous(pre);

  const auto empty = [&](bool wanted, int64_t cols) {
    const std::array<int64_t, 2> sizes{wanted ? p.experts : 0, cols};
    return empty_cpu({sizes.data(), wanted ? size_t{2} : size_t{1}}, p.dtype);
  };
  const int64_t none = 0;
  const Tensor dx = empty_cpu(x_grad ? x.sizes() : Sizes(&none, 1), p.dtype);
  const Tensor dweights = empty_cpu(weights_grad ? p.weights.sizes() : Sizes(&none, 1), p.compute);
  const Tensor dup = empty_like(p.up, p.dtype, up_grad);
  const Tensor dup_bias = empty(up_bias_grad, p.columns);
  const Tensor ddown = empty_like(p.down, p.dtype, down_grad);
  const Tensor ddown_bias = empty(down_bias_grad, p.dim);

  const int64_t features = p.hidden.features, groups = feature_groups(p);
  const int64_t row_bytes = (2 * p.dim + p.columns + features) * size_of(p.operand);
  const std::vector<Wave> all = waves(p, row_bytes);
  const int64_t most = most_rows(all);
  const Buffer gathered_x(most, p.dim, p.operand), gathered_grad(most, p.dim, p.operand);
  const Buffer grad_pre(most, p.columns, p.operand), hidden(most, features, p.operand);
  const Buffer recomputed(kept ? 0 : most, p.columns, p.dtype);
  const Buffer dx_rows(x_grad ? p.rows() : 0, p.dim, p.compute);
  const Buffer row_weight(p.rows(), 1, p.compute), grad_weight(p.rows(), groups, p.compute);
  with_compute_type(p.compute, [&]<class C>(C) {
    const auto* const from = static_cast<const C*>(p.weights.const_data_ptr());
    auto* const to = static_cast<C*>(row_weight.row(0));
    for (int64_t r = 0; r < p.rows(); ++r) to[r] = from[p.slot_of_row[r]];
  });

  const Products products(p.dtype);
  for (const Wave& wave : all) {
    gather(p, wave, grad_rows, gathered_grad.row(0));
    if (!kept || up_grad) gather(p, wave, p.x, gathered_x.row(0));
    const char* kept_pre = static_cast<const char*>(dense_pre.const_data_ptr());
    if (kept) {
      kept_pre += wave.row * p.columns * size_of(p.dtype);
    } else {
      up(p, wave, products, gathered_x.row(0), recomputed.row(0), nullptr);
      kept_pre = static_cast<const char*>(recomputed.row(0));
    }
    const MoeUpBackwardParams u{p.dtype,
                                p.hidden,
                                p.dim,
                                wave.blocks.data(),
                                static_cast<int64_t>(wave.blocks.size()),
                                gathered_grad.row(0),
                                p.down.backward(),
                                data_or_null(p.down_bias),
                                kept_pre,
                                row_weight.row(wave.row),
                                grad_pre.row(0),
                                hidden.row(0),
                                grad_weight.row(wave.row)};
    products.run(u, groups, moe_kernels().up_backward);
    if (x_grad) {
      project(p, wave, products, grad_pre.row(0), p.columns, p.up.backward(), {},
              dx_rows.row(wave.row));
    }
    if (up_grad) weight_grad(p, wave, p.up, grad_pre, gathered_x, dup);
    if (down_grad) weight_grad(p, wave, p.down, gathered_grad, hidden, ddown);
    if (up_bias_grad) bias_grad(p, wave, grad_pre, nullptr, dup_bias);
    if (down_bias_grad) {
      bias_grad(p, wave, gathered_grad, row_weight.row(wave.row), ddown_bias);
    }
  }
  if (x_grad) combine(p, dx_rows, nullptr, dx.mutable_data_ptr());
  if (weights_grad) {
    with_compute_type(p.compute, [&]<class C>(C) {
      auto* const out = static_cast<C*>(dweights.mutable_data_ptr());
      for (int64_t i = 0; i < p.tokens * p.slots; ++i) {
        C sum = 0;
        if (const int64_t row = p.row_of_slot[i]; row >= 0) {
          const auto* const parts = static_cast<const C*>(grad_weight.row(row));
          for (int64_t g = 0; g < groups; ++g) sum += parts[g];
        }
        out[i] = sum;
      }
    });
  }
  return {dx, dweights, dup, dup_bias, ddown, ddown_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, CPU, m) {
  OMNIATTN_IMPL(m, "moe", moe);
  m.impl("moe_backward", TORCH_BOX(&moe_backward));
}
