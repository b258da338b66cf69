// Calls of ops with gradients: the C++ counterpart of `EagerOp` (ops/dispatch/functions.py), which
// takes 10 to 30 us for a call and its backward.
//
// Python describes what a call saves and how a backward reads it (`Plan` in ops/dispatch/
// backward.py). First derivatives by a backward op never enter Python; backwards written in Python
// and second derivatives go back to the op.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "values.h"

namespace omniattn::calls {

using Tensors = torch::autograd::variable_list;

// Backward op and where its arguments come from. It computes the gradients of calls whose lists of
// tensors are empty, once all gradients that it requires are given.
struct BackwardPlan {
  enum class Source { nothing, saved, kept, empty_list, flag, grad };
  struct Argument {
    Source source;
    size_t place;
    Parameter parameter;
  };
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  std::vector<int64_t> gives;  // for each input the output that is its gradient, or -1
};

// An op and what its calls save. Kept for the life of the process, like the ops in Python.
struct Recorded {
  c10::OperatorHandle op;
  PyObject* owner;             // the DifferentiableOp
  size_t outputs;              // leading outputs that a call returns
  std::vector<size_t> inputs;  // arguments that are tensors
  std::vector<size_t> lists;   // arguments that are lists of tensors
  std::vector<size_t> saved;   // tensors among arguments and, counted on, outputs
  std::vector<size_t> kept;    // other arguments
  std::optional<BackwardPlan> backward;

  Tensors call(Stack&& stack) const;
};

inline bool any_defined(const Tensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.defined(); });
}

inline c10::IValue value_of(const at::Tensor& t) {
  return t.defined() ? c10::IValue(t) : c10::IValue();
}

// True for gradients in a batch of autograd's own (is_grads_batched), which Python maps over.
inline bool is_batched(const at::Tensor& t) {
  return t.defined() && t.key_set().has(c10::DispatchKey::Batched);
}

// True if the backward op alone computes the gradients.
inline bool is_native(const Recorded& call, const std::vector<int64_t>& lengths,
                      const Tensors& grads) {
  if (!call.backward || c10::GradMode::is_enabled()) return false;
  if (std::any_of(lengths.begin(), lengths.end(), [](auto n) { return n > 0; })) return false;
  if (std::any_of(grads.begin(), grads.end(), is_batched)) return false;
  const auto& arguments = call.backward->arguments;
  return std::all_of(arguments.begin(), arguments.end(), [&](const auto& a) {
    return a.source != BackwardPlan::Source::grad || a.parameter.is_optional ||
           grads[a.place].defined();
  });
}

// `needs` has a flag for each input, and for each element of the lists; and so has the result.
inline Tensors native_gradients(const Recorded& call, const Tensors& saved,
                                const std::vector<c10::IValue>& kept,
                                const std::vector<bool>& needs, const Tensors& grads) {
  using Source = BackwardPlan::Source;
  Stack stack;
  stack.reserve(call.backward->arguments.size());
  for (const auto& [source, place, parameter] : call.backward->arguments) {
    switch (source) {
      case Source::nothing:
        stack.emplace_back();
        break;
      case Source::saved:
        stack.push_back(value_of(saved[place]));
        break;
      case Source::kept:
        stack.push_back(kept[place].isTuple()
                            ? as_list(parameter.kind, kept[place].toTupleRef().elements())
                            : kept[place]);
        break;
      case Source::empty_list:
        stack.push_back(as_list(parameter.kind, {}));
        break;
      case Source::flag:
        stack.emplace_back(static_cast<bool>(needs[place]));
        break;
      case Source::grad:
        stack.push_back(place < grads.size() ? value_of(grads[place]) : c10::IValue());
        break;
    }
  }
  call.backward->op.callBoxed(stack);
  Tensors found(needs.size());
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const auto from = call.backward->gives[i];
    if (needs[i] && from >= 0) found[i] = std::move(stack[from]).toTensor();
  }
  return found;
}

