"""Jagged nested tensors (B, j, ..., dim): sequences of any lengths, without padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

F = TypeVar("F", bound=Callable[..., Any])


def is_jagged(x: object) -> bool:
    """Whether x is a nested tensor."""
    return isinstance(x, Tensor) and x.is_nested


def require_ragged(op: str, name: str, t: Any) -> None:
    """`t` must be a nested tensor whose values are the rows of its sequences and no others."""
    ragged = t.is_nested and t.layout == torch.jagged
    if not ragged or t.lengths() is not None or t._ragged_idx != 1 or t.dim() < 3:
        got = f"shape={t.shape}" if ragged else f"layout={t.layout}"
        raise ValueError(
            f"{op}: {name} must be a jagged nested tensor (B, j, ..., dim) without holes in a call "
            f"on nested tensors, got {name}.{got}"
        )


def longest(nested: Any) -> int:
    """Length of the longest sequence: what the nested tensor knows of it, or else is read."""
    length: int | None = nested._maybe_max_seqlen
    if length is None:
        length = nested._get_max_seqlen()
        assert length is not None
    return length


def length_bound(nested: Any) -> int:
    """The same; all tokens in a compiled graph that would have to be left to read it."""
    if is_compiling() and nested._maybe_max_seqlen is None:
        return len(nested.values())
    return longest(nested)


def with_boundaries(values: Tensor, like: Any) -> Tensor:
    """These values as a nested tensor with the boundaries of `like`, and what it knows of them."""
    return torch.nested.nested_tensor_from_jagged(
        values,
        like.offsets(),
        min_seqlen=like._maybe_min_seqlen,
        max_seqlen=like._maybe_max_seqlen,
    )


def token_wise(*others: str, batched: bool = False) -> Callable[[F], F]:
    """Makes a function that treats each token alone take jagged nested tensors too.

    It is given the values of its first argument and of `others`, which must be of the same
    sequences: (total, ...), or with `batched` (1, total, ...). What it returns gets their
    boundaries.
    """

    def decorate(function: F) -> F:
        op, names = function.__name__, list(inspect.signature(function).parameters)

        @wraps(function)
        def on_values(*args: Any, **named: Any) -> Any:
            x: Any = args[0] if args else named.get(names[0])
            if not is_jagged(x):
                return function(*args, **named)
            require_ragged(op, names[0], x)

            def values(name: str, t: Any) -> Any:
                if t is None or (name not in others and name != names[0]):
                    return t
                if not is_jagged(t) or t.shape[:2] != x.shape[:2]:
                    raise ValueError(
                        f"{op}: {name} must be jagged with the boundaries of {names[0]}, "
                        f"got {name}.shape={t.shape}, {names[0]}.shape={x.shape}"
                    )
                return t.values()[None] if batched else t.values()

            def restored(t: Tensor | None) -> Tensor | None:
                return t if t is None else with_boundaries(t[0] if batched else t, x)

            y = function(
                *(values(name, t) for name, t in zip(names, args, strict=False)),
                **{name: values(name, t) for name, t in named.items()},
            )
            return tuple(map(restored, y)) if isinstance(y, tuple) else restored(y)

        return cast(F, on_values)

    return decorate
