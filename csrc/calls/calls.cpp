// The Python module omniattn._calls: calls of ops without the Python that surrounds them elsewhere.
//
// A call of a native op through torch._C._dispatch_call_boxed takes 1.3 us more than the same call
// from C++, the conditions of `is_plain` and of `DifferentiableOp.attempt` cost 1 us in Python, and
// an autograd.Function in Python 10 us and more. Small norms and gates take 2 us in all, so that a
// training or decoding step of a small model spends a third of its time there. Unlike the libraries
// of ops, this module depends on the versions of Python and torch: its file is named after both,
// and without it the same calls are made in Python.
#include "gradients.h"
#include "values.h"

#include <structmember.h>

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/DynamicTypes.h>

#include <string>

namespace {

using namespace omniattn::calls;

PyTypeObject* call_class;  // kept for the life of the process

// Calls make an op without gradients; records make it with them; attempts do either.
enum class Mode { call, attempt, record };

// A native op that takes its arguments by position. Calls that it does not know how to convert go
// to `other`, which takes all that torch does.
struct Call {
  Mode mode;
  c10::OperatorHandle op;
  std::vector<Parameter> parameters;
  size_t outputs;  // leading outputs that a call returns: all, or those that are not private
  const Recorded* recorded = nullptr;

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
    return wrapped([&](size_t i) { return std::move(stack[i]).toTensor(); });
    END_HANDLE_TH_ERRORS
  }

  PyObject* run_recorded(Stack&& stack) const {
    HANDLE_TH_ERRORS
    Tensors found;
    {
      WithoutLock guard;
      found = recorded->call(std::move(stack));
    }
    return wrapped([&](size_t i) { return std::move(found[i]); });
    END_HANDLE_TH_ERRORS
  }

 private:
  template <class F>
  PyObject* wrapped(F output) const {
    if (outputs == 1) return THPVariable_Wrap(output(0));
    return tuple_of(outputs, [&](size_t i) { return THPVariable_Wrap(output(i)); });
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

// Python objects of a call.
struct CallObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  Call* call;
  PyObject* other;
};

// DifferentiableOp.attempt: returns None if the op refuses an argument.
PyObject* attempted(PyObject* result) {
  if (!result &&
      (PyErr_ExceptionMatches(PyExc_RuntimeError) || PyErr_ExceptionMatches(PyExc_TypeError))) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  return result;
}

PyObject* vectorcall(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  const auto* object = reinterpret_cast<CallObject*>(self);
  const Call& call = *object->call;
  Stack stack;
  const bool known = !names && call.read_arguments(args, PyVectorcall_NARGS(flags), stack);
  if (known && call.mode == Mode::call) return call.run(std::move(stack));
  if (known && !is_traced()) {
    if (call.mode == Mode::record) return call.run_recorded(std::move(stack));
    const bool records = c10::GradMode::is_enabled() && any_requires_grad(stack);
    if (!records) return attempted(call.run(std::move(stack)));
    if (call.recorded) return attempted(call.run_recorded(std::move(stack)));
  }
  return PyObject_Vectorcall(object->other, args, flags, names);
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

// Parameters of an op; nothing if one has a further kind.
std::optional<std::vector<Parameter>> parameters_of(const c10::FunctionSchema& schema) {
  std::vector<Parameter> parameters;
  for (const auto& argument : schema.arguments()) {
    const auto parameter = parameter_of(argument.type());
    if (!parameter) return std::nullopt;
    parameters.push_back(*parameter);
  }
  return parameters;
}

bool returns_tensors(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return std::all_of(returns.begin(), returns.end(), [](const auto& output) {
    return output.type()->kind() == c10::TypeKind::TensorType;
  });
}

// Makes the Python object of a call, or returns `other` for ops of further kinds.
PyObject* make_call(Mode mode, const char* name, size_t outputs, PyObject* other,
                    const Recorded* recorded = nullptr) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  auto parameters = parameters_of(op.schema());
  if (!parameters || !returns_tensors(op.schema())) return Py_NewRef(other);
  if (outputs == 0) outputs = op.schema().returns().size();
  auto call = std::make_unique<Call>(Call{mode, op, std::move(*parameters), outputs, recorded});
  auto* object = PyObject_GC_New(CallObject, call_class);
  if (!object) return nullptr;
  object->vectorcall = vectorcall;
  object->call = call.release();
  object->other = Py_NewRef(other);
  PyObject_GC_Track(object);
  return reinterpret_cast<PyObject*>(object);
}

PyObject* op_call(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* name = nullptr;
  PyObject* other = nullptr;
  if (!PyArg_ParseTuple(args, "sO", &name, &other)) return nullptr;
  return make_call(Mode::call, name, 0, other);
  END_HANDLE_TH_ERRORS
}

PyObject* op_attempt(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* name = nullptr;
  Py_ssize_t outputs = 0;
  PyObject *other = nullptr, *record = nullptr;
  if (!PyArg_ParseTuple(args, "snOO", &name, &outputs, &other, &record)) return nullptr;
  const bool records = Py_TYPE(record) == call_class;
  return make_call(Mode::attempt, name, outputs, other,
                   records ? reinterpret_cast<CallObject*>(record)->call->recorded : nullptr);
  END_HANDLE_TH_ERRORS
}

// Reads a tuple of indices.
std::vector<size_t> places_in(PyObject* tuple) {
  std::vector<size_t> places;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    places.push_back(PyLong_AsSize_t(PyTuple_GET_ITEM(tuple, i)));
  }
  return places;
}

