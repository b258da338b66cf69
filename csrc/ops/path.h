// The ways to run an op, best first; the first path that takes a problem runs it. `python -m
// omniattn info` lists the tables; with OMNIATTN_LOG_PATHS=1 each call reports the path it took.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace omniattn::ops {

template <class Takes, class Run>
struct Path {
  const char* name;
  Takes* takes;
  Run* run;  // a function, or the kernels of the path
};

// Op and path names of a table, registered for the list of all tables.
class PathNames {
 public:
  PathNames(const char* op, std::vector<const char*> names);
  // Reports the path of a call, if reports are enabled.
  void report(const char* name) const {
    if (reports_) [[unlikely]] {
      print(name);
    }
  }
  static void set_reports(bool on) { reports_ = on; }
  // One line "<op>: <name>, <name>" per table.
  static std::string all();

 private:
  void print(const char* name) const;
  static std::vector<const PathNames*>& tables();

  inline static bool reports_ = false;
  const char* op_;
  std::vector<const char*> names_;
};

// The last path of a table takes every problem.
template <class Takes, class Run>
class PathTable {
 public:
  using Entry = Path<Takes, Run>;
  PathTable(const char* op, std::initializer_list<Entry> entries)
      : entries_(entries), names_(op, names(entries)) {}

  // The first path that takes a problem; `problem` are the arguments of `takes`.
  template <class... Args>
  const Entry& first(const Args&... problem) const {
    auto entry = entries_.begin();
    while (!entry->takes(problem...)) ++entry;
    names_.report(entry->name);
    return *entry;
  }

  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }
  void report(const Entry& entry) const { names_.report(entry.name); }

 private:
  static std::vector<const char*> names(std::initializer_list<Entry> entries) {
    std::vector<const char*> found;
    for (const Entry& entry : entries) found.push_back(entry.name);
    return found;
  }

  std::vector<Entry> entries_;
  PathNames names_;
};

}  // namespace omniattn::ops
