// moe, moe_backward on the CPU: sorting, phases.
#include "ops/moe.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/gemm.h"

namespace {

// Intermediate arrays of the experts that are worked on together; more only costs memory.
constexpr int64_t kWaveBytes = int64_t{32} << 20;

// The (token, slot) pairs by expert, stable: rows offsets[e] to offsets[e + 1] are of expert e.
struct Routing {
  std::vector<int64_t> offsets, token_of_row, slot_of_row, row_of_slot;

  Routing(const char* op, const Problem& p)
      : offsets(static_cast<size_t>(p.experts) + 1, 0), row_of_slot(p.tokens * p.slots, -1) {
    const auto* const experts_of = static_cast<const int64_t*>(p.index.const_data_ptr());
    const int64_t count = p.tokens * p.slots;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t e = experts_of[i];
      require(e >= -1 && e < p.experts, op, "index must be in [0, ", p.experts,
              ") or -1 for none, got index=", e, " at flat position ", i);
      if (e >= 0) ++offsets[e + 1];
    }
    for (int64_t e = 0; e < p.experts; ++e) offsets[e + 1] += offsets[e];
    std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
    token_of_row.resize(rows());
    slot_of_row.resize(rows());
    for (int64_t i = 0; i < count; ++i) {
      if (experts_of[i] < 0) continue;
      const int64_t row = next[experts_of[i]]++;
      token_of_row[row] = i / p.slots;
      slot_of_row[row] = i;
      row_of_slot[i] = row;
    }
  }

  int64_t rows() const { return offsets.back(); }
};

// Consecutive experts whose intermediate arrays fit into kWaveBytes, one expert at least.
struct Wave {
  int64_t first_expert, experts;
  int64_t row, rows;
  std::vector<MoeBlock> blocks;  // rows counted from `row`, largest block first
};

std::vector<Wave> waves(const Routing& routing, int64_t bytes_per_row) {
  const int64_t limit = std::max<int64_t>(1, kWaveBytes / std::max<int64_t>(1, bytes_per_row));
  std::vector<Wave> result;
  const auto experts = static_cast<int64_t>(routing.offsets.size()) - 1;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t begin = routing.offsets[e], rows = routing.offsets[e + 1] - begin;
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
    tensor = empty_tensor({&count, 1}, dtype);
  }
  void* row(int64_t r) const {
    return static_cast<char*>(tensor.mutable_data_ptr()) + r * cols * item;
  }
};

// Runs the products of a wave, whose items are blocks times groups of columns.
class Products {
 public:
  explicit Products(DType dtype)
      : bytes_(moe_kernels(dtype).workspace_bytes(dtype)),
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
void gather(const Problem& p, const Routing& routing, const Wave& wave, const Rows& x, void* out) {
  const MoeGatherParams g{.dtype = p.dtype,
                          .cols = x.cols,
                          .x_stride = x.stride,
                          .tokens = routing.token_of_row.data() + wave.row,
                          .x = x.data(),
                          .out = out};
  parallel_ranges(wave.rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, x.cols)),
                  [&](int64_t a, int64_t b) { moe_kernels(p.dtype).gather(g, a, b); });
}

void up(const Problem& p, const Wave& wave, const Products& products, const void* x, void* pre,
        void* hidden) {
  const MoeUpParams u{.dtype = p.dtype,
                      .hidden_of = p.hidden,
                      .k = p.dim,
                      .blocks = wave.blocks.data(),
                      .block_count = static_cast<int64_t>(wave.blocks.size()),
                      .x = x,
                      .up = p.up.forward(),
                      .bias = data_or_null(p.up_bias),
                      .pre = pre,
                      .hidden = hidden};
  products.run(u, feature_groups(p), moe_kernels(p.dtype).up);
}

void project(const Problem& p, const Wave& wave, const Products& products, const void* a, int64_t k,
             const MoeMatrix& b, const OptTensor& bias, void* out) {
  const MoeProjectParams q{.dtype = p.dtype,
                           .k = k,
                           .n = p.dim,
                           .blocks = wave.blocks.data(),
                           .block_count = static_cast<int64_t>(wave.blocks.size()),
                           .a = a,
                           .b = b,
                           .bias = data_or_null(bias),
                           .out = out};
  products.run(q, divide_up(p.dim, kMoeFeatures), moe_kernels(p.dtype).project);
}

