"""The options that all forms of attention share, written once.

Type checkers and editors read the TypedDicts, calls become an `Options`, which has the defaults,
and `spelled_out` shows both in help(). `functional.attention` says what each option means.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar

import torch
from torch import Tensor

Normaliser: TypeAlias = Literal["softmax", "sigmoid", "relu2"]

#: g of the option c that replaces scores s by c g(s / c); 0 is off
TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {"softcap": torch.tanh}
#: weights that are functions of one logit each
NORMALISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "relu2": lambda s: torch.relu(s).square(),
}

F = TypeVar("F", bound=Callable[..., Any])


class MaskLike(Protocol):
    """A mask that is not a tensor, a value of `functional.masks`."""

    def visible(self, tq: int, tk: int, device: torch.device, heads: int) -> Tensor:
        """Boolean, True = attend, broadcastable to (B, Hq, Tq, Tk)."""

    def of_sequence(self, n: int, tq: int, tk: int) -> MaskLike:
        """The mask of sequence n of a packed or cached batch, which has its own lengths."""


class TermLike(Protocol):
    """A term of the logits, a value of `functional.scores`."""

    def term(self, tq: int, tk: int, dtype: torch.dtype) -> Tensor:
        """(B | 1, Hq, Tq, Tk), computed in `dtype`."""

    def of_sequence(self, n: int) -> TermLike:
        """The term of sequence n of a packed or cached batch."""


class WeightOptions(TypedDict, total=False):
    """What decides the weights of keys."""

    causal: bool
    window_size: tuple[int, int]
    mask: Tensor | MaskLike | None
    bias: Tensor | None
    scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    relative: TermLike | None
    sinks: Tensor | None
    head_scale: Tensor | None
    normaliser: Normaliser


class AttentionOptions(WeightOptions, total=False):
    """All of them."""

    dropout_p: float
    seed: Tensor | None


class Options(NamedTuple):
    """The options of a call."""

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    mask: Tensor | MaskLike | None = None
    bias: Tensor | None = None
    scale: float | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    relative: TermLike | None = None
    sinks: Tensor | None = None
    head_scale: Tensor | None = None
    normaliser: Normaliser = "softmax"
    dropout_p: float = 0.0
    seed: Tensor | None = None


def transform_of(options: Options) -> tuple[str, float] | None:
    """The option that transforms the scores, and its c."""
    found: tuple[str, float] | None = None
    for name in TRANSFORMS:
        c: float = getattr(options, name)
        if c > 0 and found is not None:
            given = f"{found[0]}={found[1]}, {name}={c}"
            raise ValueError(f"attention: the scores may have one transform, got {given}")
        if c > 0:
            found = name, c
    return found


def pack(op: str, options: WeightOptions, names: type = AttentionOptions) -> Options:
    """The options of a call of `op`, which takes those of `names`."""
    if not options.keys() <= names.__annotations__.keys():
        unknown = next(name for name in options if name not in names.__annotations__)
        raise TypeError(f"{op}() got an unexpected keyword argument {unknown!r}")
    return Options(**options)


def spelled_out(names: type) -> Callable[[F], F]:
    """For a function with `**options: Unpack[names]`: help() shows each with its default."""

    def show(function: F) -> F:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=Options._field_defaults[name],
                annotation=hint.__forward_arg__,
            )
            for name, hint in names.__annotations__.items()
        ]
        shown = signature.replace(parameters=[*own, *options])
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return show
