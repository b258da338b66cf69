"""Parallax's layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.modules.base.fields import Backend, Epsilon, Signed, WindowSize
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.heads import HeadsConfig
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.norm import RMSNorm
from omniattn.modules.sparse.sparse_attention import QKV, SparseAttention


class ParallaxAttention(SparseAttention):
    """Attention whose output has a linear correction by second queries, Parallax.

    ``y = W_o parallax_attention(q, r, k, v)`` with ``r = W_r x``, see
    `functional.parallax_attention`. The state keeps keys and values, as for attention.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, r_proj, k_proj, v_proj, o_proj, and with qk_norm q_norm, r_norm and
        k_norm: names and shapes as in fla.

    Reference:
        Zuo et al., Parallax: Parameterized Local Linear Attention for Language Modeling, 2026,
        arXiv 2605.29157.

    Example:
        >>> ParallaxAttention(dim=16, num_heads=4)(torch.ones(1, 5, 16)).shape
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
            bias, out_bias: True for biases of the projections of q, r, k and v; of o_proj.
            qk_norm: True for an RMS norm of each head of q, r and k.
            norm_eps: eps of these norms.
            causal: True if a token sees only itself and the tokens before it.
            window_size: (left, right), numbers of visible keys before and after the query's
                position, -1 for no limit.
            scale: factor of q's scores, default 1 / sqrt(head_dim); r's have none.
            rope_interleaved, init_std, out_init_std, backend: as in Attention; rotary embeddings
                turn r as q.
        """

        bias: bool = False
        out_bias: bool = False
        qk_norm: bool = False
        norm_eps: Epsilon = 1e-5
        causal: bool = True
        window_size: WindowSize = (-1, -1)
        scale: Signed | None = None
        rope_interleaved: bool = False
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None

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
        self._build(device, dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        second = Linear.Config(c.dim, c.num_heads * c.head_size, c.bias, c.init_std, c.backend)
        self.r_proj = Linear(second, **factory)
        if c.qk_norm:
            norm = RMSNorm.Config(c.head_size, c.norm_eps, backend=c.backend)
            self.q_norm, self.r_norm, self.k_norm = (norm.build(**factory) for _ in range(3))

    def _projected(
        self,
        x: Tensor,
        suffix: str,
        rope: tuple[Tensor, Tensor] | None,
        at: Callable[[], Tensor],
    ) -> QKV:
        """Computes the heads of q and then of r, together (B, T, 2 Hq, D), k and v."""
        c = self.config
        q, r, k, v = (
            self.get_submodule(f"{name}_{suffix}")(x).unflatten(-1, (-1, c.head_size))
            for name in "qrkv"
        )
        if c.qk_norm:
            q, r, k = self.q_norm(q), self.r_norm(r), self.k_norm(k)
        queries, k = self._rotated(torch.cat([q, r], 2), k, rope, at)
        return queries, k, v

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        c, (queries, k, v) = self.config, tensors
        return functional.parallax_attention(
            *(*queries.chunk(2, 2), k, v),
            causal=c.causal,
            window_size=c.window_size,
            scale=c.scale,
            backend=c.backend,
        )
