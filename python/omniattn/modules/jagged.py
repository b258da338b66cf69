"""Jagged nested tensors (B, j, ..., dim), sequences of any lengths without padding, in layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from omniattn import functional

Forward = TypeVar("Forward", bound=Callable[..., Any])


@dataclass(frozen=True)
class Sequences:
    """The sequences of a call: entries of a batch (B, T, ...) or, of a nested tensor, parts of one.

    A layer computes on (B, T, ...) in either case. The tokens of a nested tensor are (1, total,
    ...) there, all sequences one after another, which `attention` keeps apart.
    """

    nested: Any = None

    @property
    def longest(self) -> int:
        """Length of the longest part: what the nested tensor knows of it, or else is read."""
        length: int | None = self.nested._maybe_max_seqlen
        if length is None:
            length = self.nested._get_max_seqlen()
            assert length is not None
        return length

    @property
    def _bound(self) -> int:
        """The same; all tokens in a compiled graph that would have to be left to read it."""
        if is_compiling() and self.nested._maybe_max_seqlen is None:
            return len(self.nested.values())
        return self.longest

    def attention(self, source: Sequences | None = None) -> Callable[..., Any]:
        """functional.attention of queries of these sequences and keys of those of `source`."""
        if self.nested is None:
            return functional.attention
        keys = self if source is None else source
        return partial(
            _packed_attention,
            cu_seqlens_q=self.nested.offsets(),
            cu_seqlens_k=keys.nested.offsets(),
            max_seqlen_q=self._bound,
            max_seqlen_k=keys._bound,
        )

    def lengths(self, t: Tensor) -> Tensor:
        """Of t (1, total, ...), for each token the length of its sequence (1, total)."""
        offsets = self.nested.offsets()
        tokens = torch.arange(t.shape[1], dtype=offsets.dtype, device=t.device)
        return offsets.diff()[torch.searchsorted(offsets[1:-1], tokens, right=True)][None]

    def padded(self, t: Tensor) -> Tensor:
        """t (1, total, ...) as a batch (N, longest, ...), with anything after a sequence's end."""
        if self.nested is None:
            return t
        rows = self.nested.offsets()[:-1, None] + torch.arange(self.longest, device=t.device)
        return t[0, rows.clamp(max=t.shape[1] - 1)]

    def restored(self, t: Tensor) -> Tensor:
        """t (B, T, ...), nested if the argument of the call was."""
        return t if self.nested is None else _with_boundaries(t[0], self.nested)


def sequences_of(
    op: str, name: str, x: Tensor, *, state: object = None, beside: Sequences | None = None
) -> tuple[Tensor, Sequences]:
    """x as (B, T, ...) and its sequences; it must be nested where those of the queries, `beside`,
    are, and then has no state."""
    nested = x.is_nested if beside is None else beside.nested is not None
    if not nested:
        return x, Sequences()
    _require_ragged(op, name, x)
    if state is not None:
        raise ValueError(f"{op}: state must be None where {name} is nested, got {state!r}")
    return x.values()[None], Sequences(x)


def _packed_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """functional.attention_varlen of q, k, v (1, total, H, D)."""
    result: Any = functional.attention_varlen(q[0], k[0], v[0], **options)
    return tuple(t[None] for t in result) if isinstance(result, tuple) else result[None]


def _require_ragged(op: str, name: str, t: Any) -> None:
    ragged = t.is_nested and t.layout == torch.jagged
    if not ragged or t.lengths() is not None or t._ragged_idx != 1 or t.dim() < 3:
        got = f"shape={t.shape}" if ragged else f"layout={t.layout}"
        raise ValueError(
            f"{op}: {name} must be a jagged nested tensor (B, j, ..., dim) without holes in a call "
            f"on nested tensors, got {name}.{got}"
        )


def _with_boundaries(values: Tensor, like: Any) -> Tensor:
    """These values as a nested tensor with the boundaries of `like`, and what it knows of them."""
    return torch.nested.nested_tensor_from_jagged(
        values,
        like.offsets(),
        min_seqlen=like._maybe_min_seqlen,
        max_seqlen=like._maybe_max_seqlen,
    )


def token_wise(forward: Forward) -> Forward:
    """Makes a forward that treats each token alone take jagged nested tensors too.

    It is given their values, and what it returns gets the boundaries of x. Further tensors must be
    of the same sequences. Linear is not such a layer: those that need the structure of a sequence
    begin with one, whose refusal of nested tensors is theirs.
    """

    @wraps(forward)
    def on_values(self: Any, x: Tensor, *beside: Any, **named: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_nested:
            return forward(self, x, *beside, **named)
        op = type(self).__name__
        _require_ragged(op, "x", x)

        def values(t: Any) -> Any:
            if t is None:
                return None
            if not t.is_nested or t.shape[:2] != x.shape[:2]:
                raise ValueError(
                    f"{op}: all tensors must be jagged with the boundaries of x, "
                    f"got x.shape={x.shape} and {t.shape}"
                )
            return t.values()

        named = {name: values(t) for name, t in named.items()}
        y = forward(self, values(x), *map(values, beside), **named)
        if isinstance(y, tuple):
            return tuple(_with_boundaries(t, x) for t in y)
        return _with_boundaries(y, x)

    return cast(Forward, on_values)
