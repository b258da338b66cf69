"""Multi-head attention layer: self or cross; multi-head, multi-query or grouped-query."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from omniattn import functional
from omniattn.modules.kv_cache import KVCache
from omniattn.modules.linear import Linear
from omniattn.modules.norm import RMSNorm


class Attention(nn.Module):
    """y = W_o softmax(scale q k^T) v with q = W_q x, k = W_k s, v = W_v s; s is x or a source.

    Order: projections, qk-norm, rotary embedding, cache, attention, output projection. Query head
    h reads kv head h // (num_heads / num_kv_heads): MHA, GQA (fewer kv heads) or MQA (one).

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        x (B, T, dim), source (B, S, source_dim) -> (B, T, dim).
        Parameters q_proj, k_proj, v_proj, o_proj and, with qk_norm, q_norm and k_norm (head_dim,).

    Notes:
        A query that sees no key gives W_o 0 + b and has zero gradients. Dropout acts in training
        mode only.

    Reference:
        Vaswani et al. 2017, arXiv 1706.03762; MQA: Shazeer 2019, arXiv 1911.02150; GQA: Ainslie
        et al. 2023, arXiv 2305.13245.

    Example:
        >>> layer = Attention(Attention.Config(dim=16, num_heads=4, num_kv_heads=2))
        >>> layer(torch.ones(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    @dataclass(frozen=True)
    class Config:
        """Sizes and options.

        Args:
            dim: width of x and y.
            num_heads: query heads.
            num_kv_heads: key and value heads, a divisor of num_heads; default num_heads.
            head_dim: default dim / num_heads.
            causal: query i sees keys up to its own position (bottom-right aligned).
            cross: keys and values come from `source`, never from x.
            source_dim: width of the source, default dim.
            window_size: (left, right) keys seen beside the own position, -1 unbounded.
            qk_norm: RMSNorm with a weight (head_dim,) on every head of q and k.
            bias, out_bias: of q_proj, k_proj, v_proj; of o_proj.
            rope_interleaved: rotary pairs are (2i, 2i + 1) instead of (i, i + Dr / 2).
            scale: of the scores, default 1 / sqrt(head_dim).
            softcap: scores become softcap * tanh(scores / softcap) if positive.
            dropout_p: of the attention weights.
            init_std, out_init_std: of the weights and of o_proj.
            backend: of all ops of this layer.
        """

        dim: int
        num_heads: int
        num_kv_heads: int | None = None
        head_dim: int | None = None
        causal: bool = True
        cross: bool = False
        source_dim: int | None = None
        window_size: tuple[int, int] = (-1, -1)
        qk_norm: bool = False
        qk_norm_eps: float = 1e-6
        bias: bool = False
        out_bias: bool = False
        rope_interleaved: bool = False
        scale: float | None = None
        softcap: float = 0.0
        dropout_p: float = 0.0
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: str | None = None

        def __post_init__(self) -> None:
            if self.num_heads <= 0 or self.kv_heads <= 0 or self.num_heads % self.kv_heads:
                raise ValueError(
                    "Attention: num_heads must be a multiple of num_kv_heads, "
                    f"got num_heads={self.num_heads}, num_kv_heads={self.kv_heads}"
                )
            if self.head_dim is None and self.dim % self.num_heads:
                raise ValueError(
                    "Attention: dim must be a multiple of num_heads unless head_dim is given, "
                    f"got dim={self.dim}, num_heads={self.num_heads}"
                )
            if self.cross and self.causal:
                raise ValueError("Attention: cross must have causal=False, got causal=True")

        @property
        def kv_heads(self) -> int:
            """Number of key and value heads."""
            return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

        @property
        def head_size(self) -> int:
            """Size of one head."""
            return self.dim // self.num_heads if self.head_dim is None else self.head_dim

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
        source_dim = c.dim if c.source_dim is None else c.source_dim

        def linear(n_in: int, n_out: int, bias: bool, std: float) -> Linear:
            config = Linear.Config(n_in, n_out, bias, std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        self.q_proj = linear(c.dim, q_dim, c.bias, c.init_std)
        self.k_proj = linear(source_dim, kv_dim, c.bias, c.init_std)
        self.v_proj = linear(source_dim, kv_dim, c.bias, c.init_std)
        self.o_proj = linear(q_dim, c.dim, c.out_bias, c.out_init_std)
        if c.qk_norm:
            norm = RMSNorm.Config(c.head_size, c.qk_norm_eps, backend=c.backend)
            self.q_norm = RMSNorm(norm, device=device, dtype=dtype)
            self.k_norm = RMSNorm(norm, device=device, dtype=dtype)

    def new_cache(self, batch: int, max_length: int, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache on the device, and by default of the dtype, of the parameters."""
        weight = self.k_proj.weight
        return KVCache(
            batch,
            max_length,
            self.config.kv_heads,
            self.config.head_size,
            device=weight.device,
            dtype=weight.dtype if dtype is None else dtype,
        )

    def _keys_and_values(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = self.k_proj(source).unflatten(-1, (self.config.kv_heads, -1))
        v = self.v_proj(source).unflatten(-1, (self.config.kv_heads, -1))
        return (self.k_norm(k) if self.config.qk_norm else k), v

    def forward(
        self,
        x: torch.Tensor,
        source: torch.Tensor | None = None,
        *,
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: KVCache | None = None,
        mask: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (B, T, dim) -> (B, T, dim).

        Args:
            x: queries, and keys and values of self-attention.
            source: (B, S, source_dim), of cross-attention; may be left out once it is in `cache`.
            rope: cos, sin of the positions of x, from RotaryEmbedding; self-attention only.
            cache: self-attention appends the new keys and values and attends to all; with
                cross-attention the first call stores those of the source, later calls read them.
            mask: boolean, True = attend, broadcastable to (B, num_heads, T, S).
            bias: added to the scores, broadcastable to (B, num_heads, T, S).
        """
        c = self.config
        q = self.q_proj(x).unflatten(-1, (c.num_heads, -1))
        if c.qk_norm:
            q = self.q_norm(q)
        if c.cross:
            k, v = self._cross_keys_and_values(source, cache, rope)
        else:
            if source is not None:
                raise ValueError("Attention: source must be None unless cross=True")
            k, v = self._keys_and_values(x)
            if rope is not None:
                q, k = cast(
                    "tuple[torch.Tensor, torch.Tensor]",
                    functional.apply_rotary(
                        q, k, *rope, interleaved=c.rope_interleaved, backend=c.backend
                    ),
                )
            if cache is not None:
                k, v = cache.append(k, v)
        out = cast(
            torch.Tensor,
            functional.attention(
                q,
                k,
                v,
                causal=c.causal,
                window_size=c.window_size,
                mask=mask,
                bias=bias,
                scale=c.scale,
                softcap=c.softcap,
                dropout_p=c.dropout_p if self.training else 0.0,
                backend=c.backend,
            ),
        )
        y: torch.Tensor = self.o_proj(out.flatten(-2))
        return y

    def _cross_keys_and_values(
        self,
        source: torch.Tensor | None,
        cache: KVCache | None,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if rope is not None:
            raise ValueError("Attention: rope must be None with cross=True")
        if cache is not None and cache.length > 0:
            return cache.views()
        if source is None:
            raise ValueError("Attention: source must be given with cross=True and no filled cache")
        k, v = self._keys_and_values(source)
        return (k, v) if cache is None else cache.append(k, v)
