// Losses of a linear layer's logits: chunks of tokens, and the products around the losses of a
// chunk. linear_loss_cpu.cpp and linear_loss_cuda.cpp define the products.
#pragma once

#include <algorithm>

#include "ops/device.h"
#include "ops/losses/loss.h"
#include "semantics/arith.h"

namespace omniattn::ops::loss {

OMNIATTN_FIELDS(Layer, Tensor x, weight; OptTensor bias);
OMNIATTN_FIELDS(Wanted, bool x_grad, weight_grad, bias_grad);
OMNIATTN_FIELDS(Gradients, Tensor dx, dweight, dbias);

// Logits of one chunk of tokens. On the CPU 64 MiB of fp32: smaller chunks pack the weight more
// often (a quarter of the time at 100 rows), larger ones only cost memory. On CUDA 1 GiB, and their
// gradients in the dtype of x: each chunk reads and writes the sums of dweight once, which with
// 2048 tokens (a vocabulary of 131072) takes an estimated tenth of its time on an H100. Tests under
// emulation have several chunks.
#if defined(OMNIATTN_EMULATED)
inline constexpr int64_t kChunkLogits = int64_t{1} << 11;
#else
inline constexpr int64_t kChunkLogits = int64_t{1} << (kOnCuda ? 28 : 24);
#endif

// The element of `t`, whose dtype this is.
inline void* at(const Tensor& t, int64_t element, DType dtype) {
  return static_cast<char*>(t.mutable_data_ptr()) + element * size_of(dtype);
}

// x (..., K) weight^T + bias, with weight (V, K) and bias (V), checked.
struct Projection {
  const char* op;
  DType dtype, acc;
  Rows x, weight;
  OptTensor bias;

  Projection(const char* op_, const Layer& in);

  // Computes logits (count, V) in the accumulator type, for the tokens from `first` on.
  void multiply(int64_t first, int64_t count, const Tensor& logits) const;
};

// Chunks of the tokens of a call.
struct Chunks {
  int64_t tokens, count, size;

  // Sized for `matrices` matrices of logits (size, vocab) in memory at a time.
  Chunks(int64_t tokens_, int64_t vocab, int64_t matrices)
      : tokens(tokens_),
        count(std::max<int64_t>(1, ceil_div(tokens, grain_of(vocab, kChunkLogits / matrices)))),
        size(ceil_div(tokens, count)) {}

  int64_t first(int64_t c) const { return c * size; }
  int64_t length(int64_t c) const { return std::clamp<int64_t>(tokens - first(c), 0, size); }
};

// Gradients of a layer, of dtype `out`, summed over the chunks of its tokens.
class LayerGradients {
 public:
  LayerGradients(const Projection& p, const Chunks& chunks, DType out, Wanted wanted);

  // Adds chunk c, whose gradients of logits (chunk size, V) have the dtype of gradient_dtype().
  void add(int64_t c, const Tensor& dlogits);
  // The gradients; to be called once, after all chunks are added.
  Gradients total() const;

  // On CUDA gradients of logits are rounded to the dtype of x, so that their products run at its
  // speed.
  static DType gradient_dtype(const Projection& p) { return kOnCuda ? p.dtype : p.acc; }

 private:
  const Projection& p_;
  const Chunks chunks_;
  DType out_;
  Output dx_, dweight_, weight_sums_, dbias_, bias_sums_;
};

}  // namespace omniattn::ops::loss
