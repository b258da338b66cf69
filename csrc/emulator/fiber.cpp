#include "emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace omniattn::emulator {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 256 << 10;  // red zones make frames larger
#else
constexpr size_t kStackBytes = 64 << 10;
#endif
// Stacks that began at the same offset in a page would compete for the same lines of the L1 cache.
constexpr size_t kOffset = 192, kOffsets = 32;

}  // namespace

Fiber::Fiber() {
  static size_t fibers = 0;
  void* const low = mmap(nullptr, kPage + kStackBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (low == MAP_FAILED || mprotect(low, kPage, PROT_NONE) != 0) throw std::bad_alloc();
  low_ = static_cast<char*>(low);
  top_ = low_ + kPage + kStackBytes - fibers++ % kOffsets * kOffset;
}

Fiber::~Fiber() { munmap(low_, kPage + kStackBytes); }

void Fiber::prepare(void (*entry)()) {
  // The word above the stack takes the place of the return address of entry(), so that the stack is
  // aligned as the ABI requires.
  void** const words = reinterpret_cast<void**>(top_);
  words[-1] = nullptr;
  context_ = {.stack = words - 1, .code = reinterpret_cast<void*>(entry), .frame = nullptr};
  fake_stack_ = nullptr;
}

void Fiber::entered() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &resumer.bottom, &resumer.bytes);
#endif
}

void Fiber::finish() {
  leave(nullptr);  // null: ASan drops its record of the stack
  __builtin_unreachable();
}

}  // namespace omniattn::emulator
