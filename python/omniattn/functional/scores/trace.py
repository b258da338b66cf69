"""Values that act as 0-d tensors and record the operations applied to them.

Operators, methods and functions of torch that are called on such a value become nodes for
encoding/score_compiler.py; captured tensors become reads. torch.compile traces through this as
through any Python code, so that captured tensors are inputs of its graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from omniattn.checks.arguments import shown
from omniattn.encoding.score_program import Node

#: Handlers of torch functions called on traced values, by function name (traced.py).
FUNCTIONS: dict[str, Callable[..., Any]] = {}


class Trace:
    """Graph of the operations of a traced function, and the tensors that it captured."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype  # of floats
        self.nodes: list[Node] = []
        self.tensors: list[Tensor] = []

    def add(self, kind: str, *node: Any) -> Value:
        self.nodes.append(node)
        return Value(self, len(self.nodes) - 1, kind)

    def tensor(self, t: Tensor) -> int:
        for n, known in enumerate(self.tensors):
            if known is t:
                return n
        self.tensors.append(t)
        return len(self.tensors) - 1

    def fail(self, what: str) -> Any:
        # Operators, such as add and radd, are arithmetic.
        names = sorted(n for n in FUNCTIONS if not hasattr(Tensor, f"__{n}__"))
        raise NotImplementedError(
            f"{self.name}: {what}; allowed are arithmetic, comparisons, & | ^ ~, abs, "
            f"{', '.join(names)} of score, b, h, q and k, and captured tensors indexed by integers "
            "made of these"
        )


class Traced:
    """Base class of traced values: redirects torch functions and methods to the trace."""

    trace: Trace

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.untraced(name)

    def untraced(self, name: str) -> Any:
        """Raises an error for an attribute that does not exist."""
        return self.trace.fail(f"cannot trace {name}")


class Value(Traced):
    """A 0-d tensor of a trace; kind: "f" float, "i" integer or "b" truth value."""

    def __init__(self, trace: Trace, node: int, kind: str) -> None:
        self.trace = trace
        self.node = node
        self.kind = kind

    @property
    def dtype(self) -> torch.dtype:
        return {"f": self.trace.dtype, "i": torch.int64, "b": torch.bool}[self.kind]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(())

    ndim = 0

    def __bool__(self) -> bool:
        return bool(self.trace.fail("cannot branch on a value (if, and, or); use torch.where"))

    def __float__(self) -> float:
        return float(self.trace.fail("cannot make a Python number of a value"))

    def __matmul__(self, other: Any) -> Any:
        return self.untraced("@")

    __rmatmul__ = __matmul__
    __int__ = __index__ = item = __float__
    __hash__ = object.__hash__


class Rows(Traced):
    """A captured tensor with some leading dimensions indexed."""

    def __init__(self, trace: Trace, t: Tensor, index: tuple[Any, ...]) -> None:
        self.trace = trace
        self.t = t
        self.index = index

    def untraced(self, name: str) -> Any:
        return lift(self.trace, self)

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        return read(self.trace, self.t, (*self.index, *more))


def indexes(function: Any) -> bool:
    """Returns True if a function is x[i]; torch.compile has two forms of it."""
    return function is Tensor.__getitem__ or function is operator.getitem


def call(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Records a torch function with a Value among its arguments."""
    trace = trace_of((*args, *kwargs.values()))
    assert trace is not None
    if indexes(function):
        t, index = args
        return read(trace, t, index if isinstance(index, tuple) else (index,))
    name = function.__name__
    for known in (name, name[2:-2]):  # x + y may come as add or as __add__
        if known in FUNCTIONS:
            return call_named(trace, known, args, kwargs)
    return trace.fail(f"cannot trace {name}")


def call_named(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return FUNCTIONS[name](trace, *args, **kwargs)
    except (AttributeError, TypeError):
        given = ", ".join([*(type(a).__name__ for a in args), *(f"{key}=..." for key in kwargs)])
        return trace.fail(f"cannot trace {name}({given})")


def trace_of(args: Any) -> Trace | None:
    for a in args:
        if isinstance(a, Traced):
            return a.trace
        if isinstance(a, (tuple, list)):
            found = trace_of(a)
            if found is not None:
                return found
    return None


def is_real(x: Any) -> bool:
    """Returns True if x is a non-integer number type of Python or numpy."""
    if type(x) in (int, float):  # faster than checks of abstract classes
        return type(x) is float
    return isinstance(x, Real) and not isinstance(x, Integral)


def lift(trace: Trace, x: Any) -> Value:
    if isinstance(x, Value):
        return x
    if isinstance(x, Tensor):
        if x.dim() != 0:
            return trace.fail(
                f"captured tensors must be indexed in all dimensions, got shape {tuple(x.shape)}"
            )
        return read(trace, x, ())
    if isinstance(x, bool):
        return trace.add("b", "integer", int(x))
    if isinstance(x, Integral):
        x = int(x)
        if not -(2**31) <= x < 2**31:
            return trace.fail(f"integers must have 32 bits, got {x}")
        return trace.add("i", "integer", x)
    if is_real(x):
        return trace.add("f", "number", float(x))
    if isinstance(x, Rows):
        return trace.fail(
            f"captured tensors must be indexed in all dimensions, got {len(x.index)} indices of "
            f"shape {tuple(x.t.shape)}"
        )
    return trace.fail(f"cannot use {shown(x)}")


def read(trace: Trace, t: Tensor, index: tuple[Any, ...]) -> Any:
    values = [lift(trace, i) for i in index]
    if len(values) > t.dim() or any(v.kind != "i" for v in values):
        return trace.fail(
            f"captured tensors must be indexed by integers, at most one for each dimension, got "
            f"{len(values)} of shape {tuple(t.shape)}"
        )
    if len(values) < t.dim():
        return Rows(trace, t, tuple(values))
    if t.is_complex():
        return trace.fail(f"captured tensors must be real, got {t.dtype}")
    kind = "f" if t.is_floating_point() else "b" if t.dtype == torch.bool else "i"
    return trace.add(kind, "tensor", trace.tensor(t), *[v.node for v in values])
