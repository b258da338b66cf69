#include "emulator/block.h"

#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>

namespace omniattn::emulator {
namespace {

struct Scheduler {
  std::vector<std::unique_ptr<Thread>> threads;  // grows to the largest block seen
  std::vector<Warp> warps;
  std::array<Barrier, kBarriers> barriers;
  int size = 0, finished = 0;
  bool barrier_opened = false;
  std::string error;
  const std::function<void()>* body = nullptr;
  uint64_t random = 1;

  // The last memory fault.
  const char* fault_address = nullptr;
  const void* fault_pc = nullptr;
};
Scheduler scheduler;

std::string name_of(const Thread& t) {
  const uint3 b = block().index;
  return text("thread ", t.id, " (warp ", t.warp, ", lane ", t.lane, ") of block (", b.x, ", ", b.y,
              ", ", b.z, ')');
}

uint64_t next_random() {  // xorshift64
  uint64_t& x = scheduler.random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x;
}

template <class Container>
void arrange(Container& turns) {
  std::iota(turns.begin(), turns.end(), 0);
  if (schedule.order == Order::reverse) std::reverse(turns.begin(), turns.end());
  if (schedule.order == Order::random) {
    for (size_t i = turns.size(); i > 1; --i) std::swap(turns[i - 1], turns[next_random() % i]);
  }
}

void run_thread() {
  Thread& t = *block().current;
  t.fiber.entered();
  (*scheduler.body)();
  commit_copies();
  for (const auto& group : t.copy_groups) {
    if (group.empty()) continue;
    fail(text("cp.async at ", position(group[0].where), " is pending when the kernel ends"));
  }
  t.state = State::finished;
  ++scheduler.finished;
  t.fiber.finish();
}

std::string deadlock() {
  std::map<std::string, std::vector<int>> groups;
  for (int i = 0; i < scheduler.size; ++i) {
    const Thread& t = *scheduler.threads[static_cast<size_t>(i)];
    std::string what = "have finished";
    if (t.state == State::at_barrier) {
      const Barrier& b = scheduler.barriers[static_cast<size_t>(t.barrier)];
      what = text("wait in ", t.operation, " at ", position(t.where), " (barrier ", t.barrier, ", ",
                  b.arrived, " of ", b.count, " arrived)");
    } else if (t.state == State::in_collective) {
      what = text("wait in ", t.operation, " at ", position(t.where), " (mask ", std::hex, t.mask,
                  ')');
    }
    groups[what].push_back(t.id);
  }
  const uint3 b = block().index;
  std::string message = text("deadlock in block (", b.x, ", ", b.y, ", ", b.z, "):");
  for (const auto& [what, ids] : groups) {
    message += text("\n  ", ids.size(), " threads (first ", ids.front(), ") ", what);
  }
  return message;
}

// A memory fault in a kernel continues here, on the emptied stack of the thread that caused it.
[[noreturn]] void report_fault() {
  const char* const address = scheduler.fault_address;
  const Thread& t = *block().current;
  std::string what = text("access to invalid address ", static_cast<const void*>(address));
  if (block().shared.reserved(address)) {
    what = "access to shared memory out of bounds";
    for (const SharedArray& a : block().shared.arrays()) {
      const auto offset = address - a.data;
      if (std::abs(offset) < (128 << 10)) {
        what += text(": byte ", offset, " of ", a.name, ", which has ", a.bytes);
      }
    }
  } else if (t.fiber.overflowed_at(address)) {
    what = "stack overflow";
  }
  fail(text(what, ", at ", position(scheduler.fault_pc)));
}

struct sigaction previous_action;

void on_fault(int signal, siginfo_t* info, void* context) {
  if (block().current == nullptr) {  // not from a kernel: let it occur again under the old action
    sigaction(signal, &previous_action, nullptr);
    return;
  }
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  scheduler.fault_address = static_cast<const char*>(info->si_addr);
  scheduler.fault_pc = reinterpret_cast<const void*>(registers[REG_RIP]);
  registers[REG_RIP] = reinterpret_cast<greg_t>(&report_fault);
  registers[REG_RSP] = reinterpret_cast<greg_t>(block().current->fiber.top() - 8);
}

// Handles memory faults while an object of this type lives.
class FaultHandler {
 public:
  FaultHandler() {
    stack_t stack{};
    stack.ss_sp = stack_;
    stack.ss_size = sizeof stack_;
    sigaltstack(&stack, &previous_stack_);
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &previous_action);
  }
  ~FaultHandler() {
    sigaction(SIGSEGV, &previous_action, nullptr);
    sigaltstack(&previous_stack_, nullptr);
  }
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;

