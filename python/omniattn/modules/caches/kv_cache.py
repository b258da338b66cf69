"""Caches of all tokens or of a cross-attention source: keys and values, or latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import require_int
from omniattn.functional.sparse.selected_blocks import block_means
from omniattn.modules.base.state import Storage, require_index, take
from omniattn.modules.caches.cache import Cache, StoredCache, check_new


class KVCache(StoredCache):
    """Preallocated keys and values; all sequences of the batch have the same length.

    The storage is (B, Hkv, max_length, D), so that each head's keys are contiguous. The views have
    the public layout (B, T, Hkv, D) and share the storage.

    Args:
        batch, max_length, num_kv_heads, head_dim: sizes of the storage.
        v_head_dim: head size of the values, default `head_dim`.
        device, dtype: device and dtype of the storage.

    Raises:
        TypeError: the dtype is not floating point.
        ValueError: a shape does not match, or the storage is full.
        RuntimeError: an appended tensor requires a gradient.

    Example:
        >>> cache = KVCache(1, 16, 2, 4)
        >>> k, v = cache.append(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4))
        >>> k.shape, cache.length
        (torch.Size([1, 3, 2, 4]), 3)
    """

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self._k.shape[0]

    @property
    def max_length(self) -> int:
        """Largest number of tokens."""
        return self._k.shape[1]

    @property
    def limit(self) -> int:
        return self.max_length

    def views(self) -> tuple[Tensor, Tensor]:
        return self._first(self.length)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        shape = self._k.shape
        check_new("KVCache", k, v, shape[0], *self._sizes)
        count = k.shape[1]
        start, end = self.length, self.length + count
        if end > shape[1]:
            raise ValueError(
                f"KVCache: length must not exceed max_length={shape[1]}, got length={end}"
            )
        self._k.narrow(1, start, count).copy_(k)
        self._v.narrow(1, start, count).copy_(v)
        self.length = end
        return self.views()

    def correct(self, v: Tensor) -> None:
        """Replaces the values of the last tokens by v (B, n, Hkv, Dv)."""
        self._v[:, self.length - v.shape[1] : self.length] = v

    def state_dict(self) -> dict[str, Any]:
        k, v = self.views()
        return {"k": k.clone(), "v": v.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        k, v = take(type(self).__name__, state, "k", "v")
        self.length = 0
        self.append(k, v)


class BlockKeyCache(KVCache):
    """Keys and values, and the mean key of each whole block, by which MoBA selects blocks.

    Args:
        batch, max_length, num_kv_heads, head_dim: sizes of the storage.
        block_size: number of keys in a block.
        device, dtype: device and dtype of the storage; means are in float32, or float64.

    Reference:
        Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs, 2025, arXiv 2502.13189.

    Example:
        >>> cache = BlockKeyCache(1, 16, 2, 4, block_size=2)
        >>> k, v = cache.append(torch.ones(1, 5, 2, 4), torch.ones(1, 5, 2, 4))
        >>> cache.means().shape
        torch.Size([1, 2, 2, 4])
    """

    block_size: int

    def __init__(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        block_size: int,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__(batch, max_length, num_kv_heads, head_dim, **storage)
        self.block_size = block_size
        shape = (batch, max_length // block_size, num_kv_heads, head_dim)
        self._means = self._k.new_zeros(
            shape, dtype=torch.promote_types(self._k.dtype, torch.float32)
        )

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._means.nbytes

    def means(self) -> Tensor:
        """Returns the mean key (B, whole blocks, Hkv, D) of each block."""
        return self._means[:, : self.length // self.block_size]

    @property
    def block_keys(self) -> Tensor:
        return self.means()

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        size = self.block_size
        first = self.length // size
        views = super().append(k, v)
        last = self.length // size
        if last > first:
            rows = views[0][:, first * size : last * size]
            self._means[:, first:last] = block_means(rows, size)
        return views

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self._means = self._means.index_select(0, index)


class PeriodicKeyCache(KVCache):
    """Values, and keys rotated by their positions modulo `period`, for dual chunk attention.

    Args:
        batch, max_length, num_kv_heads, head_dim: sizes of the storage.
        period: period of the keys' rotations.
        device, dtype: device and dtype of the storage.

    Reference:
        An et al., Training-Free Long-Context Scaling of LLMs, 2024, arXiv 2402.17463.

    Example:
        >>> PeriodicKeyCache(1, 16, 2, 4, period=8).state_dict()["period"]
        8
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        period: int,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__(batch, max_length, num_kv_heads, head_dim, **storage)
        require_int("PeriodicKeyCache", "period", period, 1)
        self.period = period

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"period": self.period}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        *_, period = take("PeriodicKeyCache", state, "k", "v", "period")
        if period != self.period:
            raise ValueError(
                f"PeriodicKeyCache: state must have period={self.period}, got period={period}"
            )
        super().load_state_dict({name: state[name] for name in ("k", "v")})


