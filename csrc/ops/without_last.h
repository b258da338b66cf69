// Implements `<op>_only`: drops the last result, which only the backward needs.
//
//   ops.add<slstm<true>, WithoutLast<slstm<false>>::run>(schema, differentiable);
#pragma once

#include <tuple>
#include <utility>

namespace omniattn::ops {

template <auto kFunction>
struct WithoutLast;
template <class... Results, class... Args, std::tuple<Results...> (*kFunction)(Args...)>
struct WithoutLast<kFunction> {
  static auto run(Args... args) {
    const auto all = kFunction(std::forward<Args>(args)...);
    return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      return std::make_tuple(std::get<kIndex>(all)...);
    }(std::make_index_sequence<sizeof...(Results) - 1>{});
  }
};

}  // namespace omniattn::ops
