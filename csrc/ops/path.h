// The ways to run an op, best first: the first that takes a problem runs it. The tables are listed
// by `python -m omniattn info`; with OMNIATTN_LOG_PATHS=1 each call says which path it took.
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

// A table's op and names, which lists of all tables find.
class PathNames {
 public:
  PathNames(const char* op, std::vector<const char*> names);
  // Reports the path of a call, where that is asked for.
  void report(const char* name) const {
    if (reports_) [[unlikely]] {
      print(name);
    }
  }
  static void set_reports(bool on) { reports_ = on; }
  // "<op>: <name>, <name>" a line.
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

  // Of one problem: what `takes` and `run` are called with.
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