class LatentCache(KVCache):
    """Keys of one head whose first `rank` columns are the values, stored once.

    Multi-head latent attention stores [latent | rotary key] per token, shared by all heads: 576
    numbers in DeepSeek-V2 and V3.

    Args:
        batch, max_length: sizes of the storage.
        rank: size of the latent.
        rope_dim: size of the rotary key, 0 for none.
        device, dtype: device and dtype of the storage.

    Reference:
        DeepSeek-AI, DeepSeek-V2, 2024, arXiv:2405.04434.

    Example:
        >>> cache = LatentCache(1, 16, 512, 64, dtype=torch.bfloat16)
        >>> rows = torch.ones(1, 3, 1, 576, dtype=torch.bfloat16)
        >>> k, v = cache.append(rows, rows[..., :512])
        >>> k.shape, v.shape, cache.nbytes
        (torch.Size([1, 3, 1, 576]), torch.Size([1, 3, 1, 512]), 18432)
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        rank: int,
        rope_dim: int,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__(batch, max_length, 1, rank + rope_dim, v_head_dim=0, **storage)
        self._rank = rank

    def views(self) -> tuple[Tensor, Tensor]:
        """Returns keys (B, T, 1, rank + rope_dim) and their first columns (B, T, 1, rank)."""
        k, _ = super().views()
        return k, k[..., : self._rank]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k (B, n, 1, rank + rope_dim); v must be its first columns and is not stored."""
        if v.shape != (*k.shape[:3], self._rank):
            raise ValueError(
                f"LatentCache: v must be the first {self._rank} columns of k, "
                f"got k={tuple(k.shape)}, v={tuple(v.shape)}"
            )
        return super().append(k, v[..., :0])


class CrossCache(Cache):
    """Keys and values of a cross-attention source, projected once.

    Cropping the decoder's tokens does not change the source.

    Example:
        >>> cache = CrossCache()
        >>> k, v = cache.append(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4))
        >>> cache.length, cache.nbytes
        (3, 192)
    """

    def __init__(self) -> None:
        self._kv: tuple[Tensor, Tensor] | None = None
        self.length = 0

    @property
    def filled(self) -> bool:
        """True if a source has been appended, even one without tokens."""
        return self._kv is not None

    @property
    def nbytes(self) -> int:
        return 0 if self._kv is None else sum(t.nbytes for t in self._kv)

    def views(self) -> tuple[Tensor, Tensor]:
        if self._kv is None:
            raise ValueError("CrossCache: the source must have been appended, got none")
        k, v = (t.transpose(1, 2) for t in self._kv)
        return k, v

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the source; a second call raises ValueError."""
        if self._kv is not None:
            raise ValueError(
                f"CrossCache: must hold one source, got another with k.shape={tuple(k.shape)}"
            )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError(
                "CrossCache: supports inference only, wrap the call in torch.no_grad()"
            )
        # Each head's keys are contiguous, as in KVCache.
        self._kv = (k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous())
        self.length = k.shape[1]
        return self.views()

    def crop(self, length: int) -> None:
        """Does nothing: the source does not depend on the decoder's tokens."""
        require_int("CrossCache", "length", length)

    def reorder(self, index: Tensor) -> None:
        if self._kv is not None:
            require_index("CrossCache", index, self._kv[0].shape[0])
            k, v = (t.index_select(0, index) for t in self._kv)
            self._kv = (k, v)

    def state_dict(self) -> dict[str, Any]:
        k, v = self.views()
        return {"k": k.clone(), "v": v.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        k, v = take("CrossCache", state, "k", "v")
        self._kv = None
        self.append(k, v)
