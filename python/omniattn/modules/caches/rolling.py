"""Cache of a sliding window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn.checks.arguments import require_int
from omniattn.modules.base.state import take
from omniattn.modules.caches.cache import StoredCache, check_new, rows_of_heads
from omniattn.modules.caches.eviction import evicted_of


class RollingCache(StoredCache):
    """Keys and values of the last `window` tokens, including the query's own.

    Token p is stored in slot p mod window. A single new token attends to the slots in storage
    order, since softmax does not depend on the order; several new tokens attend to the window
    before them and to each other.

    Args:
        batch, window, num_kv_heads, head_dim: sizes of the storage.
        v_head_dim: head size of the values, default `head_dim`.
        sort: True to sort the slots by position also for a single new token, as mask and bias
            tensors require; copies the window once it has wrapped.
        device, dtype: device and dtype of the storage.

    Raises:
        TypeError: the dtype is not floating point.
        ValueError: a shape does not match, or cropping needs overwritten tokens.
        RuntimeError: an appended tensor requires a gradient.

    Reference:
        Jiang et al., Mistral 7B, 2023, arXiv:2310.06825.

    Example:
        >>> cache = RollingCache(1, 4, 1, 8)
        >>> for _ in range(9):
        ...     k, v = cache.append(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8))
        >>> k.shape, cache.length
        (torch.Size([1, 4, 1, 8]), 9)
    """

    def __init__(
        self,
        batch: int,
        window: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        sort: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"RollingCache: window must be positive, got window={window}")
        super().__init__(
            batch,
            window,
            num_kv_heads,
            head_dim,
            v_head_dim=v_head_dim,
            device=device,
            dtype=dtype,
        )
        self._sort = sort
        #: True if the cache has overwritten tokens by those of a call that failed.
        self.is_ahead = False

    @property
    def window(self) -> int:
        """Number of kept tokens."""
        return self._k.shape[1]

    @property
    def ordered(self) -> bool:
        return self._sort

    def first(self, count: int) -> Tensor | None:
        if count == self.length:
            return None
        return torch.full(self._k.shape[:1], self.length - count, device=self._k.device)

    def _slots(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self._k.device) % self.window

    def _latest(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns the last `count` tokens sorted by position."""
        slots = self._slots(self.length - count, self.length)
        k, v = (rows_of_heads(t, 2, slots) for t in (self._k, self._v))
        return k, v

    @property
    def positions(self) -> Tensor:
        """Position of the token in each slot of the views, (B, Hkv, S) int64."""
        kept = min(self.length, self.window)
        latest = torch.arange(self.length - kept, self.length, device=self._k.device)
        if not self._sort:
            latest = latest.roll((self.length - kept) % self.window)
        return latest.expand(*self._k.shape[::2], -1)

    @property
    def evicted(self) -> Tensor:
        """Mask (B, Hkv, length) bool, True for evicted tokens."""
        return evicted_of(self.positions, self.length)

    def views(self) -> tuple[Tensor, Tensor]:
        """Returns the kept tokens in storage order, or sorted by position with `sort`."""
        kept = min(self.length, self.window)
        if self._sort and self.length > self.window:
            return self._latest(kept)
        return self._first(kept)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_new("RollingCache", k, v, self._k.shape[0], *self._sizes)
        new = k.shape[1]
        attended = None
        if new > 1:
            past_k, past_v = self._latest(min(self.length, self.window - 1))
            attended = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)
        kept = min(new, self.window)
        self.length += new
        slots = self._slots(self.length - kept, self.length)
        self._k[:, slots] = k[:, new - kept :]
        self._v[:, slots] = v[:, new - kept :]
        return self.views() if attended is None else attended

    def crop(self, length: int) -> None:
        require_int("RollingCache", "length", length)
        if 0 <= length < self.length and self.length > self.window:
            raise ValueError(
                f"RollingCache: tokens before position {length} must not be overwritten yet, "
                f"got length={self.length}, window={self.window}"
            )
        super().crop(length)

    def state_dict(self) -> dict[str, Any]:
        k, v = self._latest(min(self.length, self.window))
        return {"k": k, "v": v, "length": self.length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        k, v, length = take("RollingCache", state, "k", "v", "length")
        if k.shape[1] != min(length, self.window):
            raise ValueError(
                "RollingCache: k must hold the last min(length, window) tokens, "
                f"got k={tuple(k.shape)}, length={length}, window={self.window}"
            )
        self.length = length - k.shape[1]
        self.append(k, v)
        self.is_ahead = False
