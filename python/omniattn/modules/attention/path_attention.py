"""PaTH attention: positions are products of matrices that depend on the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import require_int, unit, widen
from omniattn.functional.masks import Mask
from omniattn.modules.base.fields import Backend
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.heads import HeadsConfig
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import Mixer, require_tokens
from omniattn.modules.base.norm import RMSNorm
from omniattn.modules.base.short_conv import ShortConvolution
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache


class PaTHAttention(Mixer):
    """Causal attention with a product of matrices between each key and query, instead of rotations.

    ``y = W_o softmax(q_i^T M_i ... M_(j+1) k_j / sqrt(D)) v`` with ``M_t = I - beta_t w_t w_t^T``,
    ``beta = 2 sigmoid(x W_b + b)`` and w, of length 1 in each head, from
    ``silu(conv(x W_w1 W_w2))``. With `forget_gate` the weights also decay (PaTH-FoX).

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, w_proj (two layers with w_rank), w_conv1d, bt_proj and
        o_proj, with forget_gate g_proj, with qk_norm maybe_q_norm and maybe_k_norm: names and
        shapes as in fla, which multiplies the logarithms of the gates by 1 / sqrt(D), too.

    Reference:
        Yang et al., PaTH Attention, 2025, arXiv 2505.16381.

    Example:
        >>> PaTHAttention(dim=16, num_heads=4)(torch.ones(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    @dataclass(frozen=True)
    class Config(HeadsConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            num_heads: number of query heads.
            num_kv_heads: number of heads of keys, values and w, a divisor of num_heads; default
                num_heads.
            head_dim: width of a head, default dim / num_heads.
            forget_gate: True for a forget gate ``sigmoid(x W_g + b)`` in each query head.
            qk_norm: True for an RMSNorm of each head of q and k.
            w_rank: width between the two layers of w; None for one layer.
            conv_size: number of taps of w's filter, 0 for none.
            init_std, out_init_std, backend: as in Attention.
        """

        forget_gate: bool = False
        qk_norm: bool = False
        w_rank: int | None = 32
        conv_size: int = 3
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            require_int("PaTHAttention", "conv_size", self.conv_size, 0)
            if self.w_rank is not None:
                require_int("PaTHAttention", "w_rank", self.w_rank, 1)

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
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        queries, keys = c.num_heads * c.head_size, c.kv_heads * c.head_size

        def linear(n_in: int, n_out: int, bias: bool = False, std: float = c.init_std) -> Linear:
            return Linear(Linear.Config(n_in, n_out, bias, std, c.backend), **factory)

        self.q_proj = linear(c.dim, queries)
        self.k_proj, self.v_proj = linear(c.dim, keys), linear(c.dim, keys)
        if c.w_rank is None:
            self.w_proj: nn.Module = linear(c.dim, keys)
        else:
            self.w_proj = nn.Sequential(linear(c.dim, c.w_rank), linear(c.w_rank, keys))
        if c.conv_size > 0:
            conv = ShortConvolution.Config(keys, c.conv_size, backend=c.backend)
            self.w_conv1d = ShortConvolution(conv, **factory)
        self.bt_proj = linear(c.dim, c.kv_heads, True)
        if c.forget_gate:
            self.g_proj = linear(c.dim, c.num_heads, True)
        if c.qk_norm:
            norm = RMSNorm.Config(c.head_size, backend=c.backend)
            self.maybe_q_norm = RMSNorm(norm, **factory)
            self.maybe_k_norm = RMSNorm(norm, **factory)
        self.o_proj = linear(queries, c.dim, std=c.out_init_std)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a PathCache."""
        c = self.config
        return new.with_path(
            self,
            self.k_proj.weight,
            *(batch, max_length, c.kv_heads, c.head_size),
            num_heads=c.num_heads,
            taps=max(c.conv_size - 1, 0),
            **storage,
        )

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
            state: a PathCache, to which the new tokens are appended.
            rope: not used, since the matrices encode positions.
            mask: must be None.
        """
        if mask is not None:
            raise ValueError("PaTHAttention: mask must be None, got a mask")
        c = self.config
        cache = new.require_path("PaTHAttention", state)
        x, sequences = sequences_of("PaTHAttention", "x", x, state=cache)
        require_tokens("PaTHAttention", x, c.dim)
        q, k, v = (
            layer(x).unflatten(-1, (-1, c.head_size))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if c.qk_norm:
            q, k = self.maybe_q_norm(q), self.maybe_k_norm(k)
        w, inputs = self._w(x, None if cache is None else cache.inputs, sequences.cu_seqlens)
        beta = 2 * widen(self.bt_proj(x)).sigmoid()
        g = nnf.logsigmoid(widen(self.g_proj(x))) if c.forget_gate else None
        if cache is None:
            cu_seqlens = sequences.cu_seqlens
            out = functional.path_attention(
                q, k, v, w, beta, g, cu_seqlens=cu_seqlens, backend=c.backend
            )
        else:
            k, v = cache.append(k, v)
            g = None if g is None else cache.forget(g)
            out, keys = functional.path_attention(
                q, k, v, w, beta, g, return_keys=True, backend=c.backend
            )
            cache.carry(keys)
            cache.inputs = inputs
        y: Tensor = self.o_proj(out.flatten(-2))
        return sequences.restored(y)

    def _w(self, x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Any]:
        """Computes w (B, T, Hkv, D) in fp32 (fp64 for fp64), and the filter's last inputs."""
        w, inputs = self.w_proj(x), before
        if self.config.conv_size > 0:
            before = None if before is None else before.to(w.dtype)
            w, inputs = self.w_conv1d(w, before, cu_seqlens)
        return unit(widen(w.unflatten(-1, (-1, self.config.head_size)))), inputs
