"""Masks of keys in caches: padded, with gaps, and in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from omniattn.compat.xformers.attn_bias import Window, causal, require_window
from omniattn.compat.xformers.block_diagonal import PackedBias, _require_count
from omniattn.compat.xformers.seqinfo import Device, GappySeqInfo, PaddedSeqLenInfo, SeqLenInfo

Padded = TypeVar("Padded", bound="BlockDiagonalPaddedKeysMask")
Gappy = TypeVar("Gappy", bound="BlockDiagonalGappyKeysMask")
Paged = TypeVar("Paged", bound="PagedBlockDiagonalPaddedKeysMask")
PagedGappy = TypeVar("PagedGappy", bound="PagedBlockDiagonalGappyKeysMask")


@dataclass
class BlockDiagonalPaddedKeysMask(PackedBias):
    """Sequences whose keys have room for `kv_padding` rows each, (1, N * kv_padding, H, D)."""

    k_seqinfo: PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls: type[Padded],
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: Device = None,
    ) -> Padded:
        """Returns the mask of these lengths; `causal_diagonal` has no effect."""
        return cls(*_padded(cls, q_seqlen, kv_padding, kv_seqlen, device))

    def make_paged(self, block_tables: Tensor, page_size: int, paged_type: type[Paged]) -> Paged:
        """Returns the mask for keys in pages."""
        k = self.k_seqinfo
        lengths = PaddedSeqLenInfo(
            *(k.seqstart, k.max_seqlen, k.min_seqlen, k.seqstart_py),
            *(k.seqlen, k.seqlen_py, block_tables.shape[1] * page_size),
        )
        rest = (self._window_size,) if hasattr(self, "_window_size") else ()
        return paged_type(self.q_seqinfo, lengths, block_tables, page_size, *rest)

    def make_local_attention(
        self, window_left: int, window_right: int
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """Returns the mask with windows."""
        windows = window_left, window_right
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, *windows)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Causal sequences, aligned at the last query and key; `causal_diagonal` has no effect."""

    causal_diagonal: Any = None

    def window(self) -> Window:
        return causal()


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Windows of keys before and after a query, aligned at the last query and key."""

    window_left: int
    window_right: int

    def window(self) -> Window:
        return Window(self.window_left, self.window_right)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """Returns the mask of these lengths."""
        return cls(*_padded(cls, q_seqlen, kv_padding, kv_seqlen, None), window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Causal windows of `_window_size` keys, aligned at the last query and key."""

    _window_size: int

    def __post_init__(self) -> None:
        require_window(self, self._window_size)

    def window(self) -> Window:
        return causal(self._window_size)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_size: int,
    ) -> BlockDiagonalCausalLocalAttentionPaddedKeysMask:
        """Returns the mask of these lengths."""
        return cls(*_padded(cls, q_seqlen, kv_padding, kv_seqlen, None), window_size)