// `take` counts on: None, all flags, saved tensors, lists, other values, flags, gradients.
// Returns nothing for a backward that takes all flags or values of another kind than its own.
std::optional<BackwardPlan> backward_of(const Recorded& call,
                                        const std::vector<Parameter>& parameters, const char* name,
                                        const std::vector<size_t>& take, PyObject* gives) {
  using Source = BackwardPlan::Source;
  BackwardPlan plan{c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), {}, {}};
  const auto taken = parameters_of(plan.op.schema());
  if (!taken || taken->size() != take.size()) return std::nullopt;
  const size_t saved = 2, lists = saved + call.saved.size(), kept = lists + call.lists.size(),
               flags = kept + call.kept.size(), list_flags = flags + call.inputs.size(),
               grads = list_flags + call.lists.size();
  for (size_t i = 0; i < take.size(); ++i) {
    const auto place = take[i];
    const Parameter wanted = (*taken)[i];
    BackwardPlan::Argument argument{Source::nothing, 0, wanted};
    Parameter given = wanted;
    if (place == 0) {
      if (!wanted.is_optional) return std::nullopt;
    } else if (place < saved) {
      return std::nullopt;
    } else if (place < lists) {
      argument = {Source::saved, place - saved, wanted};
      given = {Kind::tensor, false, false};
    } else if (place < kept || (place >= list_flags && place < grads)) {
      argument.source = Source::empty_list;
      given.is_list = true;
    } else if (place < flags) {
      argument = {Source::kept, place - kept, wanted};
      given = parameters[call.kept[argument.place]];
    } else if (place < list_flags) {
      argument = {Source::flag, place - flags, wanted};
      given = {Kind::boolean, false, false};
    } else {
      argument = {Source::grad, place - grads, wanted};
      given = {Kind::tensor, false, false};
      if (!wanted.is_optional && argument.place >= call.outputs) return std::nullopt;
    }
    if (given.kind != wanted.kind || given.is_list != wanted.is_list) return std::nullopt;
    plan.arguments.push_back(argument);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(gives); ++i) {
    plan.gives.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(gives, i)));
  }
  return plan;
}

PyObject* op_record(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *name = nullptr, *backward = nullptr;
  Py_ssize_t outputs = 0;
  PyObject *other = nullptr, *owner = nullptr, *saved = nullptr, *kept = nullptr, *take = nullptr,
           *gives = nullptr;
  if (!PyArg_ParseTuple(args, "snOOO!O!zO!O!", &name, &outputs, &other, &owner, &PyTuple_Type,
                        &saved, &PyTuple_Type, &kept, &backward, &PyTuple_Type, &take,
                        &PyTuple_Type, &gives)) {
    return nullptr;
  }
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  const auto parameters = parameters_of(op.schema());
  if (!parameters) return Py_NewRef(other);
  auto call = std::make_unique<Recorded>(Recorded{op,
                                                  Py_NewRef(owner),
                                                  static_cast<size_t>(outputs),
                                                  {},
                                                  {},
                                                  places_in(saved),
                                                  places_in(kept),
                                                  std::nullopt});
  for (size_t i = 0; i < parameters->size(); ++i) {
    const auto [kind, is_list, is_optional] = (*parameters)[i];
    if (kind == Kind::tensor) (is_list ? call->lists : call->inputs).push_back(i);
  }
  if (backward) call->backward = backward_of(*call, *parameters, backward, places_in(take), gives);
  if (PyErr_Occurred()) return nullptr;
  return make_call(Mode::record, name, static_cast<size_t>(outputs), other, call.release());
  END_HANDLE_TH_ERRORS
}

