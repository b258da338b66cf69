// Every op's schema, once, for all backends.
//
// A differentiable op is defined under two names with one implementation: `<op>` gets a fake kernel
// and an autograd formula in Python and is what compiled graphs contain; `<op>_raw` gets a fake
// kernel only and is what the eager paths call (the autograd key of a Python formula costs 2.5 us
// even without gradients). It takes numbers where graphs have symbols: a list of four as SymInt[]
// costs 0.8 us more than as int[]. See python/omniattn/ops/_autograd.py.
#include <torch/csrc/stable/library.h>

#include <string>

namespace {

void define(torch::stable::detail::StableLibrary& m, const std::string& name,
            std::string signature) {
  m.def((name + signature).c_str());
  const std::string symbol = "SymInt[]";
  const size_t at = signature.find(symbol);
  if (at != std::string::npos) signature.replace(at, symbol.size(), "int[]");
  m.def((name + "_raw" + signature).c_str());
}

}  // namespace

STABLE_TORCH_LIBRARY(omniattn, m) {
  // machine
  m.def("cpu_isa() -> int");
  m.def("detected_cpu_isa() -> int");
  m.def("set_cpu_isa(int isa) -> bool");

  // attention: weights(f(scale q k^T) + bias) v on (B, T, H, D). mask: kind, a, b, aux index per
  // rule (semantics/mask.h), ANDed, symbolic as windows and lengths are in compiled graphs; score:
  // kind, aux index, params index per rule (semantics/score.h); params: scale, dropout_p, parameters
  // of score rules; seed: [seed, offset]. lse (B, Hq, Tq), and lse_tail of the same shape, what lse
  // lost when it was rounded (semantics/softmax.h); attention_only gives none. None is an empty
  // list: AOTInductor's runner makes it of one.
  define(
      m, "attention",
      "(Tensor q, Tensor k, Tensor v, Tensor[]? aux, Tensor? seed, SymInt[]? mask, int[]? score, "
      "float[] params) -> (Tensor out, Tensor lse, Tensor lse_tail)");
  m.def(
      "attention_only(Tensor q, Tensor k, Tensor v, Tensor[]? aux, Tensor? seed, int[]? mask, "
      "int[]? score, float[] params) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, "
      "Tensor[] aux, Tensor? seed, Tensor out, Tensor lse, Tensor lse_tail, SymInt[] mask, "
      "int[] score, float[] params, int[] wanted)"
      " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor[] grad_aux)");

  // P (B, Hq, Tq, Tk) of attention from its lse, without dropout, or its sums over queries (B, Hq,
  // Tk)
  define(m, "attention_weights",
         "(Tensor q, Tensor k, Tensor lse, Tensor[]? aux, SymInt[]? mask, int[]? score, "
         "float[] params, bool sums) -> Tensor");

  // the key with the largest logit, the first of equal ones, -1 where none is visible, and that
  // logit (B, Hq, Tq)
  m.def(
      "attention_select(Tensor q, Tensor k, Tensor[]? aux, SymInt[]? mask, int[]? score, "
      "float[] params) -> (Tensor index, Tensor top)");

  // norm: y = (x - mean) * rstd * (weight + offset) + bias over the last dimension; cast_first
  // rounds to x's dtype before the weight; stats (rows, 2) = mean, rstd
  define(m, "norm",
         "(Tensor x, Tensor? weight, Tensor? bias, bool center, float eps, float offset, bool "
         "cast_first)"
         " -> (Tensor y, Tensor stats)");
  // the same of h = x + residual, which has the dtype of the residual: x's, or fp32 beside 16 bits
  define(m, "add_norm",
         "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, bool center, float eps, float "
         "offset, bool cast_first)"
         " -> (Tensor y, Tensor h, Tensor stats)");
  // the same without statistics, for calls without gradients
  m.def(
      "norm_only(Tensor x, Tensor? weight, Tensor? bias, bool center, float eps, float offset, "
      "bool cast_first)"
      " -> Tensor y");
  m.def(
      "add_norm_only(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, bool center, float "
      "eps, float offset, bool cast_first) -> (Tensor y, Tensor h)");
  // dx has the dtype of grad_y; dh is the same in the dtype of h, and empty where that is no other
  m.def(
      "norm_backward(Tensor grad_y, Tensor? grad_h, Tensor h, Tensor? weight, Tensor stats, bool "
      "center, float offset, bool weight_grad, bool bias_grad) -> (Tensor dx, Tensor dh, Tensor "
      "dweight, Tensor dbias)");

  // gated_norm: of each of `groups` parts of the last dimension, ((v - mean) * rstd * weight +
  // bias), with v = x; v = x * act(z) for gate 1; the result times act(z) for gate 2. stats (rows,
  // groups, 2)
  define(m, "gated_norm",
         "(Tensor x, Tensor? z, Tensor? weight, Tensor? bias, int groups, int gate, int act, bool "
         "center, float eps, bool cast_first) -> (Tensor y, Tensor stats)");
  m.def(
      "gated_norm_only(Tensor x, Tensor? z, Tensor? weight, Tensor? bias, int groups, int gate, "
      "int "
      "act, bool center, float eps, bool cast_first) -> Tensor y");
  m.def(
      "gated_norm_backward(Tensor grad_y, Tensor x, Tensor? z, Tensor? weight, Tensor? bias, "
      "Tensor "
      "stats, int groups, int gate, int act, bool center, bool weight_grad, bool bias_grad)"
      " -> (Tensor dx, Tensor dz, Tensor dweight, Tensor dbias)");

  // rope: q, k (B, T, H, D) turned by cos, sin (P, Dr / 2) or (B, P, Dr / 2), whose rows are chosen
  // by positions (T) or (B, T), from dimension `start` of D on; without k the second result is
  // empty
  define(m, "rope",
         "(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions, int start, bool "
         "interleaved, bool inverse) -> (Tensor q_out, Tensor k_out)");
  m.def(
      "rope_(Tensor(a!) q, Tensor(b!)? k, Tensor cos, Tensor sin, Tensor? positions, int "
      "start, bool interleaved, bool inverse) -> ()");

  // norm_rope: the heads of x (B, T, H, D) normalised by their mean square, times weight + offset,
  // and turned as by rope; cast_first as in norm, and what the weight makes of it is rounded, too;
  // rstd (B, T, H)
  define(m, "norm_rope",
         "(Tensor x, Tensor? weight, Tensor cos, Tensor sin, Tensor? positions, int start, bool "
         "interleaved, float eps, float offset, bool cast_first) -> (Tensor y, Tensor rstd)");
  m.def(
      "norm_rope_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor cos, Tensor sin, Tensor? "
      "positions, Tensor rstd, int start, bool interleaved, float offset, bool weight_grad)"
      " -> (Tensor dx, Tensor dweight)");

  // activation: y = act(gate) * up over (..., F), or over one packed gate (..., 2F) without up;
  // activate: act(x) alone. The backwards in place write dup, or dx, over grad_y.
  define(m, "glu", "(Tensor gate, Tensor? up, int act) -> Tensor");
  m.def(
      "glu_backward(Tensor grad_y, Tensor gate, Tensor? up, int act) -> (Tensor dgate, Tensor "
      "dup)");
  m.def(
      "glu_backward_(Tensor(a!) grad_y, Tensor gate, Tensor up, int act, Tensor(b!) dgate) -> ()");
  m.def("activate(Tensor x, int act) -> Tensor");
  m.def("activate_backward_(Tensor(a!) grad_y, Tensor x, int act) -> ()");

  // gemm: y = x weight^T + bias with x (..., K), weight (N, K)
  define(m, "linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "linear_backward(Tensor grad_y, Tensor x, Tensor weight, bool x_grad, bool weight_grad, bool "
      "bias_grad) -> (Tensor dx, Tensor dweight, Tensor dbias)");

  // ffn: y = (act(x gate_weight^T + gate_bias) * (x up_weight^T + up_bias)) down_weight^T +
  // down_bias; without up_weight the activation alone. keep: elements of the hidden layer that
  // stay, times scale. gate and up are empty with recompute. Implemented in
  // python/omniattn/ops/ffn.py.
  define(m, "glu_mlp",
         "(Tensor x, Tensor gate_weight, Tensor? up_weight, Tensor down_weight, Tensor? gate_bias, "
         "Tensor? up_bias, Tensor? down_bias, Tensor? seed, float dropout_p, int act, bool "
         "recompute, bool native) -> (Tensor y, Tensor gate, Tensor up)");
  m.def(
      "glu_mlp_backward(Tensor grad_y, Tensor gate, Tensor up, bool[] needs, Tensor x, Tensor "
      "gate_weight, Tensor? up_weight, Tensor down_weight, Tensor? gate_bias, Tensor? up_bias, "
      "Tensor? down_bias, Tensor? seed, float dropout_p, int act, bool recompute, bool native) -> "
      "Tensor[]");

  // loss: target (...) int64, logits (..., V); reduction 0 none, 1 mean over kept targets, 2 sum
  define(m, "cross_entropy",
         "(Tensor logits, Tensor target, int ignore_index, float label_smoothing, float z_loss, "
         "float softcap, int reduction) -> (Tensor loss, Tensor lse)");
  m.def(
      "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse,"
      " int ignore_index, float label_smoothing, float z_loss, float softcap, int reduction,"
      " ScalarType? grad_dtype=None) -> Tensor");
  // the same of x weight^T + bias, a chunk of tokens at a time; gradients for a gradient of 1,
  // which need a reduction
  define(m, "linear_cross_entropy",
         "(Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index,"
         " float label_smoothing, float z_loss, float softcap, int reduction, bool x_grad,"
         " bool weight_grad, bool bias_grad) -> (Tensor loss, Tensor dx, Tensor dweight, Tensor"
         " dbias)");
  m.def(
      "linear_cross_entropy_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias,"
      " Tensor target, int ignore_index, float label_smoothing, float z_loss, float softcap,"
      " bool x_grad, bool weight_grad, bool bias_grad) -> (Tensor dx, Tensor dweight, Tensor"
      " dbias)");

  // moe: sum over the slots of weights (N, k) times expert index (N, k), -1 for none, of x (N, d);
  // up (E, F or 2F, d), down (E, d, F). act: Activation; gate: MoeGate; clamp: alpha and limit of
  // gpt-oss, or nothing. pre (N k, F or 2F), sorted by expert, is kept for the backward where asked
  // for, else empty.
  define(
      m, "moe",
      "(Tensor x, Tensor index, Tensor weights, Tensor up, Tensor? up_bias, Tensor down, Tensor? "
      "down_bias, int act, int gate, float[] clamp, bool keep) -> (Tensor y, Tensor pre)");
  m.def(
      "moe_backward(Tensor grad_y, Tensor x, Tensor index, Tensor weights, Tensor up, Tensor? "
      "up_bias, Tensor down, Tensor? down_bias, Tensor pre, int act, int gate, float[] clamp, bool "
      "x_grad, bool weights_grad, bool up_grad, bool up_bias_grad, bool down_grad, bool "
      "down_bias_grad) -> (Tensor dx, Tensor dweights, Tensor dup, Tensor dup_bias, Tensor ddown, "
      "Tensor ddown_bias)");

  // random: y = x / (1 - p) where an element's draw keeps it, else 0; fp32 numbers in [0, 1) of x's
  // shape. Draws are functions of seed = [seed, offset] and the element's index
  define(m, "dropout", "(Tensor x, Tensor seed, float p) -> Tensor");
  m.def("uniform_like(Tensor x, Tensor seed) -> Tensor");

  // topk: indices (..., k) int64 of the largest scores (..., n), stable, -1 where there are fewer
  m.def("top_k(Tensor scores, SymInt k, Tensor? mask) -> Tensor");
}
