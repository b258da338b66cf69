#include "emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#error "the emulator needs a stack switch for this processor"
#endif

// Saves the callee-saved registers and the stack pointer of the caller in *save, and continues
// where `to` was saved.
extern "C" void omniattn_switch_stack(void** save, void* to);
asm(R"(
.text
.local omniattn_switch_stack
.type omniattn_switch_stack, @function
omniattn_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size omniattn_switch_stack, .-omniattn_switch_stack
)");

namespace omniattn::emulator {
namespace {

constexpr size_t kPage = 4096;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 256 << 10;  // red zones make frames larger
#else
constexpr size_t kStackBytes = 64 << 10;
#endif
constexpr int kSavedRegisters = 6;

void* scheduler_saved = nullptr;
#if defined(__SANITIZE_ADDRESS__)
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
#endif

}  // namespace

Fiber::Fiber() {
  void* const low = mmap(nullptr, kPage + kStackBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (low == MAP_FAILED || mprotect(low, kPage, PROT_NONE) != 0) throw std::bad_alloc();
  top_ = static_cast<char*>(low) + kPage + kStackBytes;
}

Fiber::~Fiber() { munmap(top_ - kStackBytes - kPage, kPage + kStackBytes); }

void Fiber::prepare(void (*entry)()) {
  // A stack as omniattn_switch_stack leaves it: registers, return address. The word above takes the
  // place of the return address of entry(), so that the stack is aligned as the ABI requires.
  void** const words = reinterpret_cast<void**>(top_);
  words[-1] = nullptr;
  words[-2] = reinterpret_cast<void*>(entry);
  saved_ = words - 2 - kSavedRegisters;
  fake_stack_ = nullptr;
}

void Fiber::resume() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, top_ - kStackBytes, kStackBytes);
#endif
  omniattn_switch_stack(&scheduler_saved, saved_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

void Fiber::entered() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

void Fiber::leave([[maybe_unused]] void** fake_stack) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
  omniattn_switch_stack(&saved_, scheduler_saved);
}

void Fiber::suspend() {
  leave(&fake_stack_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::finish() {
  leave(nullptr);  // null: ASan drops its record of the stack
  __builtin_unreachable();
}

bool Fiber::overflowed_at(const char* address) const {
  const char* const low = top_ - kStackBytes;
  return address >= low - kPage && address < low;
}

}  // namespace omniattn::emulator
