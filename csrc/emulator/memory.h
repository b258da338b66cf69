// The shared memory of the running block. Each array ends at an unreadable page, so that the first
// access past its end stops at the offending instruction.
#pragma once

#include <cstddef>
#include <deque>

#include "emulator/report.h"

namespace omniattn::emulator {

// Bytes of uninitialised memory: NaN as fp32, fp64, bf16 and fp16.
inline constexpr unsigned char kPoison = 0xff;

struct SharedArray {
  const void* key;   // identifies the declaration
  const char* name;  // as declared
  char* data;
  size_t bytes;
};

class SharedMemory {
 public:
  static constexpr size_t kAlignment = 128;

  SharedMemory();
  ~SharedMemory();

  // Drops all arrays; their memory becomes unreadable.
  void clear();
  // The array with this key, created at its first request.
  const SharedArray& array(const void* key, const char* name, size_t bytes);
  // Fills everything with poison.
  void poison();
  // An array whose padding was overwritten, or null. Only arrays whose size is not a multiple of
  // the alignment have padding.
  const SharedArray* overrun() const;

  const std::deque<SharedArray>& arrays() const { return arrays_; }
  // The array that holds [address, address + bytes), or null.
  const SharedArray* find(const void* address, size_t bytes) const;
  // The range of addresses reserved for arrays and their guards.
  static constexpr size_t kReserved = 8 << 20;
  const char* begin() const { return begin_; }
  bool reserved(const void* address) const {
    const char* const p = static_cast<const char*>(address);
    return p >= begin_ && p < begin_ + kReserved;
  }

 private:
  char* begin_;
  char* next_;
  std::deque<SharedArray> arrays_;  // references stay valid
};

}  // namespace omniattn::emulator
