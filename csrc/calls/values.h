// Arguments and results of calls between Python and stacks of the dispatcher.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace omniattn::calls {

using torch::jit::Stack;

// torch.nn.Parameter, kept for the life of the process.
inline PyTypeObject* parameter_class;

inline bool is_tensor(PyObject* value) {
  return Py_TYPE(value) == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
         Py_TYPE(value) == parameter_class;
}

// Releases the interpreter lock while kernels run.
class WithoutLock {
 public:
  WithoutLock() : thread_(PyEval_SaveThread()) {}
  ~WithoutLock() { PyEval_RestoreThread(thread_); }
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;

 private:
  PyThreadState* thread_;
};

// Holds the interpreter lock, in threads of torch's backward too.
class WithLock {
 public:
  WithLock() : state_(PyGILState_Ensure()) {}
  ~WithLock() { PyGILState_Release(state_); }
  WithLock(const WithLock&) = delete;
  WithLock& operator=(const WithLock&) = delete;

 private:
  PyGILState_STATE state_;
};

struct Release {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

// Kind of a parameter or, for lists, of its elements.
enum class Kind { tensor, integer, number, boolean };

struct Parameter {
  Kind kind;
  bool is_list;
  bool is_optional;
};

inline std::optional<Kind> kind_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return Kind::tensor;
    case c10::TypeKind::IntType:
      return Kind::integer;
    case c10::TypeKind::FloatType:
      return Kind::number;
    case c10::TypeKind::BoolType:
      return Kind::boolean;
    default:
      return std::nullopt;
  }
}

inline std::optional<Parameter> parameter_of(c10::TypePtr type) {
  Parameter parameter{};
  if (type->kind() == c10::TypeKind::OptionalType) {
    parameter.is_optional = true;
    type = type->expectRef<c10::OptionalType>().getElementType();
  }
  if (type->kind() == c10::TypeKind::ListType) {
    parameter.is_list = true;
    type = type->expectRef<c10::ListType>().getElementType();
  }
  const auto kind = kind_of(*type);
  if (!kind) return std::nullopt;
  parameter.kind = *kind;
  return parameter;
}

// Reads a number of Python's own class, or an enumerator; symbols of traces and numpy's numbers are
// left to torch.
inline bool read(PyObject* value, int64_t& number) {
  if (!PyLong_Check(value) || PyBool_Check(value)) return false;
  int overflow = 0;
  number = PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0;
}

inline bool read(PyObject* value, double& number) {
  if (!PyFloat_CheckExact(value)) return false;
  number = PyFloat_AS_DOUBLE(value);
  return true;
}

inline bool read(PyObject* value, bool& flag) {
  flag = value == Py_True;
  return PyBool_Check(value);
}

inline bool read(PyObject* value, at::Tensor& tensor) {
  if (!is_tensor(value)) return false;
  tensor = THPVariable_Unpack(value);
  return true;
}

template <class T>
bool push_one(PyObject* value, Stack& stack) {
  T found{};
  if (!read(value, found)) return false;
  stack.emplace_back(std::move(found));
  return true;
}

template <class T>
bool push_list(PyObject* value, Stack& stack) {
  if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) return false;
  c10::List<T> list;
  list.reserve(PySequence_Fast_GET_SIZE(value));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
    T found{};
    if (!read(PySequence_Fast_GET_ITEM(value, i), found)) return false;
    list.push_back(std::move(found));
  }
  stack.emplace_back(std::move(list));
  return true;
}

template <class T>
bool push(PyObject* value, bool is_list, Stack& stack) {
  return is_list ? push_list<T>(value, stack) : push_one<T>(value, stack);
}

inline bool push(PyObject* value, const Parameter& parameter, Stack& stack) {
  if (value == Py_None) {
    if (parameter.is_optional) stack.emplace_back();
    return parameter.is_optional;
  }
  switch (parameter.kind) {
    case Kind::tensor:
      return push<at::Tensor>(value, parameter.is_list, stack);
    case Kind::integer:
      return push<int64_t>(value, parameter.is_list, stack);
    case Kind::number:
      return push<double>(value, parameter.is_list, stack);
    case Kind::boolean:
      return push<bool>(value, parameter.is_list, stack);
  }
  return false;
}

// Returns a tuple of wrap(i) for i < count, or null if one of them is null.
template <class F>
PyObject* tuple_of(size_t count, F wrap) {
  Owned tuple(PyTuple_New(static_cast<Py_ssize_t>(count)));
  for (size_t i = 0; tuple && i < count; ++i) {
    PyObject* item = wrap(i);
    if (!item) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), item);
  }
  return tuple.release();
}

// Returns the Python object of a value that `push` made; None for undefined tensors.
inline PyObject* to_python(const c10::IValue& value) {
  if (value.isTensor()) return THPVariable_Wrap(value.toTensor());
  if (value.isBool()) return PyBool_FromLong(value.toBool());
  if (value.isInt()) return PyLong_FromLongLong(value.toInt());
  if (value.isDouble()) return PyFloat_FromDouble(value.toDouble());
  if (value.isList() || value.isTuple()) {
    const auto items = value.isList() ? value.toListRef() : value.toTupleRef().elements();
    return tuple_of(items.size(), [&](size_t i) { return to_python(items[i]); });
  }
  return Py_NewRef(Py_None);
}

// A value whose lists are tuples: torch's compiled autograd hashes what a call has saved.
inline c10::IValue hashable(const c10::IValue& value) {
  return value.isList() ? c10::ivalue::Tuple::create(value.toListRef().vec()) : value;
}

template <class T>
c10::IValue list_of(c10::ArrayRef<c10::IValue> items) {
  c10::List<T> list;
  list.reserve(items.size());
  for (const auto& item : items) list.push_back(item.to<T>());
  return list;
}

// The list of which `hashable` made a tuple.
inline c10::IValue as_list(Kind kind, c10::ArrayRef<c10::IValue> items) {
  switch (kind) {
    case Kind::tensor:
      return list_of<at::Tensor>(items);
    case Kind::integer:
      return list_of<int64_t>(items);
    case Kind::number:
      return list_of<double>(items);
    case Kind::boolean:
      return list_of<bool>(items);
  }
  return {};
}

}  // namespace omniattn::calls
