// Copies in flight from global to shared memory (cp.async).
#include <algorithm>
#include <cstring>

#include "emulator/block.h"

namespace omniattn::emulator {

void require_shared_16(const void* address, const char* operation, const Location& where) {
  if (block().shared.find(address, 16) == nullptr) {
    fail(text(operation, " at ", position(where), ": the address is outside shared memory"));
  }
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) {
    fail(text(operation, " at ", position(where), ": the shared address must be 16-byte aligned"));
  }
}

void require_global_16(const void* address, const char* operation, const Location& where) {
  if (block().shared.find(address, 1) != nullptr) {
    fail(text(operation, " at ", position(where), ": the address is in shared memory"));
  }
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) {
    fail(text(operation, " at ", position(where), ": the global address must be 16-byte aligned"));
  }
}

void copy_async(void* shared, const void* global, bool valid, const Location& where) {
  require_shared_16(shared, "cp.async", where);
  require_global_16(global, "cp.async", where);
  Thread& t = *block().current;
  const auto overlaps = [&](const std::vector<AsyncCopy>& copies) {
    return std::any_of(copies.begin(), copies.end(),
                       [&](const AsyncCopy& copy) { return copy.shared == shared; });
  };
  if (overlaps(t.open_copies) ||
      std::any_of(t.copy_groups.begin(), t.copy_groups.end(), overlaps)) {
    fail(text("cp.async at ", position(where), ": an earlier copy to the address is pending"));
  }
  touch(shared, 16, true);
  if (observer != nullptr) observer->copy_pending(shared, 16, true);
  std::memset(shared, kPoison, 16);
  t.open_copies.push_back({shared, global, valid, where});
}

void commit_copies() {
  Thread& t = *block().current;
  t.copy_groups.push_back(std::move(t.open_copies));
  t.open_copies.clear();
}

void wait_copies(size_t pending) {
  auto& groups = block().current->copy_groups;
  while (groups.size() > pending) {
    for (const AsyncCopy& copy : groups.front()) {
      if (copy.valid) {
        std::memcpy(copy.shared, copy.global, 16);
      } else {
        std::memset(copy.shared, 0, 16);
      }
      if (observer != nullptr) observer->copy_pending(copy.shared, 16, false);
      touch(copy.shared, 16, true);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace omniattn::emulator
