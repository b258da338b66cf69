// The Python module omniattn._calls: calls of ops without the Python that surrounds them elsewhere.
//
// A call of a native op through torch._C._dispatch_call_boxed takes 1.3 us more than the same call
// from C++, and the conditions of `is_plain` and of `DifferentiableOp.attempt` cost 1 us in Python.
// Small norms and gates take 2 us in all, so that a training or decoding step of a small model
// spends a third of its time there. Unlike the libraries of ops, this module depends on the
// versions of Python and torch: its file is named after both, and without it the same calls are
// made in Python.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace {

using torch::jit::Stack;

// Kept for the life of the process.
PyTypeObject* parameter_class;  // torch.nn.Parameter
PyTypeObject* call_class;

bool is_tensor(PyObject* value) {
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

// Kind of a parameter or, for lists, of its elements.
enum class Kind { tensor, integer, number, boolean };

struct Parameter {
  Kind kind;
  bool is_list;
  bool is_optional;
};

std::optional<Kind> kind_of(const c10::Type& type) {
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

std::optional<Parameter> parameter_of(c10::TypePtr type) {
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

// Reads a number of exactly Python's own class; symbols of traces and numpy's numbers are left to
// torch.
bool read(PyObject* value, int64_t& number) {
  if (!PyLong_CheckExact(value)) return false;
  int overflow = 0;
  number = PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0;
}

bool read(PyObject* value, double& number) {
  if (!PyFloat_CheckExact(value)) return false;
  number = PyFloat_AS_DOUBLE(value);
  return true;
}

bool read(PyObject* value, bool& flag) {
  flag = value == Py_True;
  return PyBool_Check(value);
}

bool read(PyObject* value, at::Tensor& tensor) {
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

bool push(PyObject* value, const Parameter& parameter, Stack& stack) {
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

PyObject* tuple_of(Stack&& outputs, size_t count) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(count));
  for (size_t i = 0; tuple && i < count; ++i) {
    PyObject* output = THPVariable_Wrap(std::move(outputs[i]).toTensor());
    if (!output)
      Py_CLEAR(tuple);
    else
      PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), output);
  }
  return tuple;
}

// A native op that takes its arguments by position. Calls that it does not know how to convert go
// to `other`, which takes all that torch does.
struct Call {
  c10::OperatorHandle op;
  std::vector<Parameter> parameters;
  size_t outputs;  // leading outputs that a call returns: all, or those that are not private

  bool read_arguments(PyObject* const* args, size_t count, Stack& stack) const {
    if (count != parameters.size()) return false;
    stack.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      if (!push(args[i], parameters[i], stack)) return false;
    }
    return true;
  }

  PyObject* run(Stack&& stack) const {
    HANDLE_TH_ERRORS {
      WithoutLock guard;
      op.callBoxed(stack);
    }
    if (outputs == 1) return THPVariable_Wrap(std::move(stack.front()).toTensor());
    return tuple_of(std::move(stack), outputs);
    END_HANDLE_TH_ERRORS
  }
};

// True if a tensor on the stack, also one in a list, needs its gradient.
bool any_requires_grad(const Stack& stack) {
  for (const auto& value : stack) {
    if (value.isTensor() && value.toTensor().requires_grad()) return true;
    if (!value.isTensorList()) continue;
    for (const at::Tensor& t : value.toTensorList()) {
      if (t.requires_grad()) return true;
    }
  }
  return false;
}

bool is_traced() { return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer); }

// Python objects of a call. `attempt` has the meaning of DifferentiableOp.attempt.
struct CallObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  Call* call;
  PyObject* other;
  bool attempt;
};

PyObject* vectorcall(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  const auto* object = reinterpret_cast<CallObject*>(self);
  Stack stack;
  const bool known = !names && object->call->read_arguments(args, PyVectorcall_NARGS(flags), stack);
  if (!object->attempt) {
    if (!known) return PyObject_Vectorcall(object->other, args, flags, names);
    return object->call->run(std::move(stack));
  }
  const bool is_direct =
      known && !is_traced() && !(c10::GradMode::is_enabled() && any_requires_grad(stack));
  if (!is_direct) return PyObject_Vectorcall(object->other, args, flags, names);
  PyObject* result = object->call->run(std::move(stack));
  if (!result &&
      (PyErr_ExceptionMatches(PyExc_RuntimeError) || PyErr_ExceptionMatches(PyExc_TypeError))) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  return result;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<CallObject*>(self)->other);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(reinterpret_cast<CallObject*>(self)->other);
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  delete reinterpret_cast<CallObject*>(self)->call;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CallObject, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

template <class F>
PyType_Slot slot(int id, F* function) {
  return {id, reinterpret_cast<void*>(function)};
}

