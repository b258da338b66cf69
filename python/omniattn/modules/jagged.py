"""Jagged nested tensors (B, j, ..., dim), sequences of any lengths without padding, in layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Forward = TypeVar("Forward", bound=Callable[..., Any])


def boundaries(op: str, name: str, t: Any) -> Tensor:
    """Where the sequences of a nested tensor begin and end in its values."""
    ragged = t.is_nested and t.layout == torch.jagged
    if not ragged or t.lengths() is not None or t._ragged_idx != 1 or t.dim() < 3:
        raise ValueError(
            f"{op}: {name} must be a jagged nested tensor (B, j, ..., dim) without holes where x "
            f"is nested, got {name}.{f'shape={t.shape}' if ragged else f'layout={t.layout}'}"
        )
    offsets: Tensor = t.offsets()
    return offsets


def token_wise(forward: Forward) -> Forward:
    """Makes a forward that treats each token alone take jagged nested tensors too.

    It is given their values, and what it returns gets the boundaries of x. Tensors beside x must be
    of the same sequences. Linear is not such a layer: those that need the structure of a sequence
    begin with one, whose refusal of nested tensors is theirs.
    """

    @wraps(forward)
    def on_values(self: Any, x: Tensor, *beside: Any, **named: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_nested:
            return forward(self, x, *beside, **named)
        op = type(self).__name__
        offsets = boundaries(op, "x", x)

        def values(t: Any) -> Any:
            if t is None:
                return None
            if not t.is_nested or t.shape[:2] != x.shape[:2]:
                raise ValueError(
                    f"{op}: all tensors must be jagged with the boundaries of x, "
                    f"got x.shape={x.shape} and {t.shape}"
                )
            return t.values()

        def nested(t: Tensor) -> Tensor:
            return torch.nested.nested_tensor_from_jagged(t, offsets)

        named = {name: values(t) for name, t in named.items()}
        y = forward(self, values(x), *map(values, beside), **named)
        return tuple(map(nested, y)) if isinstance(y, tuple) else nested(y)

    return cast(Forward, on_values)
