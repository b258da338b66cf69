"""Base class of masks: combination by & | ~, encoding as rules, density."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from omniattn.checks.arguments import refuse_nested, require_strided, shown
from omniattn.encoding.masks import EncodedMask, MaskKind, Rule, Sizes, of_sequence, visible

#: Numbers of queries and keys in a tile of the CPU kernels.
TILE = (96, 128)


class Mask(EncodedMask):
    """A set of (query, key) pairs that may attend."""

    #: Constructors of `a | b` and `~a`; set by computed.py, which defines their classes.
    any_of: ClassVar[Callable[[tuple[Mask, ...]], Mask]]
    negation: ClassVar[Callable[[Mask], Mask]]

    def __and__(self, other: Mask) -> All:
        return All((self, other))

    def __or__(self, other: Mask) -> Mask:
        return Mask.any_of((self, other))

    def __bool__(self) -> bool:
        raise TypeError(
            f"{type(self).__name__}: a mask is neither true nor false; combine masks by &, | and ~"
        )

    def __invert__(self) -> Mask:
        return Mask.negation(self)

    def rules_of_call(self, sizes: Sizes, layout: Rule | None = None) -> list[Rule]:
        """Returns the rules for one call; masks not made of rules compute them from the sizes."""
        return self.rules()

    def pairs(self, sizes: Sizes, queries: tuple[int, int] | None = None) -> Tensor:
        """Returns the visible pairs, as `visible`; with `queries` only the rows [first, last)."""
        return visible(self.rules(), sizes, queries)

    def parts(self) -> tuple[Mask, ...]:
        """Returns the masks that this one combines."""
        return ()

    def by_keys(self) -> bool:
        """Returns True if the visible keys of a query depend on Tk, not only on its position."""
        return any(kind == MaskKind.NEIGHBORS for kind, *_ in self.rules())

    def of_sequence(self, n: int, tq: int, tk: int) -> Mask:
        """Returns the mask of sequence n of a packed or cached batch, for its own lengths."""
        return OfSequence(of_sequence(self.rules(), n, tq, tk))

    def dense(self, tq: int, tk: int, *, heads: int = 1) -> Tensor:
        """Returns a bool tensor, True = attend, broadcastable to (B, heads, tq, tk)."""
        return self.visible(tq, tk, self._device(), heads)

    def count(self, tq: int, tk: int, *, batch: int = 1, heads: int = 1) -> int:
        """Returns the exact number of visible pairs in (batch, heads, tq, tk)."""
        return sum(
            int(rows.sum()) * (batch * heads * rows.shape[-2] * tk // rows.numel())
            for rows in self._stripes(tq, tk, heads, 256)
            if rows.numel()
        )

    def density(self, tq: int, tk: int, *, batch: int = 1, heads: int = 1) -> float:
        """Returns the exact share of visible pairs."""
        pairs = batch * heads * tq * tk
        return self.count(tq, tk, batch=batch, heads=heads) / pairs if pairs else 0.0

    def block_density(
        self,
        tq: int,
        tk: int,
        *,
        batch: int = 1,
        heads: int = 1,
        block: tuple[int, int] = TILE,
    ) -> float:
        """Returns the share of the area in (queries, keys) blocks with at least one visible pair.

        The default blocks are the tiles of the CPU kernels, so this is the share that they compute.
        """
        area = 0
        for rows in self._stripes(tq, tk, heads, block[0]):
            keys = torch.nn.functional.pad(rows.any(-2), (0, -tk % block[1]))
            seen = keys.unflatten(-1, (-1, block[1])).any(-1)
            widths = torch.full((seen.shape[-1],), block[1])
            widths[-1:] -= -tk % block[1]
            copies = batch * heads * seen.shape[-1] // seen.numel()
            area += int((seen.cpu() * widths).sum()) * copies * rows.shape[-2]
        pairs = batch * heads * tq * tk
        return area / pairs if pairs else 0.0

    def plot(self, tq: int, tk: int, *, batch: int = 0, head: int = 0, ax: Any = None) -> Any:
        """Draws the mask of one head, queries downwards, and returns the matplotlib axes."""
        import matplotlib.pyplot as plt

        mask = self.dense(tq, tk, heads=head + 1)
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask[batch % mask.shape[0], head % mask.shape[1]].expand(tq, tk)
        if ax is None:
            _, ax = plt.subplots()
        ax.imshow(mask.cpu().numpy(), cmap="Blues", vmin=0, vmax=1.5, interpolation="nearest")
        ax.set(xlabel="key", ylabel="query")
        return ax

    def _device(self) -> torch.device:
        return next((t.device for *_, side in self.rules() for t in side), torch.device("cpu"))

    def _stripes(self, tq: int, tk: int, heads: int, size: int) -> Iterator[Tensor]:
        device = self._device()
        for first in range(0, tq, size):
            yield self.pairs(Sizes(tq, tk, device, heads), (first, min(first + size, tq)))


@dataclass(frozen=True)
class OfSequence(Mask):
    """Rules of another mask for one sequence."""

    found: list[Rule]

    def rules(self) -> list[Rule]:
        return self.found


@dataclass(frozen=True)
class All(Mask):
    """Pairs allowed by all of `masks`."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        require_masks("All", self.masks)

    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def rules(self) -> list[Rule]:
        return [rule for mask in self.masks for rule in mask.rules()]

    def rules_of_call(self, sizes: Sizes, layout: Rule | None = None) -> list[Rule]:
        return [r for mask in self.masks for r in mask.rules_of_call(sizes, layout)]

    def pairs(self, sizes: Sizes, queries: tuple[int, int] | None = None) -> Tensor:
        first, last = (0, sizes.tq) if queries is None else queries
        seen = torch.ones(last - first, sizes.tk, dtype=torch.bool, device=sizes.device)
        for mask in self.masks:
            seen = seen & mask.pairs(sizes, queries)
        return seen

    def visible(self, tq: int, tk: int, device: torch.device, heads: int) -> Tensor:
        return self.pairs(Sizes(tq, tk, device, heads))

    def by_keys(self) -> bool:
        return any(mask.by_keys() for mask in self.masks)

    def of_sequence(self, n: int, tq: int, tk: int) -> Mask:
        return All(tuple(mask.of_sequence(n, tq, tk) for mask in self.masks))

    def _device(self) -> torch.device:
        return common_device(self.masks)


def require_masks(name: str, masks: object) -> None:
    if not isinstance(masks, (tuple, list)):
        raise TypeError(f"{name}: masks must be a tuple of masks, got masks={shown(masks)}")
    for mask in masks:
        if not isinstance(mask, Mask):
            raise TypeError(
                f"{name}: masks must be masks (BoolMask makes one of a tensor, from_predicate of a "
                f"function), got mask={shown(mask)}"
            )


def common_device(masks: Sequence[Mask]) -> torch.device:
    """Returns the device of the masks' tensors, the CPU if all are on the CPU or there are none."""
    found = [mask._device() for mask in masks]
    return next((device for device in found if device.type != "cpu"), torch.device("cpu"))


def require_bool_mask(op: str, name: str, t: Tensor) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {name}={shown(t)}")
    if t.dtype != torch.bool:
        raise TypeError(f"{op}: {name} must be bool, True = attend, got {name}.dtype={t.dtype}")
    if t.is_nested:
        refuse_nested(op, name, t)
    require_strided(op, name, t)