 private:
  static inline char stack_[64 << 10];
  stack_t previous_stack_;
};

void prepare_block() {
  Block& b = block();
  scheduler.finished = 0;
  for (Barrier& barrier : scheduler.barriers) barrier = Barrier{};
  for (Warp& warp : scheduler.warps) warp.arrived = 0;
  b.shared.poison();
  if (observer != nullptr) observer->block_begins();
  for (int i = 0; i < scheduler.size; ++i) {
    Thread& t = *scheduler.threads[static_cast<size_t>(i)];
    const auto n = static_cast<unsigned>(i);
    t.index = {n % b.size.x, n / b.size.x % b.size.y, n / (b.size.x * b.size.y)};
    t.id = i;
    t.warp = i / kWarpSize;
    t.lane = i % kWarpSize;
    t.state = State::ready;
    t.where = Location();
    t.operation = "start";
    t.open_copies.clear();
    t.copy_groups.clear();
    t.fiber.prepare(run_thread);
    scheduler.warps[static_cast<size_t>(t.warp)].lanes[static_cast<size_t>(t.lane)] = &t;
  }
}

// Lets a warp run until all its lanes wait; true if any lane ran.
bool run_warp(Warp& warp, const std::array<int, kWarpSize>& turns) {
  bool progress = false;
  for (bool again = true; again && scheduler.error.empty();) {
    again = false;
    for (const int lane : turns) {
      Thread* const t = warp.lanes[static_cast<size_t>(lane)];
      if (t->state != State::ready) continue;
      again = progress = true;
      block().current = t;
      t->fiber.resume();
      block().current = nullptr;
      if (!scheduler.error.empty()) return true;
    }
  }
  return progress;
}

// Describes operations that are unfinished although all threads of a block have ended; "" if none.
std::string leftovers() {
  for (const Barrier& b : scheduler.barriers) {
    if (b.arrived == 0) continue;
    const Thread& first = *b.arrivals.front();
    return text(first.operation, " at ", position(first.where), ": barrier ", first.barrier,
                " is incomplete when the block ends, ", b.arrived, " of ", b.count, " arrived");
  }
  if (const SharedArray* const a = block().shared.overrun()) {
    return text("write past the end of ", a->name, ", which has ", a->bytes, " bytes");
  }
  return "";
}

void run_block() {
  prepare_block();
  std::vector<int> warp_turns(scheduler.warps.size());
  std::array<int, kWarpSize> lane_turns;
  while (scheduler.finished < scheduler.size && scheduler.error.empty()) {
    arrange(warp_turns);
    arrange(lane_turns);
    scheduler.barrier_opened = false;
    bool progress = false;
    for (const int warp : warp_turns) {
      progress |= run_warp(scheduler.warps[static_cast<size_t>(warp)], lane_turns);
      if (scheduler.barrier_opened || !scheduler.error.empty()) break;
    }
    if (!progress) scheduler.error = deadlock();
  }
  if (scheduler.error.empty()) scheduler.error = leftovers();
  if (!scheduler.error.empty()) throw Error("emulator: " + scheduler.error);
}

}  // namespace

void fail(const std::string& message) {
  Thread& t = *block().current;
  scheduler.error = text(message, ", by ", name_of(t));
  t.state = State::finished;
  t.fiber.finish();
}

