"""Tells which calls and tensors are plain, and so take the shortest way to the native op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled, _is_tracing
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from omniattn.ops.dispatch.calls import compiled
from omniattn.ops.dispatch.ranks import ACTIVE

__all__ = [
    "PLAIN",
    "any_dual",
    "are_alike",
    "is_eager",
    "is_plain",
    "is_transformed",
    "may_need_gradient",
]

#: Classes whose tensors always have values; checked first, since isinstance costs 0.1 us a class.
PLAIN = frozenset((Tensor, torch.nn.Parameter))


def any_dual(args: tuple[Any, ...]) -> bool:
    """Returns True if a tensor, also one in a list, has a tangent of forward mode."""
    unpack = forward_ad.unpack_dual
    flat = (t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)))
    return any(isinstance(t, Tensor) and unpack(t).tangent is not None for t in flat)


def is_transformed(*args: Any) -> bool:
    """Returns True if a call is compiled, under a functorch transform or has tangents."""
    return (
        is_compiling()
        or peek_interpreter_stack() is not None
        or (forward_ad._current_level >= 0 and any_dual(args))
    )


def is_eager() -> bool:
    """True in a call outside of compilation, forward mode and split sequences."""
    return not is_compiling() and forward_ad._current_level < 0 and ACTIVE.region is None


def is_plain(x: Tensor | None, *others: Tensor | None) -> bool:
    """True for tensors of torch's own classes on the CPU in an eager call without autocast, modes,
    transforms and split sequences.

    Native ops check all else that their memory accesses depend on.
    """
    return is_eager() and _are_plain(x, *others)


def _are_plain_in_python(x: Tensor | None, *others: Tensor | None) -> bool:
    tensors = (x, *others)
    if x is None or peek_interpreter_stack() is not None or has_torch_function(tensors):
        return False
    if _is_any_autocast_enabled():
        return False
    for t in tensors:
        if t is not None and not (type(t) in PLAIN and t.is_cpu and not t.is_nested):
            return False
    return True


_are_plain = _are_plain_in_python if compiled is None else compiled.are_plain


def are_alike(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """True for strided CPU tensors of this dtype and of torch's own classes, in less time than the
    checks that name the one which is not."""
    for t in tensors:
        if type(t) not in PLAIN or t.dtype != dtype or t.is_nested:
            return False
        if not t.is_cpu or t.layout != torch.strided:
            return False
    return True


def may_need_gradient(t: Tensor) -> bool:
    """Returns True if a gradient of `t` may be requested; unknown inside vmap and for traces."""
    return t.requires_grad or peek_interpreter_stack() is not None or _is_tracing()
