"""Masks that are not the AND of rules: they become blocks for the size of each call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from omniattn.encoding.masks import BLOCK, MaskKind, Rule, Sizes
from omniattn.functional._block_mask import Blocks, blocks_of_rows
from omniattn.functional._mask import Mask, common_device, require_masks
from omniattn.reference.vmap import is_mapped

#: Sizes of calls whose blocks a mask keeps.
KEPT = 16


def has_values(t: Tensor) -> bool:
    return not (torch.compiler.is_compiling() or t.device.type == "meta" or is_mapped(t))


def versions_of(mask: Any) -> tuple[int, ...] | None:
    """How often each of its tensors has been changed in place; None if one does not know."""
    found: list[int] = []
    rest = [mask]
    while rest:
        x = rest.pop()
        if isinstance(x, Tensor):
            if x.is_inference():
                return None
            found.append(x._version)
        elif isinstance(x, Mask):
            rest += vars(x).values()
        elif isinstance(x, (tuple, list)):
            rest += x
    return tuple(found)


def lengths_of(layout: Rule, sizes: Sizes, by_keys: bool) -> tuple[int | Tensor, int | Tensor]:
    """`Sizes.lengths` of a packed or cached call; `by_keys`: Tk is asked for."""
    kind, _, _, side = layout
    if kind != MaskKind.PACKED:
        keys = side[-1][:, None, None, None]
        return keys - sizes.tq, keys
    ends_q, ends_k = side
    keys = ends_k.diff()[:, None, None, None]
    same = ends_q is ends_k or (
        has_values(ends_q) and has_values(ends_k) and torch.equal(ends_q, ends_k)
    )
    if not same:
        return keys - ends_q.diff()[:, None, None, None], keys
    # Of self-attention all queries are at their own numbers: one mask serves all sequences.
    return 0, keys if by_keys else sizes.tk


@dataclass(frozen=True)
class Computed(Mask):
    """A mask that is kept as blocks for the last sizes that it was asked for, until a tensor that
    it reads is changed."""

    known: dict[tuple[object, ...], Blocks] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def rules_of_call(self, sizes: Sizes, layout: Rule | None = None) -> list[Rule]:
        if layout is not None:
            sizes = replace(sizes, lengths=lengths_of(layout, sizes, self.by_keys()))
        lengths = [t for t in sizes.lengths or () if isinstance(t, Tensor)]
        # The number of partial blocks is a value, which a trace and meta tensors do not have; and a
        # step of decoding, a size of its own each time, would be kept in vain.
        if (
            torch.compiler.is_compiling()
            or sizes.device.type == "meta"
            or sizes.tq < BLOCK
            or not all(has_values(t) for t in lengths)
            or (versions := versions_of(self)) is None
        ):
            return [(MaskKind.TENSOR, 0, 0, (self.pairs(sizes),))]
        size: tuple[object, ...] = (sizes.tq, sizes.tk, sizes.device, sizes.heads, *versions)
        size += tuple(
            tuple(n.flatten().tolist()) if isinstance(n, Tensor) else n
            for n in (sizes.offset, sizes.keys)
        )
        blocks = self.known.pop(size, None)
        if blocks is None:
            blocks = blocks_of_rows(
                lambda first, last: self.pairs(sizes, (first, last)),
                sizes.tq,
                sizes.tk,
                sizes.device,
            )
            while len(self.known) >= KEPT:
                self.known.pop(next(iter(self.known)), None)
        self.known[size] = blocks  # the last one in the order of the dict
        return blocks.rules()

    def visible(self, tq: int, tk: int, device: torch.device, heads: int) -> Tensor:
        return self.pairs(Sizes(tq, tk, device, heads))


@dataclass(frozen=True)
class AnyOf(Computed):
    """Pairs allowed by at least one of `masks`; `a | b` makes one."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        require_masks("AnyOf", self.masks)
        if not self.masks:
            raise ValueError("AnyOf: masks must have at least one mask, got masks=()")

    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def pairs(self, sizes: Sizes, queries: tuple[int, int] | None = None) -> Tensor:
        first, *rest = (mask.pairs(sizes, queries) for mask in self.masks)
        for seen in rest:
            first = first | seen
        return first

    def by_keys(self) -> bool:
        return any(mask.by_keys() for mask in self.masks)

    def of_sequence(self, n: int, tq: int, tk: int) -> Mask:
        return AnyOf(tuple(mask.of_sequence(n, tq, tk) for mask in self.masks))

    def _device(self) -> torch.device:
        return common_device(self.masks)


@dataclass(frozen=True)
class Not(Computed):
    """Pairs that `mask` does not allow; `~mask` makes one."""

    mask: Mask

    def __post_init__(self) -> None:
        require_masks("Not", (self.mask,))

    def parts(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def pairs(self, sizes: Sizes, queries: tuple[int, int] | None = None) -> Tensor:
        return ~self.mask.pairs(sizes, queries)

    def by_keys(self) -> bool:
        return self.mask.by_keys()

    def of_sequence(self, n: int, tq: int, tk: int) -> Mask:
        return Not(self.mask.of_sequence(n, tq, tk))

    def _device(self) -> torch.device:
        return self.mask._device()
