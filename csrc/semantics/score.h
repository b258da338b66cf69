// From q.k to the logit (spec attention 1): s = f(scale * q.k) + bias, f the identity or cap *
// tanh(. / cap).
//
// Kernels keep logits in units of log2(e), so that the softmax is a power of two. The factor `pre`
// is folded into q when it is packed: x = pre * (q.k), then s * log2(e) = x, or post * tanh(x) with
// a softcap.
#pragma once

#include "semantics/macros.h"

namespace omniattn {

constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

struct Score {
  double pre;   // factor on q.k
  double post;  // cap * log2(e); 0: no softcap
  double
      chain;  // d(scale * q.k) / dx = scale / pre: what turns dx into the gradient of scale * q.k
};

OMNIATTN_FN Score make_score(double scale, double softcap) {
  return softcap > 0 ? Score{scale / softcap, softcap * kLog2E, softcap}
                     : Score{scale * kLog2E, 0.0, kLn2};
}

// Derivative of cap * tanh(z / cap) by z, given t = tanh(z / cap).
template <class V>
OMNIATTN_FN V softcap_slope(V t) {
  return V(1) - t * t;
}

}  // namespace omniattn
