"""Ops of the `omniattn` namespace whose kernels are functions in Python, for every device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from omniattn.ops import _library
from omniattn.reference.precision import compute_dtype

__all__ = ["define"]

_fragment = torch.library.Library("omniattn", "FRAGMENT")


def define(
    name: str,
    arguments: str,
    outputs: str,
    kernel: Callable[..., Any],
    dims: Mapping[str, int],
    *,
    differentiable: bool = False,
) -> None:
    """Registers `kernel` as the op `name(arguments) -> (outputs)`, without autocast and gradients.

    `dims` has the number of dimensions of each tensor. Tensors must be strided, on the device of
    the first one that is no `grad_`, and of its dtype or compute dtype, or integers. A
    differentiable op gets the `<name>_raw` that `DifferentiableOp` calls.
    """
    names = [name, f"{name}_raw"] if differentiable else [name]
    leader = next(place for place, n in enumerate(dims) if not n.startswith("grad_"))

    def checked(*args: Any) -> Any:
        lead: Tensor = args[leader]
        for argument, value in zip(dims, args, strict=False):
            if isinstance(value, Tensor):
                _require(name, args, argument, value, lead, dims[argument])
        if lead.is_meta:
            return kernel(*args)
        with torch.no_grad(), torch.autocast(lead.device.type, enabled=False):
            return kernel(*args)

    for each in names:
        _fragment.define(f"{each}({arguments}) -> ({outputs})")
        _fragment.impl(each, checked, "CompositeExplicitAutograd")


def _require(
    name: str, args: tuple[Any, ...], argument: str, t: Tensor, lead: Tensor, dims: int
) -> None:
    """Requires what memory accesses and dtypes of results depend on."""
    op = _library.public_name(name, args)
    if t.layout != torch.strided:
        raise TypeError(f"{op}: {argument} must be strided, got {argument}.layout={t.layout}")
    known = (lead.dtype, compute_dtype(lead), torch.int32, torch.int64)
    if t.dtype not in known or t.dtype.is_complex:
        raise TypeError(
            f"{op}: {argument} must have the dtype {lead.dtype} or {compute_dtype(lead)}, "
            f"got {argument}.dtype={t.dtype}"
        )
    if t.dim() != dims:
        raise ValueError(
            f"{op}: {argument} must have {dims} dimensions, got {argument}.shape={tuple(t.shape)}"
        )
    if t.device != lead.device:
        raise ValueError(
            f"{op}: {argument} must be on the device {lead.device}, "
            f"got {argument}.device={t.device}"
        )
