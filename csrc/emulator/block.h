// Runs CUDA kernels on the CPU: one fiber per thread, one block at a time, one launch at a time.
//
// Threads of a warp that meet in a warp operation (a collective) leave their operands there; the
// last thread computes the results of all. Every synchronising operation knows its
// source position, so that divergence and deadlocks are reported with it. docs/cuda.md lists what
// the emulator cannot find.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "emulator/fiber.h"
#include "emulator/memory.h"
#include "emulator/report.h"
#include "emulator/vector_types.h"

namespace omniattn::emulator {

inline constexpr int kWarpSize = 32;
inline constexpr int kMaxThreads = 1024;
inline constexpr int kBarriers = 16;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// The order in which warps, and lanes of a warp, run. Random orders change at each barrier.
enum class Order : int { forward, reverse, random };

struct Schedule {
  Order order = Order::forward;
  uint64_t seed = 1;
};
inline Schedule schedule;

// Bytes of shared memory that a block can have: 163 KiB on sm_80, 99 KiB on sm_86 and sm_89.
inline size_t shared_memory_limit = 163 << 10;

// One cp.async of 16 bytes.
struct AsyncCopy {
  void* shared;
  const void* global;
  bool valid;  // false: the target is filled with zeros
  Location where;
};

enum class State : uint8_t { ready, at_barrier, in_collective, finished };

struct Thread {
  Fiber fiber;
  uint3 index;
  int id, warp, lane;
  State state;
  // Where the thread synchronised last, or where it waits now.
  Location where;
  const char* operation;
  uint32_t mask;
  int barrier;
  void* slot;  // operands of the collective in which it waits
  std::vector<AsyncCopy> open_copies;
  std::vector<std::vector<AsyncCopy>> copy_groups;  // committed, oldest first
};

struct Warp {
  std::array<Thread*, kWarpSize> lanes;
  uint32_t arrived;  // lanes that wait in a collective
};

struct Barrier {
  int count, arrived;
  std::vector<Thread*> arrivals, waiting;
};

// The callbacks of the race build (race.cpp).
class Observer {
 public:
  virtual void block_begins() = 0;
  virtual void arrives(const Thread& thread, int barrier) = 0;
  virtual void released(int barrier, const std::vector<Thread*>& waiting) = 0;
  virtual void warp_synchronised(int warp, uint32_t mask) = 0;
  virtual void accesses(const void* address, size_t bytes, bool write, const void* pc) = 0;
  virtual void copy_pending(const void* address, size_t bytes, bool pending) = 0;

 protected:
  ~Observer() = default;
};
inline Observer* observer = nullptr;

struct Block {
  dim3 grid, size;
  uint3 index;
  Thread* current = nullptr;  // null while the scheduler runs
  SharedMemory shared;
  const SharedArray* dynamic = nullptr;
};
inline Block running_block;
inline Block& block() { return running_block; }  // threadIdx reads it: kernels call it all the time

// Runs body() once per thread of the grid; throws Error if a rule is broken.
void launch(dim3 grid, dim3 size, size_t dynamic_bytes, const std::function<void()>& body);

// Ends the launch with this message and the position of the calling thread.
[[noreturn]] void fail(const std::string& message);

// Waits (or only arrives) at a barrier until `count` threads have arrived.
void barrier(int id, int count, bool wait, const char* operation, const Location& where);

// All lanes of `mask` leave a pointer to their operands; the last one calls
// compute(slots), where slots[lane] is null for lanes outside the mask.
using Slots = std::array<void*, kWarpSize>;
void collective(uint32_t mask, const char* operation, void* slot, void (*compute)(const Slots&),
                const Location& where);

// Fails unless the 16 bytes are in shared memory and aligned.
void require_shared_16(const void* address, const char* operation, const Location& where);
// Fails unless the 16 bytes are in global memory and aligned.
void require_global_16(const void* address, const char* operation, const Location& where);

// cp.async: the target is poisoned from the issue of the copy until the wait for its group.
void copy_async(void* shared, const void* global, bool valid, const Location& where);
void commit_copies();
// Waits until at most `pending` groups of this thread are unfinished.
void wait_copies(size_t pending);

inline void touch(const void* address, size_t bytes, bool write) {
  if (observer != nullptr) observer->accesses(address, bytes, write, __builtin_return_address(0));
}

}  // namespace omniattn::emulator
