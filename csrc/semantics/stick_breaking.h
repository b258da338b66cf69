// Stick-breaking attention (Tan et al., Scaling Stick-Breaking Attention, arXiv 2410.17980). From
// the last visible key to the first, each key takes the share sigmoid(z) of what later keys left:
//
//   w_j = sigmoid(z_j) e^-(sum over the visible keys k > j of softplus(z_k))
//
// since 1 - sigmoid(z) = e^-softplus(z). softplus(z_k) is the cost of key k. The sum over all keys
// is the cost of the row, and e^-cost its remainder. With g_j = w_j dL/dw_j and r = dL/d(-cost),
//
//   dL/dz_j = g_j - sigmoid(z_j) (r + sum over the keys k <= j of g_k)
//
// Forward kernels walk from the last key to the first. The backward walks from the first to the
// last, so that sums over few keys are not differences of sums over many, and takes the costs of
// tiles off the row's cost. Both passes compute the cost of a tile in the same way, and an
// ExactSum loses nothing.
#pragma once

#include "semantics/macros.h"

namespace omniattn {

// A sum of many numbers and its rounding errors.
template <class T>
struct ExactSum {
  T value, error;

  OMNIATTN_FN void add(T x) {
    const T sum = value + x, part = sum - value;
    error += (value - (sum - part)) + (x - part);
    value = sum;
  }
  OMNIATTN_FN T total() const { return value + error; }
};

}  // namespace omniattn
