// Registration of ops with torch's dispatcher, schema and implementation in one place.
//
// A differentiable op is registered under two names. `<op>` gets a fake kernel and an autograd
// formula in Python and appears in compiled graphs. `<op>_raw` gets a fake kernel only and is
// called by the eager paths (the autograd key of a Python formula costs 2.5 us even without
// gradients). It takes numbers where graphs have symbols: a list of four as SymInt[] costs 0.8 us
// more than as int[]. `<op>_only`, if an op has one, serves eager calls without gradients: it omits
// the last result, which only the backward needs. See python/omniattn/ops/_autograd.py.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>

#include "ops/tensor.h"

namespace omniattn::ops {

// Schema of `<op>_raw` or of `<op>_only`.
inline std::string eager_schema(std::string schema, const char* suffix) {
  schema.insert(schema.find('('), suffix);
  const std::string symbols = "SymInt[]";
  const size_t at = schema.find(symbols);
  if (at != std::string::npos) schema.replace(at, symbols.size(), "int[]");
  return schema;
}
inline std::string without_last_result(std::string schema) {
  return schema.erase(schema.rfind(',')) + ')';
}

enum class Gradient { none, differentiable };
using Gradient::differentiable;

// Registers the ops of a file, which defines one Registry at namespace scope:
//
//   const Registry registry([](Registry& ops) { ops.add<top_k>("top_k(Tensor scores) -> Tensor");
//   });
class Registry {
 public:
  explicit Registry(void (*fill)(Registry&), const char* file = __builtin_FILE(),
                    uint32_t line = __builtin_LINE())
#if defined(OMNIATTN_CUDA)
      : implementations_(Kind::IMPL, "omniattn", "CUDA", file, line) {
#else
      : schemas_(Kind::FRAGMENT, "omniattn", nullptr, file, line),
        implementations_(Kind::IMPL, "omniattn", "CPU", file, line) {
#endif
    fill(*this);
  }

  // kFunction implements an op "name(arguments) -> results" on this
  // device; kOnly implements `<op>_only`.
  template <auto kFunction, auto kOnly = nullptr>
  void add(const std::string& schema, Gradient gradient = Gradient::none) {
    define(schema, gradient);
    implement<kFunction>(schema.substr(0, schema.find('(')), gradient);
    if constexpr (!std::is_null_pointer_v<decltype(kOnly)>)
      add<kOnly>(without_last_result(eager_schema(schema, "_only")));
  }

  // Adds the schema alone, for ops that other files or Python implement. The CUDA library adds
  // none: it is loaded after the CPU library, which has them all.
  void define([[maybe_unused]] std::string schema,
              [[maybe_unused]] Gradient gradient = Gradient::none) {
#if !defined(OMNIATTN_CUDA)
    schemas_.def(schema.c_str());
    if (gradient == Gradient::none) return;
    schemas_.def(eager_schema(std::move(schema), "_raw").c_str());
#endif
  }

  template <auto kFunction>
  void implement(const std::string& name, Gradient gradient = Gradient::none) {
    constexpr auto boxed = torch::stable::detail::boxer<std::remove_pointer_t<decltype(kFunction)>,
                                                        kFunction>::boxed_fn;
    implementations_.impl(name.c_str(), boxed);
    if (gradient != Gradient::none) implementations_.impl((name + "_raw").c_str(), boxed);
  }

 private:
  using Library = torch::stable::detail::StableLibrary;
  using Kind = Library::Kind;

#if !defined(OMNIATTN_CUDA)
  Library schemas_;
#endif
  Library implementations_;
};

}  // namespace omniattn::ops
