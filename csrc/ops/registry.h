// Registration of ops with torch's dispatcher: schemas follow from the functions that implement
// them.
//
// A differentiable op is registered under two names. `<op>` gets a fake kernel and an autograd
// formula in Python and appears in compiled graphs. `<op>_raw` gets a fake kernel only and is
// called by the eager paths (the autograd key of a Python formula costs 2.5 us even without
// gradients). It takes numbers where graphs have symbols: a list of four as SymInt[] costs 0.8 us
// more than as int[]. `<op>_only`, if an op has one, serves eager calls without gradients: it omits
// the last result, which only the backward needs. See python/omniattn/ops/dispatch/autograd.py.
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <forward_list>
#include <string>
#include <string_view>
#include <vector>

#include "ops/fields.h"
#include "ops/tensor.h"

namespace omniattn::ops {

// A public function that calls an op, and the argument of the op that tells its calls from those of
// the functions before it: a flag, or a tensor that is not None. Null for the first function, and
// for functions that errors do not name.
struct PublicFunction {
  const char* name;
  const char* argument = nullptr;
};

// Names of an op in errors, by the arguments of the call.
class OpNames {
 public:
  OpNames(const std::string& name, std::string_view schema);

  const char* of(const StableIValue* arguments) const {
    const Choice* found = names_.data();
    for (const Choice& name : names_) {
      if (arguments[name.argument] != 0 && name.chosen) found = &name;
    }
    return found->name.c_str();
  }

 private:
  struct Choice {
    std::string name;
    size_t argument;  // index in the schema
    bool chosen;      // by that argument
  };
  std::vector<Choice> names_;
};

// "Tensor q, Tensor? mask, float scale" of the structs "Tensor q; OptTensor mask" and
// "double scale". The types of fields are those of tensor.h.
std::string schema_of_fields(const std::vector<std::string_view>& structs);

// Describes and boxes `Result function(const OpCall&, const Struct&...)`. The fields of the structs
// are the op's arguments, in order. Result is void, Tensor, Tensors or a struct of tensors.
template <class Function>
struct Signature;
template <class Result, class... Structs>
struct Signature<Result(const OpCall&, const Structs&...)> {
  static std::string schema(const std::string& name) {
    return name + '(' + schema_of_fields({Structs::kFields...}) + ") -> " + results();
  }

  static Result call(Result (*function)(const OpCall&, const Structs&...), const OpCall& call,
                     const StableIValue* stack) {
    return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      return function(call, unbox<Structs>(stack + kBegin[kIndex], FieldTypes<Structs>{})...);
    }(std::index_sequence_for<Structs...>{});
  }

  static bool returns_all(uint64_t results) {
    if constexpr (kIsStruct) return results == FieldTypes<Result>::kCount;
    return true;
  }

 private:
  static constexpr bool kIsStruct = requires { Result::kFields; };
  // Index of each struct's first field among the arguments.
  static constexpr std::array<size_t, sizeof...(Structs)> kBegin = [] {
    std::array<size_t, sizeof...(Structs)> begin{FieldTypes<Structs>::kCount...};
    size_t next = 0;
    for (size_t& at : begin) at = std::exchange(next, next + at);
    return begin;
  }();

  static std::string results() {
    if constexpr (kIsStruct) return '(' + schema_of_fields({Result::kFields}) + ')';
    if constexpr (std::is_same_v<Result, Tensor>) return "Tensor";
    if constexpr (std::is_same_v<Result, Tensors>) return "Tensor[]";
    return "()";
  }

  // Takes the ownership of all values.
  template <class Struct, class... T>
  static Struct unbox(const StableIValue* stack, Types<T...>) {
    return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      return Struct{torch::stable::detail::to<T>(stack[kIndex])...};
    }(std::index_sequence_for<T...>{});
  }
};

inline StableIValue boxed(const Output& result) {
  return torch::stable::detail::from(result.tensor());
}
template <class T>
StableIValue boxed(const T& result) {
  return torch::stable::detail::from(result);
}

template <auto kFunction>
struct Boxed {
  using Signature = ops::Signature<std::remove_pointer_t<decltype(kFunction)>>;

  static void run(StableIValue* stack, uint64_t, uint64_t results) {
    const OpCall call{names->of(stack), Signature::returns_all(results)};
    using Result = decltype(Signature::call(kFunction, call, stack));
    if constexpr (std::is_void_v<Result>) {
      Signature::call(kFunction, call, stack);
    } else {
      const Result result = Signature::call(kFunction, call, stack);
      if constexpr (requires { Result::kFields; }) {
        with_fields(result, [&](const auto&... field) {
          uint64_t i = 0;
          ((i < results ? void(stack[i++] = boxed(field)) : void()), ...);
        });
      } else {
        stack[0] = boxed(result);
      }
    }
  }

  inline static const OpNames* names = nullptr;
};

enum class Gradient {
  none,
  differentiable,
  saves_last,  // differentiable; the last result is only for the backward: there is an `<op>_only`
};
using Gradient::differentiable;
using Gradient::saves_last;

// Registers the ops of a file, which defines one Registry at namespace scope:
//
//   const Registry registry([](Registry& ops) { ops.add<top_k>("top_k"); });
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

  // Sets the public functions of an op that has another name than its function. They also name
  // `<op>_` and `<op>_backward`. Must be called before they are added.
  void name(const char* op, std::vector<PublicFunction> functions);

  // Sets a number that shapes of results depend on, such as the tokens of a chunk, for the fakes in
  // Python.
  void constant(const char* name, int64_t value);

  // kFunction implements an op on this device.
  template <auto kFunction>
  void add(const std::string& op, Gradient gradient = Gradient::none) {
    define<std::remove_pointer_t<decltype(kFunction)>>(op, gradient);
    implement<kFunction>(op, gradient);
  }

  // Adds the schema alone, for ops that other files or Python implement.
  template <class Function>
  void define(const std::string& op, Gradient gradient = Gradient::none) {
    define_schema(Signature<Function>::schema(op), gradient);
  }

  template <auto kFunction>
  void implement(const std::string& op, Gradient gradient = Gradient::none) {
    using Function = Boxed<kFunction>;
    Function::names = &names_.emplace_front(op, Function::Signature::schema(op));
    implement_boxed(op, Function::run, gradient);
  }

 private:
  using Library = torch::stable::detail::StableLibrary;
  using Kind = Library::Kind;

  // The CUDA library adds no schemas: it is loaded after the CPU library, which has them all.
  void define_schema(const std::string& schema, Gradient gradient);
  void implement_boxed(const std::string& op, void (*run)(StableIValue*, uint64_t, uint64_t),
                       Gradient gradient);

#if !defined(OMNIATTN_CUDA)
  Library schemas_;
#endif
  Library implementations_;
  std::forward_list<OpNames> names_;
};

}  // namespace omniattn::ops