// Asks the op in Python; with create_graph the result is differentiable.
inline Tensors python_gradients(const Recorded& call, const Tensors& saved,
                                const std::vector<c10::IValue>& kept,
                                const std::vector<int64_t>& lengths, const std::vector<bool>& needs,
                                const Tensors& grads) {
  const WithLock lock;
  const auto tensors = [](const Tensors& given) {
    return Owned(tuple_of(given.size(), [&](size_t i) { return THPVariable_Wrap(given[i]); }));
  };
  const Owned names(PyUnicode_InternFromString("gradients_of_call"));
  const Owned given[] = {
      tensors(saved), Owned(tuple_of(kept.size(), [&](size_t i) { return to_python(kept[i]); })),
      Owned(tuple_of(lengths.size(), [&](size_t i) { return PyLong_FromLongLong(lengths[i]); })),
      Owned(tuple_of(needs.size(), [&](size_t i) { return PyBool_FromLong(needs[i]); })),
      tensors(grads)};
  PyObject* args[] = {call.owner,     given[0].get(), given[1].get(),
                      given[2].get(), given[3].get(), given[4].get()};
  Owned result;
  if (names && std::all_of(std::begin(args), std::end(args), [](auto* a) { return a; })) {
    result.reset(PyObject_VectorcallMethod(names.get(), args, std::size(args), nullptr));
  }
  const Owned items(result ? PySequence_Fast(result.get(), "gradients") : nullptr);
  if (!items) {
    python_error error;
    error.persist();
    throw error;
  }
  Tensors found(needs.size());
  TORCH_INTERNAL_ASSERT(PySequence_Fast_GET_SIZE(items.get()) ==
                        static_cast<Py_ssize_t>(needs.size()));
  for (size_t i = 0; i < needs.size(); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(items.get(), static_cast<Py_ssize_t>(i));
    if (item != Py_None) found[i] = THPVariable_Unpack(item);
  }
  return found;
}

struct OpCall : torch::autograd::Function<OpCall> {
  static Tensors forward(torch::autograd::AutogradContext* ctx, const Recorded* call, Stack* stack,
                         at::TensorList /*tensors, for autograd*/) {
    std::vector<c10::IValue> kept;
    kept.reserve(call->kept.size());
    for (const auto i : call->kept) kept.push_back(hashable((*stack)[i]));
    std::vector<c10::IValue> present, lengths;
    for (const auto i : call->inputs) present.emplace_back((*stack)[i].isTensor());
    Tensors elements;
    for (const auto i : call->lists) {
      auto list = (*stack)[i].toTensorVector();
      lengths.emplace_back(static_cast<int64_t>(list.size()));
      elements.insert(elements.end(), list.begin(), list.end());
    }
    const auto arguments = stack->size();
    Tensors saved(call->saved.size());
    for (size_t i = 0; i < saved.size(); ++i) {
      const auto place = call->saved[i];
      if (place < arguments && (*stack)[place].isTensor()) saved[i] = (*stack)[place].toTensor();
    }
    call->op.callBoxed(*stack);
    for (size_t i = 0; i < saved.size(); ++i) {
      if (call->saved[i] >= arguments) saved[i] = (*stack)[call->saved[i] - arguments].toTensor();
    }
    saved.insert(saved.end(), elements.begin(), elements.end());
    ctx->saved_data["call"] = reinterpret_cast<int64_t>(call);
    ctx->saved_data["values"] = c10::ivalue::Tuple::create(
        c10::ivalue::Tuple::create(std::move(kept)), c10::ivalue::Tuple::create(std::move(present)),
        c10::ivalue::Tuple::create(std::move(lengths)));
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    Tensors outputs;
    for (size_t i = 0; i < call->outputs; ++i) {
      outputs.push_back(std::move((*stack)[i]).toTensor());
    }
    return outputs;
  }

  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& grads) {
    const auto& call = *reinterpret_cast<const Recorded*>(ctx->saved_data["call"].toInt());
    const auto values = ctx->saved_data["values"].toTuple();
    const auto& present = values->elements()[1].toTupleRef().elements();
    std::vector<int64_t> lengths;
    for (const auto& n : values->elements()[2].toTupleRef().elements())
      lengths.push_back(n.toInt());
    size_t count = present.size(), next = 0;
    for (const auto n : lengths) count += n;
    std::vector<bool> needs(count), given(count, true);
    for (size_t i = 0; i < count; ++i) {
      given[i] = i >= present.size() || present[i].toBool();
      needs[i] = given[i] && ctx->needs_input_grad(next++);
    }
    Tensors found(count);
    if (any_defined(grads)) {
      const auto kept = values->elements()[0].toTupleRef().elements().vec();
      const auto saved = ctx->get_saved_variables();
      found = is_native(call, lengths, grads)
                  ? native_gradients(call, saved, kept, needs, grads)
                  : python_gradients(call, saved, kept, lengths, needs, grads);
    }
    Tensors results(2);  // the op and the stack
    for (size_t i = 0; i < count; ++i) {
      if (given[i]) results.push_back(std::move(found[i]));
    }
    return results;
  }
};

inline Tensors Recorded::call(Stack&& stack) const {
  Tensors tensors;
  for (const auto i : inputs) {
    if (stack[i].isTensor()) tensors.push_back(stack[i].toTensor());
  }
  for (const auto i : lists) {
    for (const at::Tensor& t : stack[i].toTensorList()) tensors.push_back(t);
  }
  return OpCall::apply(this, &stack, at::TensorList(tensors));
}

}  // namespace omniattn::calls
