"""What all masks can do: combine, and say how much they allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omniattn.encoding.masks import EncodedMask, Rule, visible
from omniattn.functional._checks import (
    shown,
)

#: Queries and keys of a tile of the CPU kernels.
TILE = (96, 128)


class Mask(EncodedMask):
    """A set of (query, key) pairs that may attend."""

    def __and__(self, other: Mask) -> All:
        return All((self, other))

    def dense(self, tq: int, tk: int, *, heads: int = 1) -> Tensor:
        """Boolean, True = attend, broadcastable to (B, heads, tq, tk)."""
        return self.visible(tq, tk, self._device(), heads)

    def count(self, tq: int, tk: int, *, batch: int = 1, heads: int = 1) -> int:
        """Number of pairs that may attend in (batch, heads, tq, tk), exactly."""
        return sum(
            int(rows.sum()) * (batch * heads * rows.shape[-2] * tk // rows.numel())
            for rows in self._stripes(tq, tk, heads, 256)
            if rows.numel()
        )

    def density(self, tq: int, tk: int, *, batch: int = 1, heads: int = 1) -> float:
        """Share of pairs that may attend, counted exactly."""
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
        """Share of the area that lies in (queries, keys) blocks with a pair that may attend.

        The default gives what it costs the CPU kernels to visit whole tiles.
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
        rules, device = self.rules(), self._device()
        for first in range(0, tq, size):
            span = (first, min(first + size, tq))
            yield visible(rules, tq, tk, device, heads=heads, queries=span)


@dataclass(frozen=True)
class All(Mask):
    """Pairs allowed by every one of `masks`."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.masks, (tuple, list)):
            raise TypeError(f"All: masks must be a tuple of masks, got masks={shown(self.masks)}")
        for mask in self.masks:
            if not isinstance(mask, Mask):
                raise TypeError(
                    f"All: masks must be masks (BoolMask makes one of a tensor), got {shown(mask)}"
                )

    def rules(self) -> list[Rule]:
        return [rule for mask in self.masks for rule in mask.rules()]
