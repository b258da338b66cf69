"""Tracing of a score_mod or mask_mod by one call, and the handlers of torch's functions.

traced_nn.py has the handlers of torch.nn.functional.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from omniattn.functional.scores.trace import (
    FUNCTIONS,
    Trace,
    Value,
    call,
    call_named,
    is_real,
    lift,
    trace_of,
)

_COMPARISON = ("less", "less_equal", "equal")
#: Arithmetic of two bools, whose result is a bool in torch.
_OF_TRUTHS = {"add": "int_or", "mul": "int_and", "min": "int_and", "max": "int_or"}


class _Indexing(TorchFunctionMode):
    """Intercepts tensors indexed by a Value; torch would dispatch only on the tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if trace_of(args) is not None:  # without calling torch before
            return call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def trace_function(
    name: str, function: Callable[..., Any], dtype: torch.dtype, arguments: Sequence[str]
) -> tuple[Trace, Value]:
    """Traces `function` called with `arguments`, some of the names score, b, h, q and k."""
    trace = Trace(name, dtype)
    inputs = [trace.add("f" if n == "score" else "i", "input", n) for n in arguments]
    try:
        with _Indexing():
            found = function(*inputs)
    except TypeError as error:
        if _takes(function, len(inputs)):
            raise
        raise TypeError(f"{name} must be a function of ({', '.join(arguments)}): {error}") from None
    return trace, lift(trace, found)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Returns True if a function accepts `count` arguments, or has no signature."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        pass
    return True


def _float(trace: Trace, x: Any) -> Value:
    if not isinstance(x, Value):
        if isinstance(x, (int, float, Real)):
            return trace.add("f", "number", float(x))
        x = lift(trace, x)
    return x if x.kind == "f" else trace.add("f", "to_float", x.node)


def _is_float(x: Any) -> bool:
    if isinstance(x, Value):
        return x.kind == "f"
    return x.is_floating_point() if isinstance(x, Tensor) else is_real(x)


def _pair(trace: Trace, a: Any, b: Any) -> tuple[Value, Value]:
    """Lifts a and b to traced values, both as floats if either is a float."""
    if _is_float(a) or _is_float(b):
        return _float(trace, a), _float(trace, b)
    return lift(trace, a), lift(trace, b)


Handler = Callable[..., Any]


def _binary(of_floats: str, of_ints: str) -> Handler:
    def apply(trace: Trace, a: Any, b: Any) -> Value:
        x, y = _pair(trace, a, b)
        if x.kind == y.kind == "b" and of_floats in _OF_TRUTHS:
            return trace.add("b", _OF_TRUTHS[of_floats], x.node, y.node)
        if x.kind == y.kind == "b" and of_floats == "sub":
            return trace.fail("cannot subtract truth values")
        is_float = x.kind == "f"
        kind = "b" if of_floats in _COMPARISON else "f" if is_float else "i"
        return trace.add(kind, of_floats if is_float else of_ints, x.node, y.node)

    return apply


def _unary(op: str) -> Handler:
    return lambda trace, a: trace.add("f", op, _float(trace, a).node)


_add = _binary("add", "int_add")
_sub = _binary("sub", "int_sub")
_mul = _binary("mul", "int_mul")
_less = _binary("less", "int_less")
_less_equal = _binary("less_equal", "int_less_equal")
_equal = _binary("equal", "int_equal")
_minimum = _binary("min", "int_min")
_maximum = _binary("max", "int_max")
_exp, _log, _floor = _unary("exp"), _unary("log"), _unary("floor")
_sqrt, _sigmoid, _trunc, _log1p = (_unary(n) for n in ("sqrt", "sigmoid", "trunc", "log1p"))


def _not(trace: Trace, a: Any) -> Value:
    x = lift(trace, a)
    if x.kind != "b":
        return trace.fail("~ is of truth values")
    return trace.add("b", "int_xor", x.node, trace.add("i", "integer", 1).node)


def _bits(op: str) -> Handler:
    def apply(trace: Trace, a: Any, b: Any) -> Value:
        x, y = lift(trace, a), lift(trace, b)
        if "f" in (x.kind, y.kind):
            return trace.fail("& | ^ are of integers and truth values")
        return trace.add("b" if x.kind == y.kind == "b" else "i", op, x.node, y.node)

    return apply


def _truth(trace: Trace, a: Any) -> Value:
    x = lift(trace, a)
    return x if x.kind == "b" else _not(trace, _equal(trace, x, 0))


def _logical(op: str) -> Handler:
    return lambda trace, a, b: _bits(op)(trace, _truth(trace, a), _truth(trace, b))


def _negative(trace: Trace, a: Any) -> Value:
    return trace.add("f", "neg", a.node) if a.kind == "f" else _sub(trace, 0, a)


def _absolute(trace: Trace, a: Any) -> Value:
    if a.kind == "f":
        return trace.add("f", "abs", a.node)
    return _maximum(trace, a, _sub(trace, 0, a))


