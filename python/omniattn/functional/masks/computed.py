"""Masks that are not an AND of rules, converted to blocks for the size of each call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from omniattn.checks.arguments import same_values
from omniattn.encoding.masks import BLOCK, MaskKind, Rule, Sizes
from omniattn.functional.masks.base import Mask, common_device, require_masks
from omniattn.functional.masks.blocks import Blocks, blocks_of_rows
from omniattn.reference.vmap import is_mapped

#: Number of call sizes whose blocks a mask caches.
KEPT = 16


def has_values(t: Tensor) -> bool:
    """Returns True if the values of a tensor can be read here."""
    traced = torch.compiler.is_compiling() or t.device.type == "meta" or is_mapped(t)
    return not traced and not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def tensors_of(mask: Mask) -> list[Tensor]:
    """Returns the tensors that a mask reads, in a fixed order."""
    found: list[Tensor] = []
    rest: list[Any] = [mask]
    while rest:
        x = rest.pop()
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, Mask):
            rest += (value for name, value in vars(x).items() if name != "known")
        elif isinstance(x, (tuple, list)):
            rest += x
    return found


#: Copies of a mask's tensors, and the blocks by size computed from them.
Known = tuple[list[Tensor], dict[tuple[object, ...], Blocks]]


def blocks_by_size(known: list[Known], tensors: list[Tensor]) -> dict[tuple[object, ...], Blocks]:
    """Returns the cached blocks of a mask by size, least recently used first.

    `known` has the blocks for the last values of the tensors, or is empty. Values are compared with
    a copy, since a tensor's version counter misses writes by numpy, `.data`, DLPack and other
    processes.
    """
    for copies, blocks in known:
        if len(copies) == len(tensors) and all(map(same_values, copies, tensors)):
            return blocks
    now: Known = [t.detach().clone() for t in tensors], {}
    known[:] = [now]
    return now[1]


def lengths_of(layout: Rule, sizes: Sizes, by_keys: bool) -> tuple[int | Tensor, int | Tensor]:
    """Returns `Sizes.lengths` of a packed or cached call; `by_keys`: True if Tk matters."""
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
    # In self-attention every query is at its own index, so one mask serves all sequences.
    return 0, keys if by_keys else sizes.tk


@dataclass(frozen=True)
class Computed(Mask):
    """A mask that caches its blocks for recent sizes until one of its tensors changes."""

    known: list[Known] = field(default_factory=list, init=False, repr=False, compare=False)

    def rules_of_call(self, sizes: Sizes, layout: Rule | None = None) -> list[Rule]:
        if layout is not None:
            sizes = replace(sizes, lengths=lengths_of(layout, sizes, self.by_keys()))
        lengths = [t for t in sizes.lengths or () if isinstance(t, Tensor)]
        # The number of partial blocks depends on values, which traces and meta tensors lack. Steps
        # of decoding have a new size each time, so caching them is useless.
        if (
            torch.compiler.is_compiling()
            or sizes.device.type == "meta"
            or sizes.tq < BLOCK
            or not all(map(has_values, lengths + (tensors := tensors_of(self))))
        ):
            return [(MaskKind.TENSOR, 0, 0, (self.pairs(sizes),))]
        known = blocks_by_size(self.known, tensors)
        size: tuple[object, ...] = (sizes.tq, sizes.tk, sizes.device, sizes.heads)
        size += tuple(
            tuple(n.flatten().tolist()) if isinstance(n, Tensor) else n
            for n in (sizes.offset, sizes.keys)
        )
        blocks = known.pop(size, None)
        if blocks is None:
            with torch.inference_mode(False):  # a later call may train
                blocks = blocks_of_rows(
                    lambda first, last: self.pairs(sizes, (first, last)),
                    sizes.tq,
                    sizes.tk,
                    sizes.device,
                )
            while len(known) >= KEPT:
                known.pop(next(iter(known)), None)
        known[size] = blocks  # moves the size to the end of the dict
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
    """Pairs that `mask` does not allow; `~mask` makes one, except where torch.compile traces it."""

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


Mask.any_of, Mask.negation = AnyOf, Not
