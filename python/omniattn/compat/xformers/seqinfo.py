"""Lengths of packed sequences, as the masks of `xformers.ops.fmha.attn_bias` hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

Device = torch.device | str | None
Info = TypeVar("Info", bound="SeqLenInfo")


@dataclass
class SeqLenInfo:
    """Starts and lengths of sequences that follow each other.

    Args:
        seqstart: (N + 1,) int32, the first row of each sequence, and the number of rows.
        max_seqlen, min_seqlen: bounds of the lengths.
        seqstart_py: list of `seqstart`.
    """

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Sequence[int], *, device: Device = None) -> SeqLenInfo:
        """Returns the sequences of these lengths."""
        starts = [0, *accumulate(_ints("seqlens", seqlens))]
        bounds = max(seqlens, default=-1), min(seqlens, default=-1)
        return SeqLenInfo(_tensor(starts, device), *bounds, starts)

    def to(self: Info, device: torch.device | str) -> Info:
        """Returns the lengths on a device."""
        tensors: dict[str, Any] = {
            n: t.to(device) for n, t in vars(self).items() if isinstance(t, Tensor)
        }
        return replace(self, **tensors)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Yields the first row of each sequence and the one after its last."""
        yield from pairwise(self.seqstart_py)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Returns the rows of each sequence; `batch_sizes` joins sequences of one length."""
        if type(self) is not SeqLenInfo:
            raise NotImplementedError(f"split: keys with gaps cannot be split, got {type(self)}")
        starts = self.seqstart_py
        if x.shape[0] != 1 or x.shape[1] != starts[-1]:
            raise ValueError(
                f"split: x must have shape (1, {starts[-1]}, ...), got x.shape={tuple(x.shape)}"
            )
        sizes = batch_sizes or [1] * (len(starts) - 1)
        ends = [0, *accumulate(sizes)]
        rows = [starts[last] - starts[first] for first, last in pairwise(ends)]
        parts = zip(sizes, x.split(rows, dim=1), strict=True)
        return [part.reshape(size, -1, *x.shape[2:]) for size, part in parts]


@dataclass
class PaddedSeqLenInfo(SeqLenInfo):
    """Sequences of keys, each with room for `padding` rows, of which `seqlen` are in use."""

    seqlen: Tensor
    seqlen_py: list[int]
    padding: int

    @classmethod
    def from_seqlens_padded(
        cls, seqlens: Sequence[int], padding: int, *, device: Device = None
    ) -> PaddedSeqLenInfo:
        """Returns the sequences of these lengths."""
        lengths = _ints("seqlens", seqlens)
        _require_room(lengths, padding)
        starts = [n * padding for n in range(len(lengths) + 1)]
        tensor = _tensor(starts, device)
        rest = starts, _tensor(lengths, device), lengths, padding
        return cls(tensor, max(lengths), min(lengths), *rest)

    def from_seqlens_padded_inplace(self, seqlens: Sequence[int]) -> None:
        """Changes the lengths of as many sequences in place, to at most the longest one."""
        lengths = _ints("seqlens", seqlens)
        _require_room(lengths, min(self.padding, self.max_seqlen))
        if len(lengths) != len(self.seqlen_py):
            raise ValueError(
                f"from_seqlens_padded_inplace: seqlens must have {len(self.seqlen_py)} lengths, "
                f"got {len(lengths)}"
            )
        self.seqlen_py[:] = lengths
        self.seqlen.copy_(torch.tensor(lengths))

    def intervals(self) -> Iterator[tuple[int, int]]:
        for start, length in zip(self.seqstart_py, self.seqlen_py, strict=False):
            yield start, start + length


@dataclass
class GappySeqInfo(SeqLenInfo):
    """Sequences of keys that start anywhere.

    `seqlen` has the lengths. With pages, starts count from the first page of a sequence, and
    `seqlen` has the ends.
    """

    seqlen: Tensor
    seqlen_py: Sequence[int]

    @classmethod
    def from_seqlens_gappy(
        cls,
        seqstarts: Sequence[int],
        seqlens: Sequence[int],
        paged: bool,
        *,
        device: Device = None,
    ) -> GappySeqInfo:
        """Returns the sequences with these starts; without pages, the last one is the end."""
        starts, lengths = _ints("seqstarts", seqstarts), _ints("seqlens", seqlens)
        count = len(lengths) + (not paged)
        if not lengths or len(starts) != count:
            raise ValueError(
                f"from_seqlens_gappy: seqstarts must have {count} numbers for {len(lengths)} "
                f"sequences, got {len(starts)}"
            )
        bounds = max(lengths), min(lengths)
        if paged:
            lengths = [a + n for a, n in zip(starts, lengths, strict=True)]
            starts.append(-1)
        return cls(_tensor(starts, device), *bounds, starts, _tensor(lengths, device), lengths)

    def intervals(self) -> Iterator[tuple[int, int]]:
        for start, length in zip(self.seqstart_py, self.seqlen_py, strict=False):
            yield start, start + length


def _ints(name: str, values: Sequence[int]) -> list[int]:
    if isinstance(values, Tensor):
        raise TypeError(f"from_seqlens: {name} must be a list of ints, got a tensor")
    return [int(n) for n in values]


def _require_room(lengths: list[int], most: int) -> None:
    if not lengths or max(lengths) > most:
        raise ValueError(f"from_seqlens: kv_seqlen must be at most {most}, got {lengths}")


def _tensor(values: Sequence[int], device: Device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