def _divide(trace: Trace, a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return _floor_divide(trace, a, b)
    x, y = _float(trace, a), _float(trace, b)
    found = trace.add("f", "div", x.node, y.node)
    if rounding_mode is None:
        return found
    if not (_is_float(a) or _is_float(b)):
        return trace.fail("cannot trace div of integers with rounding_mode='trunc'")
    return _trunc(trace, found)


def _floor_divide(trace: Trace, a: Any, b: Any) -> Value:
    x, y = _pair(trace, a, b)
    if x.kind == "f":
        return _floor(trace, trace.add("f", "div", x.node, y.node))
    return trace.add("i", "int_floor_div", x.node, y.node)


def _remainder(trace: Trace, a: Any, b: Any) -> Value:
    x, y = _pair(trace, a, b)
    if x.kind == "f":
        return _sub(trace, x, _mul(trace, _floor_divide(trace, x, y), y))
    return trace.add("i", "int_mod", x.node, y.node)


def _power(trace: Trace, a: Any, b: Any) -> Value:
    if isinstance(b, (int, float)) and b == 0.5:
        return _sqrt(trace, a)
    if isinstance(b, int) and 1 <= b <= 4 and isinstance(a, Value):
        a = Value(trace, a.node, "i") if a.kind == "b" else a
        found = a
        for _ in range(b - 1):
            found = _mul(trace, found, a)
        return found
    if isinstance(b, int) and b == 0:  # a derivative of 0, also at a = 0
        return _filled(1)(trace, lift(trace, a))
    if not (_is_float(a) or _is_float(b)):
        return trace.fail("cannot trace a power of integers but those up to 4")
    return trace.add("f", "pow", _float(trace, a).node, _float(trace, b).node)


def _where(trace: Trace, condition: Any, a: Any, b: Any) -> Value:
    x, y = _pair(trace, a, b)
    kind = "b" if x.kind == y.kind == "b" else x.kind if x.kind == "f" else "i"
    return trace.add(kind, "where", _truth(trace, condition).node, x.node, y.node)


def _clamp(trace: Trace, a: Any, min: Any = None, max: Any = None) -> Value:
    found = lift(trace, a)
    if min is not None:
        found = _where(trace, _less(trace, found, min), min, found)
    if max is not None:
        found = _where(trace, _less(trace, max, found), max, found)
    return found


def _to(trace: Trace, a: Any, *args: Any, **kwargs: Any) -> Value:
    for wanted in (*args, *kwargs.values()):
        if isinstance(wanted, (torch.dtype, Tensor, Value)):
            return _cast(trace, a, wanted if isinstance(wanted, torch.dtype) else wanted.dtype)
    return trace.fail("to() takes a dtype")


def _cast(trace: Trace, a: Any, dtype: torch.dtype) -> Value:
    x = lift(trace, a)
    if dtype == torch.bool:
        return _truth(trace, x)
    if dtype.is_floating_point:
        if dtype not in (torch.float32, torch.float64):
            return trace.fail(f"cannot cast to {dtype}: floats are {trace.dtype}")
        return _float(trace, x)
    if dtype not in (torch.int32, torch.int64):
        return trace.fail(f"cannot cast to {dtype}")
    if x.kind == "f":
        return trace.add("i", "to_int", x.node)
    return Value(trace, x.node, "i")


def _log2(trace: Trace, a: Any) -> Value:
    """Computes log2(a), exact at powers of two, since users round it to buckets."""
    x = _float(trace, a)
    found = _mul(trace, _log(trace, x), 1 / math.log(2))
    near = trace.add("f", "round", found.node)
    is_power = _equal(trace, _exp2(trace, near), x)
    is_finite = _less(trace, _absolute(trace, found), 2000.0)
    exact = _bits("int_and")(trace, is_power, is_finite)
    error = _where(trace, exact, _sub(trace, near, found), 0.0)
    return _add(trace, found, trace.add("f", "detach", error.node))


def _exp2(trace: Trace, a: Any) -> Value:
    return trace.add("f", "pow", _float(trace, 2.0).node, _float(trace, a).node)


def _shift(trace: Trace, a: Any, bits: Any, op: Handler) -> Value:
    if not isinstance(bits, int) or not 0 <= bits < 31 or _is_float(a):
        return trace.fail("integers are shifted by a constant number of bits in [0, 31)")
    return op(trace, a, 1 << bits)


def _filled(value: float) -> Handler:
    return lambda trace, a, **_: trace.add(
        a.kind, "number" if a.kind == "f" else "integer", float(value) if a.kind == "f" else value
    )


#: Name of torch's method or function -> handler.
_NAMED: dict[str, Handler] = {
    "abs": _absolute,
    "neg": _negative,
    "add": _add,
    "sub": lambda trace, a, b: _sub(trace, a, b),
    "mul": _mul,
    "div": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "fmod": lambda trace, a, b: _sub(
        trace, a, _mul(trace, _divide(trace, a, b, rounding_mode="trunc"), b)
    ),
    "pow": _power,
    "square": lambda trace, a: _mul(trace, a, a),
    "reciprocal": lambda trace, a: _divide(trace, 1.0, a),
    "minimum": _minimum,
    "maximum": _maximum,
    "clamp": _clamp,
    "relu": lambda trace, a, inplace=False: _where(trace, _less_equal(trace, a, 0), 0.0, a),
    "where": _where,
    "masked_fill": lambda trace, a, mask, value: _where(trace, mask, value, a),
    "exp": _exp,
    "exp2": _exp2,
    "expm1": _unary("expm1"),
    "log": _log,
    "log2": _log2,
    "log1p": _log1p,
    "sqrt": _sqrt,
    "rsqrt": lambda trace, a: _divide(trace, 1.0, _sqrt(trace, a)),
    "tanh": _unary("tanh"),
    "sigmoid": _sigmoid,
    "sin": _unary("sin"),
    "cos": _unary("cos"),
    "erf": _unary("erf"),
    "floor": _floor,
    "ceil": lambda trace, a: _negative(trace, _floor(trace, _negative(trace, _float(trace, a)))),
    "round": _unary("round"),
    "trunc": _trunc,
    "sign": _unary("sign"),
    "logical_and": _logical("int_and"),
    "logical_or": _logical("int_or"),
    "logical_xor": _logical("int_xor"),
    "logical_not": lambda trace, a: _not(trace, _truth(trace, a)),
    "to": _to,
    "float": lambda trace, a: _float(trace, a),
    "double": lambda trace, a: _float(trace, a),
    "int": lambda trace, a: _cast(trace, a, torch.int32),
    "long": lambda trace, a: _cast(trace, a, torch.int64),
    "bool": _truth,
    "detach": lambda trace, a: trace.add("f", "detach", a.node) if a.kind == "f" else a,
    "clone": lambda trace, a: a,
    "zeros_like": _filled(0),
    "ones_like": _filled(1),
    "full_like": lambda trace, a, value, **_: _float(trace, value),
}
#: Alias or operator name -> handler.
_OTHER_NAMES: dict[str, Handler] = {
    "absolute": _absolute,
    "negative": _negative,
    "subtract": _sub,
    "multiply": _mul,
    "divide": _divide,
    "true_divide": _divide,
    "truediv": _divide,
    "floordiv": _floor_divide,
    "mod": _remainder,
    "clip": _clamp,
    "lt": _less,
    "le": _less_equal,
    "eq": _equal,
    "gt": lambda trace, a, b: _less(trace, b, a),
    "ge": lambda trace, a, b: _less_equal(trace, b, a),
    "ne": lambda trace, a, b: _not(trace, _equal(trace, a, b)),
    "less": _less,
    "less_equal": _less_equal,
    "greater": lambda trace, a, b: _less(trace, b, a),
    "greater_equal": lambda trace, a, b: _less_equal(trace, b, a),
    "not_equal": lambda trace, a, b: _not(trace, _equal(trace, a, b)),
    "and": _bits("int_and"),
    "or": _bits("int_or"),
    "xor": _bits("int_xor"),
    "invert": _not,
    "lshift": lambda trace, a, bits: _shift(trace, a, bits, _mul),
    "rshift": lambda trace, a, bits: _shift(trace, a, bits, _floor_divide),
    "bitwise_and": _bits("int_and"),
    "bitwise_or": _bits("int_or"),
    "bitwise_xor": _bits("int_xor"),
    "bitwise_not": _not,
    "pos": lambda trace, a: a,
    "min": _minimum,
    "max": _maximum,
    "clamp_min": _clamp,
    "clamp_max": lambda trace, a, max: _clamp(trace, a, max=max),
    "rsub": lambda trace, a, b: _sub(trace, b, a),
}
_REVERSED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_OPERATORS = (
    *_REVERSED,
    *("lshift", "rshift", "lt", "le", "eq", "gt", "ge", "ne", "neg", "pos", "abs", "invert"),
)


FUNCTIONS |= _NAMED | _OTHER_NAMES
for _name in _REVERSED:
    FUNCTIONS[f"r{_name}"] = lambda trace, a, b, name=_name: FUNCTIONS[name](trace, b, a)


def _method(name: str, reverse: bool = False) -> Callable[..., Any]:
    def method(self: Value, *args: Any, **kwargs: Any) -> Any:
        given = (*args, self) if reverse else (self, *args)
        return call_named(self.trace, name, given, kwargs)

    method.__name__ = name
    return method


for _name in FUNCTIONS:
    if _name not in ("and", "or", "not", "where"):
        setattr(Value, _name, _method(_name))
Value.where = lambda self, condition, other: _where(  # type: ignore[attr-defined]
    self.trace, condition, self, other
)
for _name in _OPERATORS:
    setattr(Value, f"__{_name}__", _method(_name))
for _name in _REVERSED:
    setattr(Value, f"__r{_name}__", _method(_name, reverse=True))
