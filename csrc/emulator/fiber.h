// A stack per CUDA thread and the switch between stacks.
//
// A switch is a jump inside the function that switches, without a call or a return: the processor
// predicts returns by the calls before them, and all lanes of a warp come from the same calls.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#error "the emulator needs a stack switch for this processor"
#endif

namespace omniattn::emulator {

// State in which a stack continues. The compiler saves all other registers.
struct Context {
  void* stack = nullptr;
  void* code = nullptr;
  void* frame = nullptr;
};

[[gnu::always_inline]] inline void switch_stack(Context* from, const Context* to) {
  asm volatile(
      "leaq 0f(%%rip), %%rax\n\t"
      "movq %%rsp, (%0)\n\t"
      "movq %%rax, 8(%0)\n\t"
      "movq %%rbp, 16(%0)\n\t"
      "movq (%1), %%rsp\n\t"
      "movq 16(%1), %%rbp\n\t"
      "jmp *8(%1)\n"
      "0:"
      : "+D"(from), "+S"(to)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0",
        "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
        "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory");
}

// The stack that resume() was called on.
struct Resumer {
  Context context;
  void* fake_stack = nullptr;  // ASan's record
  const void* bottom = nullptr;
  size_t bytes = 0;
};
inline Resumer resumer;

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next resume() calls entry() on an empty stack; the old contents are lost.
  void prepare(void (*entry)());
  // Called by the scheduler: runs the fiber until it suspends or finishes.
  [[gnu::always_inline]] void resume() {
#if defined(__SANITIZE_ADDRESS__)
    const char* const bottom = low_ + kPage;
    __sanitizer_start_switch_fiber(&resumer.fake_stack, bottom, static_cast<size_t>(top_ - bottom));
#endif
    switch_stack(&resumer.context, &context_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(resumer.fake_stack, nullptr, nullptr);
#endif
  }
  // Called on the fiber: switches back to the caller of resume().
  [[gnu::always_inline]] void suspend() {
    leave(&fake_stack_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }
  // Called on the fiber: the last switch away from it.
  [[noreturn]] void finish();
  // Must be the first call of entry().
  void entered();

  // One past the highest byte of the stack.
  char* top() const { return top_; }
  // True if an address is in the unreadable page below the stack.
  bool overflowed_at(const char* address) const {
    return address >= low_ && address < low_ + kPage;
  }

 private:
  static constexpr size_t kPage = 4096;

  [[gnu::always_inline]] void leave([[maybe_unused]] void** fake_stack) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(fake_stack, resumer.bottom, resumer.bytes);
#endif
    switch_stack(&context_, &resumer.context);
  }

  char* low_;  // start of the mapping: the unreadable page
  char* top_;
  Context context_;             // while suspended
  void* fake_stack_ = nullptr;  // ASan's record of this stack
};

}  // namespace omniattn::emulator
