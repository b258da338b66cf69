"""Cache of forgetting attention: keys, values and forget gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn.checks.arguments import widen
from omniattn.modules.base.state import take
from omniattn.modules.caches.kv_cache import KVCache


class ForgettingCache(KVCache):
    """A KVCache with the logarithms of the forget gates of each token and query head.

    Args:
        batch, max_length, num_kv_heads, head_dim: sizes of the storage.
        num_heads: number of query heads.
        device, dtype: device and dtype of the storage; gates are in float32, or float64.

    Reference:
        Lin et al., Forgetting Transformer, 2025, arXiv 2503.02130.

    Example:
        >>> cache = ForgettingCache(1, 16, 2, 4, num_heads=4)
        >>> k, v = cache.append(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4))
        >>> cache.forget(torch.zeros(1, 3, 4)).shape
        torch.Size([1, 3, 4])
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
        super().__init__(batch, max_length, num_kv_heads, head_dim, device=device, dtype=dtype)
        self._gates = widen(self._k.new_zeros(batch, max_length, num_heads))

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._gates.nbytes

    def forget(self, log_f: Tensor) -> Tensor:
        """Stores the log gates (B, n, H) of the last n tokens; returns those of all tokens."""
        self._gates[:, self.length - log_f.shape[1] : self.length] = log_f
        return self._gates[:, : self.length]

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self._gates = self._gates.index_select(0, index)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"log_f": self._gates[:, : self.length].clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        k, v, log_f = take("ForgettingCache", state, "k", "v", "log_f")
        shape = (*k.shape[:2], self._gates.shape[2])
        if log_f.shape != shape:
            raise ValueError(
                f"ForgettingCache: log_f must have shape {shape}, got log_f={tuple(log_f.shape)}"
            )
        super().load_state_dict({"k": k, "v": v})
        self.forget(log_f)
