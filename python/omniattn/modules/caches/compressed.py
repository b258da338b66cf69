"""Caches of compressed sparse attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.modules.base.state import Storage, take
from omniattn.modules.caches.kv_cache import KVCache
from omniattn.modules.caches.rolling import RollingCache


class CSAState:
    """Keys of a window, which are the values too, compressed keys, and what the next ones read.

    Args:
        batch, max_length: number of sequences and largest number of tokens.
        head_dim, index_dim: sizes of the compressed keys of attention and of its indexer.
        window: number of keys in the window.
        compress_rate: number of tokens for which a compressed key stands.
        overlap: True if a compressed key also reads the tokens before these.
        width: number of values, and of gates, of a token that compressed keys read.
        rope_dim: number of rotated dimensions of a key.
        device, dtype: device and dtype of the storage; rotary tables are in float32, or float64.

    Raises:
        ValueError: a shape does not match, the storage is full, or cropping needs tokens that are
            no longer kept.

    Reference:
        DeepSeek-AI, DeepSeek-V4, 2026.

    Example:
        >>> sizes = {"head_dim": 4, "index_dim": 0, "width": 4, "rope_dim": 2}
        >>> state = CSAState(1, 8, window=3, compress_rate=2, overlap=False, **sizes)
        >>> state.append_near(torch.ones(1, 5, 1, 4)).shape, state.length
        (torch.Size([1, 5, 1, 4]), 5)
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        *,
        head_dim: int,
        index_dim: int,
        window: int,
        compress_rate: int,
        overlap: bool,
        width: int,
        rope_dim: int,
        **storage: Unpack[Storage],
    ) -> None:
        self.limit, self.compress_rate, self.overlap = max_length, compress_rate, overlap
        near = max(1, min(window, max_length))
        self.near = RollingCache(batch, near, 1, head_dim, v_head_dim=0, **storage)
        keys = max_length // compress_rate
        self.compressed = KVCache(batch, keys, 1, head_dim, v_head_dim=index_dim, **storage)
        read = compress_rate * (2 if overlap else 1)
        self.rows = RollingCache(batch, read, 1, width, sort=True, **storage)
        kept = self.near.views()[0]
        self.tables = RollingCache(
            *(batch, read, 1, rope_dim // 2),
            sort=True,
            device=kept.device,
            dtype=torch.promote_types(kept.dtype, torch.float32),
        )

    @property
    def _caches(self) -> dict[str, Any]:
        names = "near", "compressed", "rows", "tables"
        return {name: getattr(self, name) for name in names}

    @property
    def length(self) -> int:
        return self.near.length

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._caches.values())

    def append_near(self, k: Tensor) -> Tensor:
        """Stores keys (B, n, 1, D); returns those of the window before them, and theirs."""
        end = self.length + k.shape[1]
        if end > self.limit:
            raise ValueError(
                f"CSAState: length must not exceed max_length={self.limit}, got length={end}"
            )
        return self.near.append(k, k[..., :0])[0]

    def append_rows(
        self, values: Tensor, gates: Tensor, tables: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], int]:
        """Stores rows and tables of new tokens, and returns the arguments of the compressors."""
        done = self.compressed.length
        first = max(0, done - 1) if self.overlap else done
        values, gates = self.rows.append(values[:, :, None], gates[:, :, None])
        tables = self.tables.append(*(t[:, :, None] for t in tables))
        kept = slice(first * self.compress_rate - self.rows.length + values.shape[1], None)
        values, gates, cos, sin = (t[:, kept, 0] for t in (values, gates, *tables))
        return values, gates, (cos, sin), done - first

    def crop(self, length: int) -> None:
        # The smallest cache refuses first, before any other has changed.
        for cache in sorted((self.near, self.rows, self.tables), key=lambda cache: cache.window):
            cache.crop(length)
        self.compressed.crop(length // self.compress_rate)

    def reorder(self, index: Tensor) -> None:
        for cache in self._caches.values():
            cache.reorder(index)

    def state_dict(self) -> dict[str, Any]:
        return {name: cache.state_dict() for name, cache in self._caches.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = take("CSAState", state, *self._caches)
        for cache, each in zip(self._caches.values(), saved, strict=True):
            cache.load_state_dict(each)
