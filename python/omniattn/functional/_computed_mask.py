"""Masks that are not the AND of rules: they become blocks for the size of each call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from omniattn.encoding.masks import BLOCK, EncodedMask, MaskKind, Rule
from omniattn.functional._block_mask import Blocks, blocks_of_rows
from omniattn.functional._mask import Mask, common_device, require_masks


def _needs_one_length() -> NoReturn:
    raise ValueError(
        "masks made by | and ~, GlobalTokens and Representatives are for batches of one length, "
        "not for packed or cached sequences, whose positions differ; write what they allow as a "
        "function of b, h, q and k there"
    )


#: Sizes of calls whose blocks a mask keeps.
KEPT = 16


@dataclass(frozen=True)
class Computed(Mask):
    """A mask that is kept as blocks for the last sizes that it was asked for."""

    known: dict[tuple[object, ...], Blocks] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def rules(self) -> list[Rule]:
        _needs_one_length()

    def of_sequence(self, n: int, tq: int, tk: int) -> EncodedMask:
        _needs_one_length()

    def rules_of_call(self, tq: int, tk: int, device: torch.device, heads: int) -> list[Rule]:
        # The number of partial blocks is a value, which a trace and meta tensors do not have; and a
        # step of decoding, a size of its own each time, would be kept in vain.
        if torch.compiler.is_compiling() or device.type == "meta" or tq < BLOCK:
            return [(MaskKind.TENSOR, 0, 0, (self.pairs(tq, tk, device, heads),))]
        size = (tq, tk, device, heads)
        blocks = self.known.pop(size, None)
        if blocks is None:
            blocks = blocks_of_rows(
                lambda first, last: self.pairs(tq, tk, device, heads, (first, last)), tq, tk, device
            )
            while len(self.known) >= KEPT:
                self.known.pop(next(iter(self.known)), None)
        self.known[size] = blocks  # the last one in the order of the dict
        return blocks.rules()

    def visible(self, tq: int, tk: int, device: torch.device, heads: int) -> Tensor:
        return self.pairs(tq, tk, device, heads)


@dataclass(frozen=True)
class AnyOf(Computed):
    """Pairs allowed by at least one of `masks`; `a | b` makes one."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        require_masks("AnyOf", self.masks)
        if not self.masks:
            raise ValueError("AnyOf: masks must have at least one mask, got masks=()")

    def pairs(
        self,
        tq: int,
        tk: int,
        device: torch.device,
        heads: int,
        queries: tuple[int, int] | None = None,
    ) -> Tensor:
        first, *rest = (mask.pairs(tq, tk, device, heads, queries) for mask in self.masks)
        for seen in rest:
            first = first | seen
        return first

    def _device(self) -> torch.device:
        return common_device(self.masks)


@dataclass(frozen=True)
class Not(Computed):
    """Pairs that `mask` does not allow; `~mask` makes one."""

    mask: Mask

    def __post_init__(self) -> None:
        require_masks("Not", (self.mask,))

    def pairs(
        self,
        tq: int,
        tk: int,
        device: torch.device,
        heads: int,
        queries: tuple[int, int] | None = None,
    ) -> Tensor:
        return ~self.mask.pairs(tq, tk, device, heads, queries)

    def _device(self) -> torch.device:
        return self.mask._device()
