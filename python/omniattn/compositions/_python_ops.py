"""Ops of the `omniattn` namespace whose kernels are functions in Python, for every device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from omniattn.ops.dispatch import library as _library
from omniattn.reference.precision import compute_dtype

__all__ = ["define", "implement", "recomputed"]

_fragment = torch.library.Library("omniattn", "FRAGMENT")
#: Arguments of integers.
_INTEGERS = ("cu_seqlens", "position")


def define(
    name: str,
    arguments: str,
    outputs: str,
    kernel: Callable[..., Any],
    shapes: Mapping[str, str],
    *,
    differentiable: bool = False,
) -> None:
    """Registers `kernel` as the op `name(arguments) -> (outputs)`, without autocast and gradients.

    For `shapes` see `_checked`. A differentiable op gets the `<name>_raw` that `DifferentiableOp`
    calls.
    """
    for each in _names(name, differentiable):
        _fragment.define(f"{each}({arguments}) -> ({outputs})")
        _fragment.impl(each, _checked(name, kernel, shapes), "CompositeExplicitAutograd")


def implement(
    name: str,
    kernel: Callable[..., Any],
    shapes: Mapping[str, str],
    *,
    differentiable: bool = False,
) -> None:
    """Registers `kernel` as the op `name` of csrc/ops on devices that have no kernel for it."""
    for each in _names(name, differentiable):
        for device in ("cpu", "cuda"):
            _library.stand_in(each, device, _checked(name, kernel, shapes))


def _names(name: str, differentiable: bool) -> list[str]:
    return [name, f"{name}_raw"] if differentiable else [name]


def _checked(
    name: str, kernel: Callable[..., Any], shapes: Mapping[str, str]
) -> Callable[..., Any]:
    """Returns `kernel` without autocast and gradients, and with checks of its arguments.

    `shapes` has the names of the sizes of each tensor; one name is one size. Tensors must be
    strided, with memory, on the device of the first one that is no `grad_`, and of its dtype or
    compute dtype, except integers.
    """
    leader = next(place for place, n in enumerate(shapes) if not n.startswith("grad_"))

    def call(*args: Any) -> Any:
        for argument, value in zip(_library.arguments(name), args, strict=False):
            if value is None and isinstance(argument.type, torch.TensorType):
                raise TypeError(
                    f"{name}: {argument.name} must be a tensor, got {argument.name}=None"
                )
        lead: Tensor = args[leader]
        sizes: dict[str, int] = {}
        for argument, value in zip(shapes, args, strict=False):
            if isinstance(value, Tensor):
                _require(name, args, argument, value, lead)
                _require_shape(name, args, argument, value, shapes[argument], sizes)
        if lead.is_meta:
            return kernel(*args)
        with torch.no_grad(), torch.autocast(lead.device.type, enabled=False):
            return kernel(*args)

    return call


def _require(name: str, args: tuple[Any, ...], argument: str, t: Tensor, lead: Tensor) -> None:
    """Requires what memory accesses and dtypes of results depend on."""
    op = partial(_library.public_name, name, args)  # found for an error only
    if t.layout != torch.strided:
        raise TypeError(f"{op()}: {argument} must be strided, got {argument}.layout={t.layout}")
    if argument in _INTEGERS:
        known = [torch.int32, torch.int64]
    else:
        known = [lead.dtype, compute_dtype(lead)]
    if t.dtype not in known or (argument not in _INTEGERS and not t.is_floating_point()):
        names = " or ".join(map(str, known))
        raise TypeError(
            f"{op()}: {argument} must have the dtype {names}, got {argument}.dtype={t.dtype}"
        )
    if t.device != lead.device:
        raise ValueError(
            f"{op()}: {argument} must be on the device of the first argument={lead.device}, "
            f"got {argument}.device={t.device}"
        )
    if not t.is_meta and t.numel() > 0:
        last = t.storage_offset() + sum(
            (n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)
        )
        if t.untyped_storage().nbytes() < (last + 1) * t.element_size():
            raise RuntimeError(f"{op()}: {argument} must be a tensor with memory of its own")


def _require_shape(
    name: str,
    args: tuple[Any, ...],
    argument: str,
    t: Tensor,
    shape: str,
    sizes: dict[str, int],
) -> None:
    """Requires the sizes of other tensors, and adds those that are new."""
    wanted = shape.split()
    if t.dim() == len(wanted) and all(
        sizes.setdefault(letter, size) == size for letter, size in zip(wanted, t.shape, strict=True)
    ):
        return
    known = ", ".join(str(sizes.get(letter, letter)) for letter in wanted)
    raise ValueError(
        f"{_library.public_name(name, args)}: {argument} must have the shape ({known}), "
        f"got {argument}.shape={tuple(t.shape)}"
    )


@contextmanager
def _recording() -> Iterator[None]:
    """Records operations for autograd, also in a kernel that runs below it, as under a trace."""
    below = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with below, torch.enable_grad():
        yield


def recomputed(
    forward: Callable[..., tuple[Tensor, ...]], outputs: int, inputs: int
) -> Callable[..., tuple[Tensor, ...]]:
    """Returns the backward of an op by autograd through `forward`, which it runs again.

    It takes the gradients of the outputs, and the arguments of `forward`, the first `inputs` of
    which are tensors that have gradients, or None, whose gradients are empty.
    """

    def backward(*values: Any) -> tuple[Tensor, ...]:
        grads, arguments = values[:outputs], values[outputs:]
        given = [
            t.detach().requires_grad_() if isinstance(t, Tensor) else None
            for t in arguments[:inputs]
        ]
        leaves = [t for t in given if t is not None]
        with _recording():
            out = forward(*given, *arguments[inputs:])
        found: Iterator[Tensor | None] = iter([None] * len(leaves))
        pairs = [
            (t, g) for t, g in zip(out, grads, strict=True) if g is not None and t.requires_grad
        ]
        if pairs:
            outs, incoming = zip(*pairs, strict=True)
            with _recording():  # checkpoints run again
                found = iter(torch.autograd.grad(outs, leaves, incoming, allow_unused=True))
        results = []
        for t in given:
            if t is None:
                results.append(leaves[0].new_empty(0))
                continue
            grad = next(found)
            results.append(torch.zeros_like(t) if grad is None else grad.contiguous())
        return tuple(results)

    return backward
