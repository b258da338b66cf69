// Finds races on shared memory, reads of uninitialised shared memory and reads of a cp.async target
// before its wait, in any schedule.
//
// Kernels compiled with -fsanitize=thread report every load and store to __tsan_* functions. These
// are defined here, not by libtsan (which does not know fibers or CUDA barriers), so this file is
// compiled without that flag. Every byte remembers its last write and its latest readers. Barriers
// carry vector clocks of warps, so that full and named barriers are distinguished. Lanes of one
// warp are ordered by __syncwarp and by barriers, never by shuffles.
#include <sys/mman.h>

#include <array>
#include <bit>
#include <new>

#include "emulator/block.h"

namespace omniattn::emulator {
namespace {

constexpr int kMaxWarps = kMaxThreads / kWarpSize;
using Clock = std::array<uint32_t, kMaxWarps>;  // per warp: the last epoch known to have ended

// Time and place of a thread's access to a byte. An epoch ends when the thread arrives at a
// barrier, a phase when the warp synchronises.
struct Access {
  int16_t warp = -1, lane = -1;
  bool several = false;  // other lanes of the warp did the same in the same phase
  uint32_t epoch = 0, phase = 0;
  const void* pc = nullptr;
};

struct Byte {
  uint64_t block;    // serial number of the block that the other fields belong to
  bool pending;      // target of a cp.async that has not been waited for
  uint32_t readers;  // bit w: warp w has read since the last write, see reads[w]
  Access write;
  std::array<Access, kMaxWarps> reads;
};

struct ThreadClock {
  uint32_t epoch, phase;
  Clock seen;
};

class RaceChecker final : public Observer {
 public:
  RaceChecker() {
    void* const shadow =
        mmap(nullptr, SharedMemory::kReserved * sizeof(Byte), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (shadow == MAP_FAILED) throw std::bad_alloc();
    bytes_ = static_cast<Byte*>(shadow);
    observer = this;
  }

  void block_begins() override {
    ++serial_;
    for (ThreadClock& t : threads_) t = ThreadClock{1, 1, {}};
    barriers_ = {};
    phases_.fill(1);
  }

  void arrives(const Thread& thread, int barrier) override {
    ThreadClock& t = threads_[static_cast<size_t>(thread.id)];
    Clock& clock = barriers_[static_cast<size_t>(barrier)];
    t.seen[static_cast<size_t>(thread.warp)] = t.epoch++;
    join(clock, t.seen);
  }

  void released(int barrier, const std::vector<Thread*>& waiting) override {
    Clock& clock = barriers_[static_cast<size_t>(barrier)];
    for (const Thread* const thread : waiting) {
      ThreadClock& t = threads_[static_cast<size_t>(thread->id)];
      join(t.seen, clock);
      t.phase = phases_[static_cast<size_t>(thread->warp)] + 1;
    }
    for (const Thread* const thread : waiting) {
      phases_[static_cast<size_t>(thread->warp)] = threads_[static_cast<size_t>(thread->id)].phase;
    }
    clock = {};
  }

  void warp_synchronised(int warp, uint32_t mask) override {
    const uint32_t phase = ++phases_[static_cast<size_t>(warp)];
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (mask >> lane & 1) threads_[static_cast<size_t>(warp * kWarpSize + lane)].phase = phase;
    }
  }

  void accesses(const void* address, size_t size, bool write, const void* pc) override {
    const Thread* const thread = block().current;
    if (!block().shared.reserved(address) || thread == nullptr) return;
    // Outside every array the access itself faults, with a better message.
    if (block().shared.find(address, size) == nullptr) return;
    for (size_t i = 0; i < size; ++i) check(byte(address, i), *thread, write, pc);
  }

  void copy_pending(const void* address, size_t size, bool pending) override {
    for (size_t i = 0; i < size; ++i) byte(address, i).pending = pending;
  }

  const char* shared_begin = block().shared.begin();

 private:
  static void join(Clock& into, const Clock& from) {
    for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
  }

  Byte& byte(const void* address, size_t i) {
    Byte& b = bytes_[static_cast<const char*>(address) - shared_begin + static_cast<ptrdiff_t>(i)];
    if (b.block != serial_) {
      b.block = serial_;
      b.pending = false;
      b.readers = 0;
      b.write = {};
    }
    return b;
  }

