// The ways to run an op, best first; the first path that takes a problem runs it. `python -m
// omniattn info` lists the tables; with OMNIATTN_LOG_PATHS=1 each call reports the path it took,
// and OMNIATTN_OMIT_PATHS leaves paths out. A path whose name starts with "torch_" runs a kernel of
// torch, and is omitted until the package has found that kernel.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace omniattn::ops {

inline bool is_torch_path(std::string_view name) { return name.starts_with("torch_"); }

// A condition on problems, and why a path does not take a problem that breaks it.
template <class Problem>
struct Condition {
  const char* otherwise;
  bool (*holds)(const Problem& problem);
};
// Why a problem breaks one of the conditions; null if it does not.
template <class Problem, size_t kCount>
const char* broken(const Condition<Problem> (&conditions)[kCount], const Problem& problem) {
  for (const Condition<Problem>& each : conditions) {
    if (!each.holds(problem)) return each.otherwise;
  }
  return nullptr;
}
// Why a path of ours does not take a problem, which is not worth reporting.
inline const char* refused_unless(bool takes) { return takes ? nullptr : ""; }

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
  // Reports the path of a call, and why it took no earlier one, if reports are enabled.
  void report(const char* name, const std::string& refusals = {}) const {
    if (reports_) [[unlikely]] {
      print(name, refusals);
    }
  }
  static void set_reports(bool on) { reports_ = on; }
  static bool reports() { return reports_; }
  // Why all calls skip a path; null if they do not.
  const char* omitted(size_t path) const {
    return reasons_[path].empty() ? nullptr : reasons_[path].c_str();
  }
  // Omits a path for a reason, or restores it if the reason is empty. Not while ops run. False if
  // there is no such path, or if it is the last one, which takes what no other path takes.
  static bool omit(const std::string& op, const std::string& name, const std::string& reason);
  // One line "<op>: <name>, <name>" per table.
  static std::string all();
  // One line "<op>: <name>: <reason>" per omitted path.
  static std::string all_omitted();

 private:
  void print(const char* name, const std::string& refusals) const;
  static std::vector<PathNames*>& tables();

  inline static bool reports_ = false;
  const char* op_;
  std::vector<const char*> names_;
  std::vector<std::string> reasons_;  // of each path
};

// The last path of a table takes every problem. `takes` returns a bool, or why the path does not
// take a problem: null if it does, "" for a reason that is not worth reporting.
template <class Takes, class Run>
class PathTable {
 public:
  using Entry = Path<Takes, Run>;
  PathTable(const char* op, std::initializer_list<Entry> entries)
      : entries_(entries), names_(op, names(entries)) {}

  // The first path that takes a problem; `problem` are the arguments of `takes`.
  template <class... Args>
  const Entry& first(const Args&... problem) const {
    std::string refusals;
    auto entry = entries_.begin();
    while (const char* why = refusal(*entry, problem...)) {
      if (PathNames::reports() && *why != '\0' && names_.omitted(index_of(*entry)) == nullptr) {
        refusals += (refusals.empty() ? "" : "; ") + std::string(entry->name) + ": " + why;
      }
      ++entry;
    }
    names_.report(entry->name, refusals);
    return *entry;
  }

  // Why a path does not take a problem; null if it does.
  template <class... Args>
  const char* refusal(const Entry& entry, const Args&... problem) const {
    if (const char* why = names_.omitted(index_of(entry))) return why;
    const auto found = entry.takes(problem...);
    if constexpr (std::is_same_v<decltype(found), const bool>) {
      return found ? nullptr : "";
    } else {
      return found;
    }
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
  size_t index_of(const Entry& entry) const {
    return static_cast<size_t>(&entry - entries_.data());
  }

  std::vector<Entry> entries_;
  PathNames names_;
};

}  // namespace omniattn::ops
