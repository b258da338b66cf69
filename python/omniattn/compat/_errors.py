"""Errors that name an alias of another library and the alias's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import (
    FLOATS,
    require_bool,
    require_device,
    require_float,
    require_integers,
    require_shape,
    require_strided,
    require_tensor,
    shown,
)

_ERRORS = (TypeError, ValueError, NotImplementedError, RuntimeError)


@contextmanager
def errors_of(op: str, **names: str) -> Iterator[None]:
    """Rewrites errors of `omniattn.functional` to name the alias `op`.

    `names` maps arguments to the alias's names if they differ.
    """
    try:
        yield
    except _ERRORS as error:
        function, _, message = str(error).partition(": ")
        if type(error) not in _ERRORS or function not in functional.__all__:
            raise
        message = re.sub(r"\b[A-Za-z_]+\b", lambda word: names.get(word[0], word[0]), message)
        raise type(error)(f"{op}: {message}") from None


@contextmanager
def errors_as(op: str, alias: str) -> Iterator[None]:
    """Rewrites errors of the alias `alias` to name `op`, which calls it."""
    try:
        yield
    except _ERRORS as error:
        function, colon, message = str(error).partition(": ")
        if type(error) not in _ERRORS or function != alias:
            raise
        raise type(error)(f"{op}{colon}{message}") from None


def require_real(op: str, **tensors: Tensor) -> None:
    """Requires floating-point tensors."""
    for name, t in tensors.items():
        require_float(op, name, t)
        require_strided(op, name, t)


def require_optional(op: str, **tensors: Tensor | None) -> None:
    """Requires floating-point tensors or None."""
    require_real(op, **{name: t for name, t in tensors.items() if t is not None})


def require_numbers(op: str, **tensors: Tensor) -> None:
    """Requires real or complex tensors."""
    for name, t in tensors.items():
        require_tensor(op, name, t)
        if not t.is_complex():
            require_float(op, name, t)
        require_strided(op, name, t)


def require_writable(op: str, name: str, t: Tensor) -> None:
    """Requires that no elements of `t` share memory, as in expanded tensors."""
    if any(step == 0 and size > 1 for step, size in zip(t.stride(), t.shape, strict=True)):
        raise ValueError(
            f"{op}: {name} must not share memory among elements, got {name}.stride()={t.stride()}"
        )


def require_form(op: str, name: str, t: Tensor, form: str) -> None:
    """Requires that `t` has the number of dimensions of `form`, such as "B, D, T"."""
    if t.ndim != form.count(",") + 1:
        raise ValueError(
            f"{op}: {name} must have shape ({form}), got {name}.shape={tuple(t.shape)}"
        )


def require_flags(op: str, **flags: object) -> None:
    for name, value in flags.items():
        require_bool(op, name, value)


def require_state_dtype(op: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(
            f"{op}: state_dtype must be None, float64, float32, bfloat16 or float16, got "
            f"state_dtype={shown(dtype)}"
        )


def require_index(
    op: str, name: str, index: Tensor, shape: tuple[int, ...], x: Tensor, x_name: str = "x"
) -> None:
    """Requires integers of this shape on the device of `x`."""
    require_integers(op, name, index)
    require_shape(op, name, index, shape)
    require_device(op, name, index, x, x_name)
