#include "emulator/memory.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace omniattn::emulator {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGuard = 256 << 10;  // between arrays: wider than any one of them

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

SharedMemory::SharedMemory() {
  void* const range =
      mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) throw std::bad_alloc();
  begin_ = static_cast<char*>(range);
  next_ = begin_ + kGuard;
}

SharedMemory::~SharedMemory() { munmap(begin_, kReserved); }

void SharedMemory::clear() {
  for (const SharedArray& a : arrays_) {
    const size_t pages = round_up(a.bytes, kPage);
    char* const end = a.data + round_up(a.bytes, kAlignment);
    mprotect(end - pages, pages, PROT_NONE);
  }
  arrays_.clear();
  next_ = begin_ + kGuard;
}

const SharedArray& SharedMemory::array(const void* key, const char* name, size_t bytes) {
  for (const SharedArray& a : arrays_) {
    if (a.key == key) return a;
  }
  const size_t pages = round_up(bytes, kPage);
  char* const end = next_ + pages;
  if (end + kGuard > begin_ + kReserved) throw Error("emulator: too many shared arrays");
  if (mprotect(next_, pages, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  std::memset(next_, kPoison, pages);
  next_ = end + kGuard;
  arrays_.push_back({key, name, end - round_up(bytes, kAlignment), bytes});
  return arrays_.back();
}

void SharedMemory::poison() {
  for (const SharedArray& a : arrays_) std::memset(a.data, kPoison, round_up(a.bytes, kAlignment));
}

const SharedArray* SharedMemory::overrun() const {
  for (const SharedArray& a : arrays_) {
    for (size_t i = a.bytes; i < round_up(a.bytes, kAlignment); ++i) {
      if (static_cast<unsigned char>(a.data[i]) != kPoison) return &a;
    }
  }
  return nullptr;
}

const SharedArray* SharedMemory::find(const void* address, size_t bytes) const {
  const char* const p = static_cast<const char*>(address);
  for (const SharedArray& a : arrays_) {
    if (p >= a.data && p + bytes <= a.data + a.bytes) return &a;
  }
  return nullptr;
}

}  // namespace omniattn::emulator
