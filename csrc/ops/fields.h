// Structs that know the names and types of their fields: the arguments and results of ops.
#pragma once

#include <cstddef>
#include <string_view>
#include <type_traits>
#include <utility>

// Declares a struct of up to 16 fields, whose declarations it keeps as text:
//
//   OMNIATTN_FIELDS(Options, double scale; bool causal, relu);
//
// struct Options { double scale; bool causal, relu; }; Options::kFields == "double scale; bool ..."
#define OMNIATTN_FIELDS(Name, ...)                            \
  struct Name {                                               \
    __VA_ARGS__;                                              \
    static constexpr std::string_view kFields = #__VA_ARGS__; \
  }

namespace omniattn::ops {

// How an op is called.
struct OpCall {
  const char* op;  // name for errors: a public function, or "<function>_backward"
  bool saves;      // false in `<op>_only`: the last result is not wanted
};

template <class... T>
struct Types {
  static constexpr std::size_t kCount = sizeof...(T);
};

constexpr std::size_t count_fields(std::string_view declarations) {
  std::size_t count = 1;
  for (const char c : declarations) count += c == ',' || c == ';';
  return count;
}

// Returns f(field, ...) of all fields of a struct, as lvalues.
template <class Struct, class F>
decltype(auto) with_fields(Struct& x, const F& f) {
#define OMNIATTN_WITH(count, ...)                           \
  if constexpr (count_fields(Struct::kFields) == (count)) { \
    auto& [__VA_ARGS__] = x;                                \
    return f(__VA_ARGS__);                                  \
  } else
  OMNIATTN_WITH(1, a)
  OMNIATTN_WITH(2, a, b)
  OMNIATTN_WITH(3, a, b, c)
  OMNIATTN_WITH(4, a, b, c, d)
  OMNIATTN_WITH(5, a, b, c, d, e)
  OMNIATTN_WITH(6, a, b, c, d, e, g)
  OMNIATTN_WITH(7, a, b, c, d, e, g, h)
  OMNIATTN_WITH(8, a, b, c, d, e, g, h, i)
  OMNIATTN_WITH(9, a, b, c, d, e, g, h, i, j)
  OMNIATTN_WITH(10, a, b, c, d, e, g, h, i, j, k)
  OMNIATTN_WITH(11, a, b, c, d, e, g, h, i, j, k, l)
  OMNIATTN_WITH(12, a, b, c, d, e, g, h, i, j, k, l, m)
  OMNIATTN_WITH(13, a, b, c, d, e, g, h, i, j, k, l, m, n)
  OMNIATTN_WITH(14, a, b, c, d, e, g, h, i, j, k, l, m, n, o)
  OMNIATTN_WITH(15, a, b, c, d, e, g, h, i, j, k, l, m, n, o, p)
  OMNIATTN_WITH(16, a, b, c, d, e, g, h, i, j, k, l, m, n, o, p, q)
  static_assert(count_fields(Struct::kFields) <= 16, "split the struct");
#undef OMNIATTN_WITH
}

struct ToTypes {
  template <class... T>
  Types<std::remove_const_t<T>...> operator()(T&...) const {
    return {};
  }
};
template <class Struct>
using FieldTypes = decltype(with_fields(std::declval<Struct&>(), ToTypes{}));

}  // namespace omniattn::ops