void launch(dim3 grid, dim3 size, size_t dynamic_bytes, const std::function<void()>& body) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const size_t threads = size_t{size.x} * size.y * size.z;
  const size_t blocks = size_t{grid.x} * grid.y * grid.z;
  if (threads == 0 || threads > kMaxThreads || threads % kWarpSize != 0) {
    throw Error(text("emulator: a block must have full warps and at most ", kMaxThreads,
                     " threads, got ", threads));
  }
  if (blocks == 0 || grid.x > 0x7fffffffu || grid.y > 0xffffu || grid.z > 0xffffu) {
    throw Error(text("emulator: invalid grid ", grid.x, " x ", grid.y, " x ", grid.z));
  }
  if (dynamic_bytes > shared_memory_limit) {
    throw Error(text("emulator: at most ", shared_memory_limit, " bytes of shared memory, got ",
                     dynamic_bytes));
  }
  const FaultHandler handler;
  Block& b = block();
  b.grid = grid;
  b.size = size;
  b.shared.clear();
  b.dynamic = dynamic_bytes > 0 ? &b.shared.array(nullptr, "dynamic shared memory", dynamic_bytes)
                                : nullptr;
  scheduler.size = static_cast<int>(threads);
  scheduler.warps.resize(threads / kWarpSize);
  scheduler.error.clear();
  scheduler.body = &body;
  scheduler.random = schedule.seed * 0x9e3779b97f4a7c15u | 1;
  while (scheduler.threads.size() < threads) {
    scheduler.threads.push_back(std::make_unique<Thread>());
  }
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        b.index = {x, y, z};
        run_block();
      }
    }
  }
}

void barrier(int id, int count, bool wait, const char* operation, const Location& where) {
  Thread& t = *block().current;
  if (id < 0 || id >= kBarriers || count <= 0 || count % kWarpSize != 0) {
    fail(text(operation, " at ", position(where), ": barrier ", id, " with count ", count,
              " does not exist"));
  }
  Barrier& b = scheduler.barriers[static_cast<size_t>(id)];
  t.where = where;
  t.operation = operation;
  t.barrier = id;
  if (!b.arrivals.empty()) {
    const Thread& first = *b.arrivals.front();
    const bool same_place =
        first.where.line() == where.line() && first.where.column() == where.column();
    if (b.count != count || (id == 0 && !same_place)) {
      fail(text("barrier divergence: ", operation, " at ", position(where), " (count ", count,
                ") meets ", first.operation, " at ", position(first.where), " (count ", b.count,
                ") of ", name_of(first)));
    }
  }
  b.count = count;
  ++b.arrived;
  b.arrivals.push_back(&t);
  if (observer != nullptr) observer->arrives(t, id);
  if (wait) {
    t.state = State::at_barrier;
    b.waiting.push_back(&t);
  }
  if (b.arrived == count) {
    if (observer != nullptr) observer->released(id, b.waiting);
    for (Thread* const waiting : b.waiting) waiting->state = State::ready;
    b = Barrier{};
    scheduler.barrier_opened = true;
  }
  if (wait) t.fiber.suspend();  // the last thread too, so that the next order is free
}

void collective(uint32_t mask, const char* operation, void* slot, void (*compute)(const Slots&),
                const Location& where) {
  Thread& t = *block().current;
  Warp& warp = scheduler.warps[static_cast<size_t>(t.warp)];
  t.where = where;
  t.operation = operation;
  t.mask = mask;
  t.slot = slot;
  const uint32_t bit = 1u << t.lane;
  if ((mask & bit) == 0) {
    fail(text(operation, " at ", position(where), ": the mask lacks the calling lane"));
  }
  warp.arrived |= bit;
  if ((warp.arrived & mask) != mask) {
    t.state = State::in_collective;
    t.fiber.suspend();
    return;
  }
  Slots slots;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    slots[static_cast<size_t>(lane)] = nullptr;
    if ((mask >> lane & 1) == 0) continue;
    const Thread& other = *warp.lanes[static_cast<size_t>(lane)];
    const bool same_operation =
        other.operation == operation || std::strcmp(other.operation, operation) == 0;
    const bool same = other.mask == mask && same_operation && other.where.line() == where.line() &&
                      other.where.column() == where.column();
    if (!same) {
      fail(text("warp divergence: ", operation, " at ", position(where), " meets ", other.operation,
                " at ", position(other.where), " of lane ", lane));
    }
    slots[static_cast<size_t>(lane)] = other.slot;
  }
  compute(slots);
  warp.arrived &= ~mask;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (mask >> lane & 1) warp.lanes[static_cast<size_t>(lane)]->state = State::ready;
  }
}

}  // namespace omniattn::emulator
