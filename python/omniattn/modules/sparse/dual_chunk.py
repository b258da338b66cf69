"""Dual chunk attention: rotary positions relative to chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import require_choice, shown
from omniattn.modules.base.fields import Positive, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.rope import RotaryEmbedding
from omniattn.modules.base.state import State, Storage
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache
from omniattn.modules.sparse.sparse_attention import SparseAttention, SparseConfig


class DualChunkAttention(SparseAttention):
    """Causal attention with rotary positions in chunks: `functional.dual_chunk_attention`.

    The layer computes its own rotary tables and ignores `rope`; its cache stores rotated keys.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters q_proj, k_proj, v_proj, o_proj.

    Reference:
        An et al., Training-Free Long-Context Scaling of Large Language Models, 2024,
        arXiv 2402.17463.

    Example:
        >>> layer = DualChunkAttention(dim=16, num_heads=4, chunk_size=6, local_window=2)
        >>> layer(torch.ones(1, 9, 16)).shape
        torch.Size([1, 9, 16])
    """

    @dataclass(frozen=True)
    class Config(SparseConfig):
        """Fields of `SparseConfig`, and the chunks.

        Args:
            chunk_size, local_window, train_length, mscale: see the function. With a state, the
                factor of the logits is that of the length so far.
            rope_base: base of the rotary frequencies.
        """

        chunk_size: int = 192
        local_window: Size = 32
        train_length: int | None = None
        mscale: str | None = None
        rope_base: Positive = 10000.0

        def __post_init__(self) -> None:
            super().__post_init__()
            op = "DualChunkAttention"
            if self.local_window >= self.chunk_size:
                raise ValueError(
                    f"{op}: local_window must be below chunk_size, "
                    f"got local_window={self.local_window}, chunk_size={self.chunk_size}"
                )
            if self.mscale is not None:
                require_choice(op, "mscale", self.mscale, ("chunkllama", "qwen"))
            if (self.mscale is None) != (self.train_length is None):
                raise ValueError(
                    f"{op}: mscale and train_length must be given together, "
                    f"got mscale={shown(self.mscale)}, train_length={self.train_length}"
                )

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self._build(device, dtype)
        self.rotary = RotaryEmbedding(RotaryEmbedding.Config(config.head_size, config.rope_base))

    @property
    def _period(self) -> int:
        return self.config.chunk_size - self.config.local_window

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a cache.

        Args:
            batch, max_length: number of sequences and largest number of tokens.
            device, dtype: device and dtype of the storage; default: those of the parameters.
        """
        c = self.config
        sizes = (batch, max_length, c.kv_heads, c.head_size)
        return new.with_period(self, self._key_weight, *sizes, period=self._period, **storage)

    def _cache_of(self, state: State | None) -> Cache | None:
        cache = super()._cache_of(state)
        if cache is not None and cache.period != self._period:
            raise ValueError(
                "DualChunkAttention: state must have period=chunk_size - local_window="
                f"{self._period}, got a {type(cache).__name__} with period={cache.period}"
            )
        return cache

    def _rotated(
        self,
        q: Tensor,
        k: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        at: Callable[[], Tensor],
    ) -> tuple[Tensor, Tensor]:
        c = self.config
        tables = self.rotary(at() % self._period)
        k, _ = functional.apply_rotary(
            k, None, *tables, interleaved=c.rope_interleaved, backend=c.backend
        )
        return q, k

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        c = self.config
        q, k, v = tensors
        tables = self.rotary(torch.arange(c.chunk_size + 1, device=x.device))
        return functional.dual_chunk_attention(
            *(q, k, v, *tables),
            chunk_size=c.chunk_size,
            local_window=c.local_window,
            train_length=c.train_length,
            mscale=c.mscale,
            interleaved=c.rope_interleaved,
            k_rotated=True,
            **self._score_options(),
        )
