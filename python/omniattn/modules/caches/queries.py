"""Cache of multi-token attention: keys and values, and the queries, which later rows read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn.modules.base.state import Storage, take
from omniattn.modules.caches.kv_cache import KVCache


class QueryCache(KVCache):
    """Keys and values, and the queries of all tokens, so that any number of tokens can be removed.

    Args:
        batch, max_length, num_kv_heads, head_dim: sizes of the storage.
        num_heads: number of query heads.
        device, dtype: device and dtype of the storage.

    Reference:
        Golovneva et al., Multi-Token Attention, 2025, arXiv 2504.00927.

    Example:
        >>> cache = QueryCache(1, 16, 2, 4, num_heads=4)
        >>> cache.keep(torch.ones(1, 5, 4, 4), 2).shape, cache.keep(torch.ones(1, 1, 4, 4), 2).shape
        (torch.Size([1, 5, 4, 4]), torch.Size([1, 3, 4, 4]))
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_heads: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        like: Storage = {"device": device, "dtype": dtype}
        super().__init__(batch, max_length, num_kv_heads, head_dim, **like)
        self._queries = KVCache(batch, max_length, num_heads, head_dim, v_head_dim=0, **like)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._queries.nbytes

    def keep(self, q: Tensor, count: int) -> Tensor:
        """Stores queries (B, n, H, D); returns the last `count` before them, and them."""
        first = max(0, self._queries.length - count)
        queries, _ = self._queries.append(q, q[..., :0])
        return queries[:, first:]

    def crop(self, length: int) -> None:
        super().crop(length)
        self._queries.crop(min(length, self._queries.length))

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self._queries.reorder(index)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"queries": self._queries.state_dict()["k"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        k, v, q = take("QueryCache", state, "k", "v", "queries")
        super().load_state_dict({"k": k, "v": v})
        self._queries.load_state_dict({"k": q, "v": q[..., :0]})