// True if the calling thread is in no mode of torch that wants to see a call.
bool no_mode_is_active() {
  return !at::autocast::is_autocast_enabled(at::kCPU) &&
         at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

bool is_plain_tensor(PyObject* value) {
  if (!is_tensor(value)) return false;
  const at::Tensor& t = THPVariable_Unpack(value);
  return t.is_cpu() && !t.is_nested();
}

PyObject* are_plain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (!no_mode_is_active()) Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (args[i] == Py_None && i > 0) continue;
    if (!is_plain_tensor(args[i])) Py_RETURN_FALSE;
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

// Ranges of `Crossings.ranges` (gemm_choice.py) in which this package's kernel is faster.
struct Ranges {
  int64_t least, most, first_row, last_row, smallest;
};

// Reads the ranges of a dtype; nothing if there are none, with or without a Python error.
std::optional<Ranges> ranges_of(PyObject* choice, at::ScalarType dtype) {
  PyObject* key = reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype));
  PyObject* found = PyDict_Check(choice) ? PyDict_GetItemWithError(choice, key) : nullptr;
  const Owned numbers(found ? PyObject_GetAttrString(found, "ranges") : nullptr);
  int64_t read[5];
  if (!numbers || !PyTuple_Check(numbers.get()) || PyTuple_GET_SIZE(numbers.get()) != 5) {
    return std::nullopt;
  }
  for (int i = 0; i < 5; ++i) read[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(numbers.get(), i));
  return Ranges{read[0], read[1], read[2], read[3], read[4]};
}

// True if `native_is_faster` (gemm_choice.py) is False where omniattn's own settings are the
// defaults.
bool torch_is_faster(const at::Tensor& x, const at::Tensor& weight, const Ranges& ranges) {
  const auto dtype = x.scalar_type();
  if (dtype == at::kBFloat16 && x.size(-1) % 2 == 1) return false;
  if (dtype == at::kFloat &&
      at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL) ==
          at::Float32Precision::TF32) {
    return false;
  }
  const double products = static_cast<double>(x.numel()) * static_cast<double>(weight.size(0));
  const bool in_range = ranges.least <= products && products <= ranges.most;
  if (c10::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad())) {
    return !in_range;
  }
  if (weight.numel() < ranges.smallest) return true;
  const auto rows = x.numel() / std::max<int64_t>(1, x.size(-1));
  return !in_range && !(ranges.first_row <= rows && rows <= ranges.last_row);
}

PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  // torch's linear takes a vector as weight, and broadcasts the bias.
  const bool has_bias = count > 2 && args[2] != Py_None;
  int64_t pieces = 0;
  if (count != 6 || !read(args[4], pieces) || pieces != 0 || args[5] != Py_False ||
      !no_mode_is_active() || is_traced() || !is_plain_tensor(args[0]) ||
      !is_plain_tensor(args[1]) || !is_strided(args[1], 2) ||
      (has_bias && !(is_plain_tensor(args[2]) && is_strided(args[2], 1)))) {
    Py_RETURN_NONE;
  }
  const at::Tensor x = THPVariable_Unpack(args[0]), weight = THPVariable_Unpack(args[1]);
  const std::optional<at::Tensor> bias =
      has_bias ? std::optional(THPVariable_Unpack(args[2])) : std::nullopt;
  if (x.layout() != at::kStrided || x.dim() == 0 || (bias && bias->size(0) != weight.size(0))) {
    Py_RETURN_NONE;
  }
  const auto ranges = ranges_of(args[3], x.scalar_type());
  if (PyErr_Occurred()) return nullptr;
  if (!ranges || !torch_is_faster(x, weight, *ranges)) Py_RETURN_NONE;
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
     "op_call(name, other): the op `name`; calls of further kinds, such as with tensors of further "
     "classes, go to `other`."},
    {"op_record", op_record, METH_VARARGS,
     "op_record(name, outputs, other, owner, saved, kept, backward, take, gives): as op_call, with "
     "gradients, returning the leading `outputs`."},
    {"op_attempt", op_attempt, METH_VARARGS,
     "op_attempt(name, outputs, other, record): as op_call, returning the leading `outputs`, or "
     "all for 0, and None if the op refuses an argument; with gradients it is `record`."},
    {"are_plain", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(are_plain)),
     METH_FASTCALL,
     "are_plain(x, *others): the part of `is_plain` that depends on the tensors and on modes of "
     "torch."},
    {"linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(linear)), METH_FASTCALL,
     "linear(x, weight, bias, choice, pieces, invariant): torch's linear of plain tensors; None if "
     "it refuses them, would broadcast or is slower, by the ranges of `choice`, and with the "
     "settings config.FP32_PIECES and config.BATCH_INVARIANT, for which it is not used."},
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
