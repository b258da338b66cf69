"""Jagged nested tensors (B, j, ..., dim): batches of sequences of different lengths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from omniattn.checks.arguments import is_traced, require_tensor, shown
from omniattn.checks.keywords import in_place_of, suggest_keyword
from omniattn.ops.dispatch.ranks import require_whole

F = TypeVar("F", bound=Callable[..., Any])


def is_jagged(x: object) -> bool:
    """Returns True if x is a nested tensor."""
    return isinstance(x, Tensor) and x.is_nested


def require_ragged(op: str, name: str, t: Any, *, dim: bool | None = True) -> None:
    """Requires a nested tensor without holes: its values are exactly the rows of its sequences.

    With `dim` False a row must be a number, with None it may be one.
    """
    ragged = t.is_nested and t.layout == torch.jagged
    sizes = dim is None or (t.dim() >= 3 if dim else t.dim() == 2)
    if not ragged or t.lengths() is not None or t._ragged_idx != 1 or not sizes:
        shape = {True: "(B, j, ..., dim)", False: "(B, j)", None: "(B, j, ...)"}[dim]
        got = f"shape={t.shape}" if ragged else f"layout={t.layout}"
        raise ValueError(
            f"{op}: {name} must be a jagged nested tensor {shape} without holes in a call on "
            f"nested tensors, got {name}.{got}"
        )


def same_boundaries(a: Any, b: Any) -> bool:
    """Returns True if two nested tensors have the same boundaries.

    Equal boundaries made by two calls have different symbols in their shapes, so their values are
    compared; a trace cannot do that.
    """
    if a.shape[:2] == b.shape[:2]:
        return True
    return not is_traced() and torch.equal(a.offsets(), b.offsets().to(a.offsets()))


def longest(nested: Any) -> int:
    """Returns the length of the longest sequence, read from the offsets if not cached."""
    length: int | None = nested._maybe_max_seqlen
    if length is None:
        length = nested._get_max_seqlen()
        assert length is not None
    return length


def length_bound(nested: Any) -> int:
    """Returns an upper bound of the sequence lengths.

    The bound is `longest`, or the number of tokens if it is not cached in a compiled graph, where
    reading the offsets would break the graph.
    """
    if is_compiling() and nested._maybe_max_seqlen is None:
        return len(nested.values())
    return longest(nested)


def with_boundaries(values: Tensor, like: Any) -> Tensor:
    """Wraps `values` in a nested tensor with the offsets and cached lengths of `like`."""
    return torch.nested.nested_tensor_from_jagged(
        values,
        like.offsets(),
        min_seqlen=like._maybe_min_seqlen,
        max_seqlen=like._maybe_max_seqlen,
    )


def token_wise(
    *others: str, numbers: Sequence[str] = (), batched: bool = False
) -> Callable[[F], F]:
    """Makes a token-wise function accept jagged nested tensors, too.

    The function gets the values (total, ...), or with `batched` (1, total, ...), of its first
    argument and of the arguments `others` and `numbers`, which must have the same boundaries.
    Arguments in `numbers` may have one number per token. Results per token get the same boundaries;
    a scalar result covers all tokens.
    """

    def decorate(function: F) -> F:
        first = next(iter(inspect.signature(function).parameters))
        tokens = (first, *others, *numbers)
        return _on_values(function, tokens, (), numbers, batched=batched, packed=False)

    return decorate


def over_sequences(*tokens: str, either: Sequence[str] = ()) -> Callable[[F], F]:
    """Makes a function of packed sequences accept jagged nested tensors instead of cu_seqlens.

    The function gets cu_seqlens and the values (1, total, ...) of the arguments `tokens`, which
    must have the same boundaries; arguments in `either` may also be ordinary tensors. The output
    gets the same boundaries. A returned state has one entry per sequence.
    """

    def decorate(function: F) -> F:
        return _on_values(function, tokens, either, (), batched=True, packed=True)

    return decorate


def _on_values(
    function: F,
    tokens: Sequence[str],
    either: Sequence[str],
    numbers: Sequence[str],
    *,
    batched: bool,
    packed: bool,
) -> F:
    """Wraps `function`, calling it with values if the first of `tokens` is nested; see above."""
    op, names = function.__name__, list(inspect.signature(function).parameters)
    first, at = tokens[0], names.index(tokens[0])

    def called(*args: Any, **named: Any) -> Any:
        x: Any = args[at] if len(args) > at else named.get(first)
        call = of_nested if isinstance(x, Tensor) and x.is_nested else function
        if is_compiling():
            return call(*args, **named)
        if packed:
            require_whole(op)
        try:
            return call(*args, **named)
        except TypeError as error:
            suggest_keyword(error, function, named)
            raise

    def of_nested(*args: Any, **named: Any) -> Any:
        x: Any = args[at] if len(args) > at else named.get(first)
        require_ragged(op, first, x)
        if packed and named.get("cu_seqlens") is not None:
            raise ValueError(
                f"{op}: cu_seqlens must be None where {first} is nested, "
                f"got cu_seqlens={shown(named['cu_seqlens'])}"
            )

        def values(name: str, t: Any) -> Any:
            if t is None or (name not in tokens and not (name in either and is_jagged(t))):
                return t
            require_tensor(op, name, t)
            if is_jagged(t):
                require_ragged(op, name, t, dim=None if name in numbers else True)
            if not is_jagged(t) or not same_boundaries(t, x):
                raise ValueError(
                    f"{op}: {name} must be jagged with the boundaries of {first}, "
                    f"got {name}.shape={t.shape}, {first}.shape={x.shape}"
                )
            return t.values()[None] if batched else t.values()

        def restored(t: Tensor | None) -> Tensor | None:
            if t is None or t.dim() == 0:
                return t
            return with_boundaries(t[0] if batched else t, x)

        given = [values(name, t) for name, t in zip(names, args, strict=False)]
        named = {name: values(name, t) for name, t in named.items()}
        if packed:
            named["cu_seqlens"] = x.offsets()
        y = function(*given, **named)
        if not isinstance(y, tuple):
            return restored(y)
        return (restored(y[0]), *y[1:]) if packed else tuple(map(restored, y))

    return cast(F, in_place_of(function, called))
