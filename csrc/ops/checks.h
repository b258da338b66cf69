// Errors of the torch boundary: "<op>: <what must hold>, got <name>=<value>".
// Python sees them as RuntimeError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <sstream>
#include <stdexcept>

namespace omniattn::ops {

// Sizes that print as a Python tuple.
struct Shape {
  const int64_t* sizes;
  size_t dims;
};

inline std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '(';
  for (size_t i = 0; i < shape.dims; ++i) out << (i ? ", " : "") << shape.sizes[i];
  return out << (shape.dims == 1 ? ",)" : ")");
}

template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

template <class... Parts>
void require(bool condition, const char* op, const Parts&... parts) {
  if (!condition) [[unlikely]] {
    fail(op, parts...);
  }
}

}  // namespace omniattn::ops
