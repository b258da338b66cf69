// Errors found by the emulator, and their source positions.
#pragma once

#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>

namespace omniattn::emulator {

using Location = std::source_location;

// Thrown by a launch whose kernel broke a rule.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Position in the form "file.cu:12".
std::string position(const Location& location);
// Position of a code address, from its debug information.
std::string position(const void* pc);

// Concatenates all parts as a stream writes them.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace omniattn::emulator