@dataclass
class PagedBlockDiagonalPaddedKeysMask(PackedBias):
    """Sequences whose keys are in pages: (1, pages * page_size, H, D).

    Key t of sequence n is row ``t % page_size`` of page ``block_tables[n, t // page_size]``.
    """

    k_seqinfo: PaddedSeqLenInfo
    block_tables: Tensor
    page_size: int

    def key_rows(self, device: torch.device | str) -> Tensor | None:
        return _paged_rows(self.block_tables, self.page_size, _from_zero(self.k_seqinfo), device)

    @classmethod
    def from_seqlens(
        cls: type[Paged],
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> Paged:
        """Returns the mask of these lengths."""
        padding = block_tables.shape[1] * page_size
        lengths = _padded(cls, q_seqlen, padding, kv_seqlen, device)
        return cls(*lengths, block_tables, page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Causal sequences with keys in pages, aligned at the last query and key."""

    def window(self) -> Window:
        return causal()


@dataclass
class PagedBlockDiagonalCausalLocalPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Causal windows with keys in pages, aligned at the last query and key."""

    _window_size: int

    def __post_init__(self) -> None:
        require_window(self, self._window_size)

    def window(self) -> Window:
        return causal(self._window_size)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        window_size: int,
        *,
        device: Device = None,
    ) -> PagedBlockDiagonalCausalLocalPaddedKeysMask:
        """Returns the mask of these lengths."""
        padding = block_tables.shape[1] * page_size
        lengths = _padded(cls, q_seqlen, padding, kv_seqlen, device)
        return cls(*lengths, block_tables, page_size, window_size)


@dataclass
class BlockDiagonalGappyKeysMask(PackedBias):
    """Sequences whose keys start anywhere."""

    k_seqinfo: GappySeqInfo

    @classmethod
    def from_seqlens(
        cls: type[Gappy],
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        *,
        device: Device = None,
    ) -> Gappy:
        """Returns the mask; `kv_seqstarts` ends with the number of rows of the keys."""
        return cls(*_gappy(cls, q_seqlen, kv_seqstarts, kv_seqlen, False, device))

    def make_paged(
        self,
        block_tables: Tensor,
        page_size: int,
        notional_padding: int,
        paged_type: type[PagedGappy],
    ) -> PagedGappy:
        """Returns the mask for keys in pages, with `notional_padding` rows for each sequence."""
        if notional_padding % page_size:
            raise ValueError(
                f"make_paged: notional_padding must be a multiple of page_size, got "
                f"notional_padding={notional_padding}, page_size={page_size}"
            )
        k = self.k_seqinfo
        starts = [start - n * notional_padding for n, start in enumerate(k.seqstart_py[:-1])]
        if not all(0 <= start < block_tables.shape[1] * page_size for start in starts):
            raise ValueError(f"make_paged: keys must start in their pages, got starts {starts}")
        device = k.seqstart.device
        lengths = GappySeqInfo.from_seqlens_gappy(starts, k.seqlen_py, True, device=device)
        return paged_type(self.q_seqinfo, lengths, block_tables, page_size)


@dataclass
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Causal sequences whose keys start anywhere, aligned at the last query and key."""

    def window(self) -> Window:
        return causal()


@dataclass
class BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Windows of keys that start anywhere, aligned at the last query and key."""

    window_left: int
    window_right: int

    def window(self) -> Window:
        return Window(self.window_left, self.window_right)

    @classmethod
    def from_seqlens_local_gappy(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
        device: torch.device | str,
    ) -> BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask:
        """Returns the mask of these lengths."""
        lengths = _gappy(cls, q_seqlen, kv_seqstarts, kv_seqlen, False, device)
        return cls(*lengths, window_left, window_right)


@dataclass
class PagedBlockDiagonalGappyKeysMask(PackedBias):
    """Sequences with keys in pages, that start anywhere in their first pages."""

    k_seqinfo: GappySeqInfo
    block_tables: Tensor
    page_size: int

    def key_rows(self, device: torch.device | str) -> Tensor | None:
        return _paged_rows(self.block_tables, self.page_size, self._spans(), device)

    def key_lengths(self) -> list[int]:
        return [last - first for first, last in self._spans()]

    def _spans(self) -> list[tuple[int, int]]:
        k = self.k_seqinfo
        return list(zip(k.seqstart_py, k.seqlen_py, strict=False))

    @classmethod
    def from_seqlens(
        cls: type[PagedGappy],
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> PagedGappy:
        """Returns the mask; `kv_seqstarts` counts from the first page of each sequence."""
        lengths = _gappy(cls, q_seqlen, kv_seqstarts, kv_seqlen, True, device)
        return cls(*lengths, block_tables, page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """Causal sequences with keys in pages, aligned at the last query and key."""

    def window(self) -> Window:
        return causal()


def _padded(
    cls: type[Any],
    q_seqlen: Sequence[int],
    padding: int,
    kv_seqlen: Sequence[int],
    device: Device,
) -> tuple[SeqLenInfo, PaddedSeqLenInfo]:
    _require_count(cls, q_seqlen, kv_seqlen)
    queries = SeqLenInfo.from_seqlens(q_seqlen, device=device)
    return queries, PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, padding, device=device)


def _gappy(
    cls: type[Any],
    q_seqlen: Sequence[int],
    starts: Sequence[int],
    kv_seqlen: Sequence[int],
    paged: bool,
    device: Device,
) -> tuple[SeqLenInfo, GappySeqInfo]:
    _require_count(cls, q_seqlen, kv_seqlen)
    queries = SeqLenInfo.from_seqlens(q_seqlen, device=device)
    return queries, GappySeqInfo.from_seqlens_gappy(starts, kv_seqlen, paged, device=device)


def _from_zero(lengths: PaddedSeqLenInfo) -> list[tuple[int, int]]:
    return [(0, n) for n in lengths.seqlen_py]


def _paged_rows(
    tables: Tensor, size: int, spans: Sequence[tuple[int, int]], device: torch.device | str
) -> Tensor:
    """Returns the rows of tokens first .. last of each sequence."""
    pages = tables.to(device=device, dtype=torch.int64)
    found = []
    for table, (first, last) in zip(pages, spans, strict=True):
        places = torch.arange(first, last, device=device)
        found.append(table[places // size] * size + places % size)
    return torch.cat(found)