void combine(const Problem& p, const Routing& routing, const Buffer& rows, const void* weight,
             void* y) {
  const MoeCombineParams c{.dtype = p.dtype,
                           .cols = p.dim,
                           .slots = p.slots,
                           .rows = rows.row(0),
                           .row_of_slot = routing.row_of_slot.data(),
                           .weight = weight,
                           .y = y};
  const int64_t cost = std::max<int64_t>(1, p.dim * std::max<int64_t>(1, p.slots));
  parallel_ranges(p.tokens, std::max<int64_t>(1, 32768 / cost),
                  [&](int64_t a, int64_t b) { moe_kernels(p.dtype).combine(c, a, b); });
}

void run_forward(const Problem& p, void* y, void* pre) {
  const Routing routing("moe_experts", p);
  const DType operand = moe_kernels(p.dtype).operand(p.dtype);
  const int64_t features = p.hidden.features;
  const std::vector<Wave> all = waves(routing, (p.dim + features) * size_of(operand));
  const Buffer gathered(most_rows(all), p.dim, operand);
  const Buffer hidden(most_rows(all), features, operand);
  const Buffer rows(routing.rows(), p.dim, p.compute);
  char* const kept = static_cast<char*>(pre);
  const int64_t pre_row = p.columns * size_of(p.dtype);
  if (pre != nullptr) {
    std::memset(kept + routing.rows() * pre_row, 0,
                (p.tokens * p.slots - routing.rows()) * pre_row);
  }
  const Products products(p.dtype);
  for (const Wave& wave : all) {
    gather(p, routing, wave, p.x, gathered.row(0));
    up(p, wave, products, gathered.row(0), pre != nullptr ? kept + wave.row * pre_row : nullptr,
       hidden.row(0));
    project(p, wave, products, hidden.row(0), features, p.down.forward(), p.down_bias,
            rows.row(wave.row));
  }
  combine(p, routing, rows, p.weights.const_data_ptr(), y);
}

