"""Wall attention: each channel of the scores forgets at its own rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import widen
from omniattn.functional.masks import Mask
from omniattn.modules.base.fields import Backend, Signed
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.heads import HeadsConfig
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import Mixer, require_tokens
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache


class WallAttention(Mixer):
    """Causal attention in which each channel of the scores forgets at its own rate.

    ``y = W_o (o * sigmoid(x W_og))``, ``o = softmax(sum_n q_in k_jn exp(c_in - c_jn) / sqrt(D)) v``
    with c the sum of ``logsigmoid(x W_g + b)``; the gates encode positions. Without `gate` y is
    ``W_o o``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, g_proj and o_proj, with scalar_gate gs_proj, with gate
        o_gate_proj: names and shapes as in fla.

    Reference:
        Averbuch and Pai, Wall Attention, Tilde Research, 2026,
        https://blog.tilderesearch.com/blog/wall-attn.

    Example:
        >>> WallAttention(dim=16, num_heads=4)(torch.ones(1, 5, 16)).shape
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
            bias: True for biases of q, k and v.
            gate: True for a sigmoid gate on the output.
            scalar_gate: True for a forget gate of each head, too.
            gate_bias: initial bias of the decays and forget gates, large for weak ones.
            init_std, out_init_std, backend: as in Attention.
        """

        bias: bool = False
        gate: bool = False
        scalar_gate: bool = False
        gate_bias: Signed = 8.0
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
        queries, keys = c.num_heads * c.head_size, c.kv_heads * c.head_size

        def linear(n_in: int, n_out: int, bias: bool = False, std: float = c.init_std) -> Linear:
            config = Linear.Config(n_in, n_out, bias, std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        self.q_proj = linear(c.dim, queries, c.bias)
        self.k_proj, self.v_proj = linear(c.dim, keys, c.bias), linear(c.dim, keys, c.bias)
        self.g_proj = linear(c.dim, queries, True)
        if c.scalar_gate:
            self.gs_proj = linear(c.dim, c.num_heads, True)
        if c.gate:
            self.o_gate_proj = linear(c.dim, queries)
        self.o_proj = linear(queries, c.dim, std=c.out_init_std)
        self.draws(*self._gates)
        self.reset_parameters()

    @property
    def _gates(self) -> tuple[str, ...]:
        return ("g_proj", "gs_proj") if self.config.scalar_gate else ("g_proj",)

    def reset_parameters(self) -> None:
        """Draws the weights of the gates and sets their biases to gate_bias."""
        for name in self._gates:
            layer = cast(Linear, self.get_submodule(name))
            assert layer.bias is not None
            nn.init.normal_(layer.weight, std=self.config.init_std)
            nn.init.constant_(layer.bias, self.config.gate_bias)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a PathCache, of keys and values of all query heads."""
        c = self.config
        sizes = (batch, max_length, c.num_heads, c.head_size)
        weight = self.k_proj.weight
        return new.with_path(self, weight, *sizes, num_heads=c.num_heads, taps=0, **storage)

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
            rope: not used, since the gates encode positions.
            mask: must be None.
        """
        if mask is not None:
            raise ValueError("WallAttention: mask must be None, got a mask")
        c = self.config
        cache = new.require_path("WallAttention", state)
        x, sequences = sequences_of("WallAttention", "x", x, state=cache)
        require_tokens("WallAttention", x, c.dim)
        layers = self.q_proj, self.k_proj, self.v_proj, self.g_proj
        q, k, v, g = (layer(x).unflatten(-1, (-1, c.head_size)) for layer in layers)
        g = nnf.logsigmoid(widen(g))
        scalar = nnf.logsigmoid(widen(self.gs_proj(x))) if c.scalar_gate else None
        options: dict[str, Any] = {"backend": c.backend}
        if cache is None:
            cu_seqlens = sequences.cu_seqlens
            out = functional.wall_attention(q, k, v, g, scalar, cu_seqlens=cu_seqlens, **options)
        else:
            group = c.num_heads // c.kv_heads
            k, v = cache.append(*(t.repeat_interleave(group, 2) for t in (k, v)))
            scalar = None if scalar is None else cache.forget(scalar)
            out, keys = functional.wall_attention(q, k, v, g, scalar, return_keys=True, **options)
            cache.carry(keys)
        out = out.flatten(-2)
        if c.gate:
            out = out * self.o_gate_proj(x).sigmoid()
        y: Tensor = self.o_proj(out)
        return sequences.restored(y)
