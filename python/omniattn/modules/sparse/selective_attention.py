"""Selective attention: tokens hide each other from all later queries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import require_int, require_number
from omniattn.modules.base.fields import Backend, Probability, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import Mixer, require_tokens
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache


class SelectiveAttention(Mixer):
    """Causal attention whose head 0 says which tokens all heads see less of from then on.

    ``y = W_o softmax(q k^T / sqrt(D) - F) v``, see `functional.selective_attention`. It has the
    parameters of Attention and no more, so that either loads the weights of the other.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        x (B, T, dim) -> the same. Parameters q_proj, k_proj, v_proj, o_proj.

    Reference:
        Leviathan, Kalman and Matias, Selective Attention Improves Transformer, 2024,
        arXiv 2410.02703.

    Example:
        >>> SelectiveAttention(dim=16, num_heads=4)(torch.ones(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            num_heads: query heads.
            num_kv_heads: key and value heads, a divisor of num_heads; default num_heads.
            head_dim: default dim / num_heads.
            budget: keys that a query sees, those with the smallest penalties; None for all.
            rope_interleaved, softcap, dropout_p, init_std, out_init_std, backend: as in Attention.
        """

        dim: Size
        num_heads: Size
        num_kv_heads: Size | None = None
        head_dim: Size | None = None
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
            if self.num_heads <= 0 or self.kv_heads <= 0 or self.num_heads % self.kv_heads:
                raise ValueError(
                    f"{name}: num_heads must be a multiple of num_kv_heads, "
                    f"got num_heads={self.num_heads}, num_kv_heads={self.kv_heads}"
                )
            if self.head_dim is None and self.dim % self.num_heads:
                raise ValueError(
                    f"{name}: dim must be a multiple of num_heads unless head_dim is given, "
                    f"got dim={self.dim}, num_heads={self.num_heads}"
                )
            if self.budget is not None:
                require_int(name, "budget", self.budget, 1)
            require_number(name, "softcap", self.softcap, 0)

        @property
        def kv_heads(self) -> int:
            """Number of key and value heads."""
            return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

        @property
        def head_size(self) -> int:
            """Size of one head."""
            return self.dim // self.num_heads if self.head_dim is None else self.head_dim

        @property
        def rotary_dim(self) -> int:
            """Dimensions of a head that a model rotates."""
            return self.head_size

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
        self.config = c = config
        q_dim, kv_dim = c.num_heads * c.head_size, c.kv_heads * c.head_size

        def linear(n_in: int, n_out: int, std: float) -> Linear:
            own = Linear.Config(n_in, n_out, False, std, c.backend)
            return Linear(own, device=device, dtype=dtype)

        self.q_proj = linear(c.dim, q_dim, c.init_std)
        self.k_proj = linear(c.dim, kv_dim, c.init_std)
        self.v_proj = linear(c.dim, kv_dim, c.init_std)
        self.o_proj = linear(q_dim, c.dim, c.out_init_std)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """An empty cache with penalties."""
        sizes = (batch, max_length, self.config.kv_heads, self.config.head_size)
        return new.with_penalties(self, self.k_proj.weight, *sizes, **storage)

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """x (B, T, dim) -> (B, T, dim).

        Args:
            x: queries, keys and values. A jagged nested tensor gives one: the sequences attend one
                after another, each as it would alone.
            state: a SelectiveCache; the new tokens are appended to it.
            rope: cos, sin of the positions of x (of x.values()).
            mask: must be None.
        """
        c = self.config
        if mask is not None:
            raise ValueError("SelectiveAttention: mask must be None, got a mask")
        cache = new.require_penalties("SelectiveAttention", state)
        x, sequences = sequences_of("SelectiveAttention", "x", x, state=cache)
        require_tokens("SelectiveAttention", x, c.dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (-1, c.head_size)) for p in projections)
        if rope is not None:
            q, k = functional.apply_rotary(
                q, k, *rope, interleaved=c.rope_interleaved, backend=c.backend
            )
        options: dict[str, Any] = {"budget": c.budget, "softcap": c.softcap, "backend": c.backend}
        options["dropout_p"] = c.dropout_p if self.training else 0.0
        if cache is None:
            out = sequences.apart(partial(functional.selective_attention, **options), q, k, v)
            return sequences.restored(self.o_proj(out.flatten(-2)))
        k, v = cache.append(k, v)
        out, penalty = functional.selective_attention(
            q, k, v, penalty=cache.penalty, return_penalty=True, **options
        )
        cache.penalise(penalty)
        return self.o_proj(out.flatten(-2))