// Gradient of weights w (E, out, in) = sum over rows of grad (rows, out)^T in (rows, in).
void weight_grad(const Problem& p, const Routing& routing, const Wave& wave, const Experts& w,
                 const Buffer& grad, const Buffer& in, void* result) {
  const DType operand = moe_kernels(p.dtype).operand(p.dtype);
  const GemmKernels& kernels = gemm_kernels(operand);
  std::vector<GemmParams> products;
  for (int64_t e = wave.first_expert; e < wave.first_expert + wave.experts; ++e) {
    const int64_t row = routing.offsets[e] - wave.row;
    const Buffer& a = w.transposed ? in : grad;
    const Buffer& b = w.transposed ? grad : in;
    GemmParams g{};
    g.a_dtype = g.b_dtype = operand;
    g.c_dtype = p.dtype;
    g.m = a.cols;
    g.n = b.cols;
    g.k = routing.offsets[e + 1] - routing.offsets[e];
    g.a = a.row(row);
    g.b = b.row(row);
    g.c = static_cast<char*>(result) + e * g.m * g.n * size_of(p.dtype);
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

void bias_grad(const Problem& p, const Routing& routing, const Wave& wave, const Buffer& x,
               const void* weight, void* result) {
  const auto first = routing.offsets.begin() + wave.first_expert;
  std::vector<int64_t> offsets(first, first + wave.experts + 1);
  for (int64_t& offset : offsets) offset -= wave.row;
  char* const out = static_cast<char*>(result);
  const MoeBiasGradParams g{.dtype = p.dtype,
                            .cols = x.cols,
                            .offsets = offsets.data(),
                            .x = x.row(0),
                            .weight = weight,
                            .out = out + wave.first_expert * x.cols * size_of(p.dtype)};
  parallel_ranges(wave.experts, 1,
                  [&](int64_t a, int64_t b) { moe_kernels(p.dtype).bias_grad(g, a, b); });
}

template <class F>
void with_compute_type(DType dtype, const F& f) {
  if (dtype == DType::f64) {
    f(double{});
  } else {
    f(float{});
  }
}

void run_backward(const Problem& p, const Rows& grad_y, const void* pre,
                  const MoeGradients& grads) {
  const Routing routing("moe_backward", p);
  const DType operand = moe_kernels(p.dtype).operand(p.dtype);
  const int64_t features = p.hidden.features, groups = feature_groups(p);
  const int64_t row_bytes = (2 * p.dim + p.columns + features) * size_of(operand);
  const std::vector<Wave> all = waves(routing, row_bytes);
  const int64_t most = most_rows(all);
  const Buffer gathered_x(most, p.dim, operand), gathered_grad(most, p.dim, operand);
  const Buffer grad_pre(most, p.columns, operand), hidden(most, features, operand);
  const Buffer recomputed(pre != nullptr ? 0 : most, p.columns, p.dtype);
  const Buffer dx_rows(grads.x != nullptr ? routing.rows() : 0, p.dim, p.compute);
  const Buffer row_weight(routing.rows(), 1, p.compute);
  const Buffer grad_weight(routing.rows(), groups, p.compute);
  with_compute_type(p.compute, [&]<class C>(C) {
    const auto* const from = static_cast<const C*>(p.weights.const_data_ptr());
    auto* const to = static_cast<C*>(row_weight.row(0));
    for (int64_t r = 0; r < routing.rows(); ++r) to[r] = from[routing.slot_of_row[r]];
  });

  const Products products(p.dtype);
  for (const Wave& wave : all) {
    gather(p, routing, wave, grad_y, gathered_grad.row(0));
    if (pre == nullptr || grads.up != nullptr) gather(p, routing, wave, p.x, gathered_x.row(0));
    const char* wave_pre = static_cast<const char*>(pre);
    if (pre != nullptr) {
      wave_pre += wave.row * p.columns * size_of(p.dtype);
    } else {
      up(p, wave, products, gathered_x.row(0), recomputed.row(0), nullptr);
      wave_pre = static_cast<const char*>(recomputed.row(0));
    }
    const MoeUpBackwardParams u{.dtype = p.dtype,
                                .hidden_of = p.hidden,
                                .k = p.dim,
                                .blocks = wave.blocks.data(),
                                .block_count = static_cast<int64_t>(wave.blocks.size()),
                                .grad_y = gathered_grad.row(0),
                                .down = p.down.backward(),
                                .down_bias = data_or_null(p.down_bias),
                                .pre = wave_pre,
                                .weight = row_weight.row(wave.row),
                                .grad_pre = grad_pre.row(0),
                                .weighted_hidden = hidden.row(0),
                                .grad_weight = grad_weight.row(wave.row)};
    products.run(u, groups, moe_kernels(p.dtype).up_backward);
    if (grads.x != nullptr) {
      project(p, wave, products, grad_pre.row(0), p.columns, p.up.backward(), {},
              dx_rows.row(wave.row));
    }
    if (grads.up != nullptr) {
      weight_grad(p, routing, wave, p.up, grad_pre, gathered_x, grads.up);
    }
    if (grads.down != nullptr) {
      weight_grad(p, routing, wave, p.down, gathered_grad, hidden, grads.down);
    }
    if (grads.up_bias != nullptr) {
      bias_grad(p, routing, wave, grad_pre, nullptr, grads.up_bias);
    }
    if (grads.down_bias != nullptr) {
      bias_grad(p, routing, wave, gathered_grad, row_weight.row(wave.row), grads.down_bias);
    }
  }
  if (grads.x != nullptr) combine(p, routing, dx_rows, nullptr, grads.x);
  if (grads.weights != nullptr) {
    with_compute_type(p.compute, [&]<class C>(C) {
      auto* const out = static_cast<C*>(grads.weights);
      for (int64_t i = 0; i < p.tokens * p.slots; ++i) {
        C sum = 0;
        if (const int64_t row = routing.row_of_slot[i]; row >= 0) {
          const auto* const parts = static_cast<const C*>(grad_weight.row(row));
          for (int64_t g = 0; g < groups; ++g) sum += parts[g];
        }
        out[i] = sum;
      }
    });
  }
}

}  // namespace