  // True if `earlier` is ordered before any access that this thread makes now.
  bool ordered(const Access& earlier, const Thread& thread) const {
    const ThreadClock& t = threads_[static_cast<size_t>(thread.id)];
    if (earlier.warp < 0) return true;
    if (earlier.warp == thread.warp) {
      return earlier.phase < t.phase || (earlier.lane == thread.lane && !earlier.several);
    }
    return t.seen[static_cast<size_t>(earlier.warp)] >= earlier.epoch;
  }

  void check(Byte& b, const Thread& thread, bool write, const void* pc) {
    const char* const kind = write ? "write" : "read";
    if (b.pending) {
      fail(text("race: ", kind, " of a cp.async target before its wait at ", code(pc)));
    }
    if (!ordered(b.write, thread)) report(b.write, "write", kind, pc);
    if (!write && b.write.warp < 0) {
      fail(text("read of uninitialised shared memory at ", code(pc)));
    }
    const ThreadClock& t = threads_[static_cast<size_t>(thread.id)];
    const Access now{static_cast<int16_t>(thread.warp),
                     static_cast<int16_t>(thread.lane),
                     false,
                     t.epoch,
                     t.phase,
                     pc};
    if (write) {
      for (uint32_t left = b.readers; left != 0; left &= left - 1) {
        const Access& read = b.reads[static_cast<size_t>(std::countr_zero(left))];
        if (!ordered(read, thread)) report(read, "read", kind, pc);
      }
      // Later writes come after this write, and so after the reads before it.
      b.readers = 0;
      b.write = now;
    } else {
      remember(b, now);
    }
  }

  static void remember(Byte& b, const Access& now) {
    Access& read = b.reads[static_cast<size_t>(now.warp)];
    const uint32_t bit = uint32_t{1} << now.warp;
    const bool joined = (b.readers & bit) != 0 && read.phase == now.phase &&
                        (read.several || read.lane != now.lane);
    read = now;
    read.several = joined;
    b.readers |= bit;
  }

  static std::string code(const void* pc) {
    return position(static_cast<const char*>(pc) - 1);  // a return address: the call is before it
  }

  [[noreturn]] static void report(const Access& earlier, const char* earlier_kind, const char* kind,
                                  const void* pc) {
    fail(text("race on shared memory: ", kind, " at ", code(pc), " and ", earlier_kind, " at ",
              code(earlier.pc), " by warp ", earlier.warp, " lane ", earlier.lane,
              " without a barrier between"));
  }

  Byte* bytes_;
  uint64_t serial_ = 0;
  std::array<ThreadClock, kMaxThreads> threads_;
  std::array<Clock, kBarriers> barriers_;
  std::array<uint32_t, kMaxWarps> phases_;
};

RaceChecker checker;

inline void accessed(const void* address, size_t size, bool write, const void* pc) {
  // The test that rejects most accesses comes first.
  if (static_cast<size_t>(static_cast<const char*>(address) - checker.shared_begin) <
      SharedMemory::kReserved) {
    checker.accesses(address, size, write, pc);
  }
}

}  // namespace
}  // namespace omniattn::emulator

#define OMNIATTN_PC __builtin_return_address(0)
#define OMNIATTN_ACCESS(prefix, n)                          \
  void __tsan_##prefix##read##n(void* p) {                  \
    omniattn::emulator::accessed(p, n, false, OMNIATTN_PC); \
  }                                                         \
  void __tsan_##prefix##write##n(void* p) { omniattn::emulator::accessed(p, n, true, OMNIATTN_PC); }
#define OMNIATTN_ACCESSES(n)     \
  OMNIATTN_ACCESS(, n)           \
  OMNIATTN_ACCESS(unaligned_, n) \
  OMNIATTN_ACCESS(volatile_, n)  \
  OMNIATTN_ACCESS(unaligned_volatile_, n)

extern "C" {
OMNIATTN_ACCESSES(1)
OMNIATTN_ACCESSES(2)
OMNIATTN_ACCESSES(4)
OMNIATTN_ACCESSES(8)
OMNIATTN_ACCESSES(16)
void __tsan_read_range(void* p, size_t n) {
  omniattn::emulator::accessed(p, n, false, OMNIATTN_PC);
}
void __tsan_write_range(void* p, size_t n) {
  omniattn::emulator::accessed(p, n, true, OMNIATTN_PC);
}
// Guards of function-local statics; one OS thread runs all kernels.
uint8_t __tsan_atomic8_load(const volatile uint8_t* p, int) { return *p; }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