PyTypeObject* new_call_type() {
  PyType_Slot slots[] = {slot(Py_tp_dealloc, deallocate), slot(Py_tp_traverse, traverse),
                         slot(Py_tp_clear, clear),        slot(Py_tp_call, PyVectorcall_Call),
                         {Py_tp_members, members},        {0, nullptr}};
  PyType_Spec spec{"omniattn._calls.Call", sizeof(CallObject), 0,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// Returns `other` for ops with arguments or outputs of further kinds.
PyObject* make_call(PyObject* args, bool attempt) {
  const char* name = nullptr;
  Py_ssize_t outputs = 0;
  PyObject* other = nullptr;
  if (!PyArg_ParseTuple(args, "snO", &name, &outputs, &other)) return nullptr;
  HANDLE_TH_ERRORS
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  std::vector<Parameter> parameters;
  for (const auto& argument : op.schema().arguments()) {
    const auto parameter = parameter_of(argument.type());
    if (!parameter) return Py_NewRef(other);
    parameters.push_back(*parameter);
  }
  for (const auto& output : op.schema().returns()) {
    if (output.type()->kind() != c10::TypeKind::TensorType) return Py_NewRef(other);
  }
  const auto all = op.schema().returns().size();
  auto call = std::make_unique<Call>(
      Call{op, std::move(parameters), outputs ? static_cast<size_t>(outputs) : all});
  auto* object = PyObject_GC_New(CallObject, call_class);
  if (!object) return nullptr;
  object->vectorcall = vectorcall;
  object->call = call.release();
  object->other = Py_NewRef(other);
  object->attempt = attempt;
  PyObject_GC_Track(object);
  return reinterpret_cast<PyObject*>(object);
  END_HANDLE_TH_ERRORS
}

PyObject* op_call(PyObject*, PyObject* args) { return make_call(args, false); }

PyObject* op_attempt(PyObject*, PyObject* args) { return make_call(args, true); }

PyObject* are_plain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (at::autocast::is_autocast_enabled(at::kCPU) ||
      at::impl::PythonTorchFunctionTLS::stack_len() > 0 ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    Py_RETURN_FALSE;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (args[i] == Py_None && i > 0) continue;
    if (!is_tensor(args[i])) Py_RETURN_FALSE;
    const at::Tensor& t = THPVariable_Unpack(args[i]);
    if (!t.is_cpu() || t.is_nested()) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// True if `t` is a strided tensor of a class of torch and of `dim` dimensions.
bool is_strided(PyObject* value, int64_t dim) {
  if (!is_tensor(value)) return false;
  const at::Tensor& t = THPVariable_Unpack(value);
  return t.layout() == at::kStrided && t.dim() == dim;
}

PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  // torch's linear takes a vector as weight, and broadcasts the bias.
  const bool has_bias = count == 3 && args[2] != Py_None;
  if (count != 3 || !is_tensor(args[0]) || !is_strided(args[1], 2) ||
      (has_bias && !is_strided(args[2], 1))) {
    Py_RETURN_NONE;
  }
  const at::Tensor x = THPVariable_Unpack(args[0]), weight = THPVariable_Unpack(args[1]);
  const std::optional<at::Tensor> bias =
      has_bias ? std::optional(THPVariable_Unpack(args[2])) : std::nullopt;
  if (x.layout() != at::kStrided || (bias && bias->size(0) != weight.size(0))) Py_RETURN_NONE;
  at::Tensor y;
  try {
    WithoutLock guard;
    y = at::linear(x, weight, bias);
  } catch (const c10::Error&) {
    Py_RETURN_NONE;
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"op_call", op_call, METH_VARARGS,
     "op_call(name, outputs, other): the op `name`, returning its leading `outputs`, or all for 0; "
     "other calls, such "
     "as with tensors of further classes, go to `other`."},
    {"op_attempt", op_attempt, METH_VARARGS,
     "op_attempt(name, outputs, other): as op_call, for tensors without gradients outside of "
     "traces; returns None if "
     "the op refuses an argument."},
    {"are_plain", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(are_plain)),
     METH_FASTCALL,
     "are_plain(x, *others): the part of `is_plain` that depends on the tensors and on modes of "
     "torch."},
    {"linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(linear)), METH_FASTCALL,
     "linear(x, weight, bias): torch's linear of plain tensors; None if it refuses them or would "
     "broadcast."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module{PyModuleDef_HEAD_INIT,
                   "_calls",
                   "Calls of native ops without Python.",
                   -1,
                   methods,
                   nullptr,
                   nullptr,
                   nullptr,
                   nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* OMNIATTN_INIT_CALLS() {
  PyObject* nn = PyImport_ImportModule("torch.nn");
  if (!nn) return nullptr;
  parameter_class = reinterpret_cast<PyTypeObject*>(PyObject_GetAttrString(nn, "Parameter"));
  Py_DECREF(nn);
  call_class = new_call_type();
  if (!parameter_class || !call_class) return nullptr;
  return PyModule_Create(&module);
}
