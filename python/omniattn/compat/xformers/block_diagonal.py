"""Masks of packed sequences, of `xformers.ops.fmha.attn_bias`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from omniattn.compat.xformers.attn_bias import (
    AttentionBias,
    Window,
    bias_of,
    causal,
    require_window,
)
from omniattn.compat.xformers.seqinfo import Device, SeqLenInfo

Mask = TypeVar("Mask", bound="BlockDiagonalMask")


@dataclass
class PackedBias(AttentionBias):
    """Base class of masks whose queries are in sequences that follow each other."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo

    def key_rows(self, device: torch.device | str) -> Tensor | None:
        """Returns the rows of the keys in use, None for all."""
        pieces = [torch.arange(a, b, device=device) for a, b in self.k_seqinfo.intervals()]
        return torch.cat(pieces)

    def key_lengths(self) -> list[int]:
        """Returns the number of keys of each sequence."""
        return [last - first for first, last in self.k_seqinfo.intervals()]

    def materialize(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        queries, keys = shape[-2:]
        rows = self.key_rows("cpu")
        rows = torch.arange(keys) if rows is None else rows
        allowed = torch.zeros(queries, keys, dtype=torch.bool)
        starts = [0, *torch.tensor(self.key_lengths()).cumsum(0).tolist()]
        for n, (first, last) in enumerate(self.q_seqinfo.intervals()):
            columns = rows[starts[n] : starts[n + 1]]
            allowed[first:last, columns] = self.window().allowed(last - first, len(columns))
        return bias_of(allowed, dtype, device).expand(shape)


@dataclass
class BlockDiagonalMask(PackedBias):
    """Sequences of queries (1, Tq, H, D) that see only the keys of their own sequence."""

    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls: type[Mask],
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: Device = None,
    ) -> Mask:
        """Returns the mask of sequences of these lengths; `kv_seqlen` is `q_seqlen` if None."""
        queries = SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is None or list(kv_seqlen) == list(q_seqlen):
            return cls(queries, queries)
        _require_count(cls, q_seqlen, kv_seqlen)
        return cls(queries, SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls: type[Mask], tensors: Sequence[Tensor]) -> tuple[Mask, Tensor]:
        """Returns the mask of tensors (B_i, T_i, ...), and the tensors as one, (1, T, ...)."""
        found = cls.from_seqlens(_lengths(tensors), device=tensors[0].device)
        found._batch_sizes = [len(x) for x in tensors]
        return found, _joined(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls: type[Mask],
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple[Mask, Tensor, Tensor, Tensor | None]:
        """Returns the mask of lists of q, k and v (B_i, T_i, ...), and each of them as one."""
        lengths = _lengths(tensors_q), _lengths(tensors_k)
        if [len(x) for x in tensors_q] != [len(x) for x in tensors_k]:
            raise ValueError(f"{cls.__name__}: tensors_q and tensors_k must have equal batches")
        found = cls.from_seqlens(*lengths, device=tensors_q[0].device)
        found._batch_sizes = [len(x) for x in tensors_q]
        values = None if tensors_v is None else _joined(tensors_v)
        return found, _joined(tensors_q), _joined(tensors_k), values

    def key_rows(self, device: torch.device | str) -> Tensor | None:
        return None

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        """Returns the rows of each sequence of queries."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        """Returns the rows of each sequence of keys."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Undoes :meth:`from_tensor_list`."""
        if self.q_seqinfo is not self.k_seqinfo:
            raise ValueError("split: queries and keys have lengths of their own: use split_queries")
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Returns the mask with causal sequences, aligned at the first query and key."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """Returns the mask with causal sequences, aligned at the last query and key."""
        lengths = self.q_seqinfo, self.k_seqinfo
        return BlockDiagonalCausalFromBottomRightMask(*lengths, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """Returns the mask with causal windows, aligned at the first query and key."""
        rest = self._batch_sizes, window_size
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, *rest)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """Returns the mask with causal windows, aligned at the last query and key."""
        found = BlockDiagonalCausalLocalAttentionFromBottomRightMask
        return found(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Causal sequences, aligned at the first query and key."""

    def window(self) -> Window:
        return causal(top_left=True)


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Causal sequences, aligned at the last query and key; no sequence has more queries."""

    def __post_init__(self) -> None:
        for n, (first, last) in enumerate(self.q_seqinfo.intervals()):
            keys = self.key_lengths()[n]
            if keys < last - first:
                raise ValueError(
                    f"{type(self).__name__}: kv_seqlen must be at least q_seqlen, got {keys} keys "
                    f"and {last - first} queries in sequence {n}"
                )

    def window(self) -> Window:
        return causal()


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Causal windows of `_window_size` keys, aligned at the first query and key."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        require_window(self, self._window_size)
        for n, (first, last) in enumerate(self.q_seqinfo.intervals()):
            if last - first - self._window_size >= self.key_lengths()[n]:
                raise RuntimeError(
                    f"{type(self).__name__}: window_size must reach a key of each query, got "
                    f"window_size={self._window_size}, {last - first} queries and "
                    f"{self.key_lengths()[n]} keys in sequence {n}"
                )

    def window(self) -> Window:
        return causal(self._window_size, top_left=True)


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Causal windows of `_window_size` keys, aligned at the last query and key."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_window(self, self._window_size)

    def window(self) -> Window:
        return causal(self._window_size)


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [x.shape[1] for x in tensors for _ in range(len(x))]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], dim=1)


def _require_count(cls: type[Any], q_seqlen: Sequence[int], kv_seqlen: Sequence[int]) -> None:
    if len(q_seqlen) != len(kv_seqlen):
        raise ValueError(
            f"{cls.__name__}: q_seqlen and kv_seqlen must have the same length, got "
            f"{len(q_seqlen)} and {len(kv_seqlen)}"
        )
