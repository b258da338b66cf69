"""Calls of native ops by position, compiled where the build could (csrc/calls).

The compiled module needs the versions of Python and torch that it was built for. Without it, as in
wheels of the package index or after an upgrade of torch, calls are made through torch's Python and
take 1 to 2 us more each.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

import torch

from omniattn import config
from omniattn.ops.dispatch import library

__all__ = [
    "compiled",
    "compiled_attempt",
    "compiled_call",
    "compiled_record",
    "why_not_compiled",
]

_FILE = f"_calls_{torch.__version__.partition('+')[0].replace('.', '_')}{EXTENSION_SUFFIXES[0]}"


def why_not_compiled() -> str | None:
    """Returns why calls are made in Python, or None if they are compiled."""
    if not config.COMPILED_CALLS:
        return "OMNIATTN_COMPILED_CALLS=0"
    return f"this build of omniattn has no {_FILE}" if library.find(_FILE) is None else None


def _load() -> Any:
    """Returns the module for this Python and this version of torch, or None."""
    path = library.find(_FILE) if config.COMPILED_CALLS else None
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location(f"omniattn.{path.name.partition('.')[0]}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: The compiled module, or None.
compiled = _load()


def compiled_call(name: str, other: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the compiled call of an op, or `other`, which makes it in Python."""
    return other if compiled is None else compiled.op_call(f"omniattn::{name}", other)


def compiled_attempt(
    name: str, outputs: int, other: Callable[..., Any], record: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the compiled `DifferentiableOp.attempt` of an op that returns its leading `outputs`
    (all for 0), with gradients that of `record`; or `other`, which takes further calls."""
    if compiled is None:
        return other
    return compiled.op_attempt(f"omniattn::{name}", outputs, other, record)


def compiled_record(
    name: str,
    outputs: int,
    other: Callable[..., Any],
    owner: object,
    saved: tuple[int, ...],
    kept: tuple[int, ...],
    backward: tuple[str | None, tuple[int, ...], tuple[int, ...]],
) -> Callable[..., Any]:
    """Returns the compiled call with gradients of an op that returns its leading `outputs`, or
    `other`.

    It saves the values `saved` and `kept` of (*arguments, *outputs). `backward` is the name of the
    op for first derivatives (None to ask `owner.gradients_of_call`), the places of its arguments
    (`Plan.readable`), and for each tensor among the arguments the output that is its gradient.
    """
    if compiled is None:
        return other
    op, take, gives = backward
    op = None if op is None else f"omniattn::{op}"
    return compiled.op_record(
        f"omniattn::{name}", outputs, other, owner, saved, kept, op, take, gives
    )
