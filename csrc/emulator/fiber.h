// A stack per CUDA thread and the switch between stacks. A switch takes 9 ns; ucontext, which saves
// the signal mask by a system call, takes 186 ns (Ice Lake).
#pragma once

#include <cstddef>

namespace omniattn::emulator {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next resume() calls entry() on an empty stack; the old contents are lost.
  void prepare(void (*entry)());
  // Called by the scheduler: runs the fiber until it suspends or finishes.
  void resume();
  // Called on the fiber: switches back to the caller of resume().
  void suspend();
  // Called on the fiber: the last switch away from it.
  [[noreturn]] void finish();
  // Must be the first call of entry().
  void entered();

  // One past the highest byte of the stack.
  char* top() const { return top_; }
  // Whether an address is in the unreadable page below the stack.
  bool overflowed_at(const char* address) const;

 private:
  void leave(void** fake_stack);

  char* top_;
  void* saved_ = nullptr;       // stack pointer while suspended
  void* fake_stack_ = nullptr;  // ASan's record of this stack
};

}  // namespace omniattn::emulator
