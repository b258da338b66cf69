// Result of functions that are written once for vectors on the CPU and for numbers on CUDA.
#pragma once

namespace omniattn {

// Value and derivative of a function at one point. The compiler drops the slope where only the
// value is used.
template <class V>
struct ValueAndSlope {
  V value, slope;
};

}  // namespace omniattn
