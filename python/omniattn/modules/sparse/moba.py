"""MoBA: queries select blocks of keys by the blocks' mean keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.functional.masks import Mask
from omniattn.modules.base.fields import Backend, Probability, Signed, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.heads import HeadsConfig
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.mixer import require_no_mask
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache
from omniattn.modules.sparse.sparse_attention import SparseAttention


class MoBA(SparseAttention):
    """Mixture of block attention: computes y = W_o moba_attention(q, k, v), causal.

    Each query and head attends to its own block of keys and to the topk - 1 earlier blocks whose
    mean key scores highest, see :func:`omniattn.functional.moba_attention`. The parameters are
    those of full attention, so that a model can switch between the two during training. Single
    tokens after a prompt attend to all keys unless `decode` is "moba".

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters q_proj, k_proj, v_proj, o_proj.

    Note:
        torch.export: a dynamic T is at least 2 block_size.

    Reference:
        Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs, 2025, arXiv 2502.13189.

    Example:
        >>> layer = MoBA(dim=16, num_heads=4, num_kv_heads=2, block_size=4, topk=2)
        >>> layer(torch.ones(1, 10, 16)).shape
        torch.Size([1, 10, 16])
    """

    @dataclass(frozen=True)
    class Config(HeadsConfig):
        """Sizes and options.

        Args:
            dim, num_heads, num_kv_heads, head_dim: as in Attention.
            block_size: number of keys in a block.
            topk: number of blocks per query, including its own.
            decode: attention of single tokens after a prompt: "full", as in the paper, or "moba".
            bias, out_bias: True for biases of q_proj, k_proj and v_proj; of o_proj.
            rope_interleaved, scale, init_std, out_init_std, backend: as in Attention.
            softcap, dropout_p: as in Attention.
        """

        block_size: Size = 512
        topk: Size = 3
        decode: str = "full"
        bias: bool = False
        out_bias: bool = False
        rope_interleaved: bool = False
        scale: Signed | None = None
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None
        softcap: float = 0.0
        dropout_p: Probability = 0.0

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.decode not in ("full", "moba"):
                raise ValueError(
                    f"MoBA: decode must be one of ('full', 'moba'), got decode={shown(self.decode)}"
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

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a cache of keys and values, and with decode="moba" of the blocks' mean keys."""
        c = self.config
        weight, sizes = self._key_weight, (batch, max_length, c.kv_heads, c.head_size)
        if c.decode == "moba":
            return new.with_block_means(self, weight, *sizes, block_size=c.block_size, **storage)
        return new.keys_and_values(self, weight, *sizes, **storage)

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim).

        Args:
            x: the tokens after those in `state`. For a jagged nested tensor the result is jagged,
                and each sequence attends only to itself.
            state: from `new_state`; the new keys and values are appended.
            rope: (cos, sin) at the positions of x (of x.values() if nested), from RotaryEmbedding.
            mask: must be None; padding must be at the end of the sequences.
        """
        require_no_mask("MoBA", mask)
        return self._run(x, state, rope, mask)

    def _cache_of(self, state: State | None) -> Any:
        cache, size = super()._cache_of(state), self.config.block_size
        if cache is not None and cache.block_size not in (None, size):
            raise ValueError(
                f"MoBA: state must have block_size={size}, got block_size={cache.block_size}"
            )
        return cache

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        c, cache = self.config, given["cache"]
        q, k, v = tensors
        if c.decode == "full" and x.shape[1] == 1 < k.shape[1]:
            return functional.attention(q, k, v, **self._score_options())
        return functional.moba_attention(
            *(q, k, v),
            block_size=c.block_size,
            topk=c.topk,
            block_keys=None if cache is None else cache.block_keys,
            **self._score_options(),
        )
