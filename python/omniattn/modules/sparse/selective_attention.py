"""Selective attention: tokens can mask earlier tokens for all later queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import require_int, require_number
from omniattn.functional.masks import Mask
from omniattn.modules.base.fields import Backend, Probability
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.heads import HeadsConfig
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache
from omniattn.modules.sparse.sparse_attention import SparseAttention


class SelectiveAttention(SparseAttention):
    """Causal attention in which head 0 penalises tokens for the later queries of all heads.

    ``y = W_o softmax(q k^T / sqrt(D) - F) v`` with accumulated penalties F, see
    `functional.selective_attention`. The parameters are those of Attention, so that either layer
    loads the other's weights.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj.

    Reference:
        Leviathan, Kalman and Matias, Selective Attention Improves Transformer, 2024,
        arXiv 2410.02703.

    Example:
        >>> SelectiveAttention(dim=16, num_heads=4)(torch.ones(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    @dataclass(frozen=True)
    class Config(HeadsConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            num_heads: number of query heads.
            num_kv_heads: number of key and value heads, a divisor of num_heads; default num_heads.
            head_dim: width of a head, default dim / num_heads.
            budget: number of keys per query, those with the smallest penalties; None for all.
            rope_interleaved, softcap, dropout_p, init_std, out_init_std, backend: as in Attention.
        """

        bias: ClassVar[bool] = False
        out_bias: ClassVar[bool] = False

        budget: int | None = None
        rope_interleaved: bool = False
        softcap: float = 0.0
        dropout_p: Probability = 0.0
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            name = "SelectiveAttention"
            if self.budget is not None:
                require_int(name, "budget", self.budget, 1)
            require_number(name, "softcap", self.softcap, 0)

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
        """Creates a cache with penalties."""
        sizes = (batch, max_length, self.config.kv_heads, self.config.head_size)
        return new.with_penalties(self, self._key_weight, *sizes, **storage)

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
            x: new tokens. For a jagged nested tensor the result is jagged, and each sequence
                attends only to itself.
            state: a SelectiveCache, to which the new tokens are appended.
            rope: (cos, sin) at the positions of x (of x.values() if nested).
            mask: must be None.
        """
        if mask is not None:
            raise ValueError("SelectiveAttention: mask must be None, got a mask")
        return self._run(x, state, rope, mask)

    def _cache_of(self, state: State | None) -> Any:
        return new.require_penalties("SelectiveAttention", state)

    def _score_options(self) -> dict[str, Any]:
        c = self.config
        options = {"budget": c.budget, "softcap": c.softcap, "backend": c.backend}
        return options | {"dropout_p": c.dropout_p if self.training else 0.0}

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        (q, k, v), cache, options = tensors, given["cache"], self._score_options()
        if cache is None:
            return functional.selective_attention(q, k, v, **options)
        out, penalty = functional.selective_attention(
            q, k, v, penalty=cache.penalty, return_penalty=True, **options
        )
        cache.penalise(penalty)
        return out
