"""Transformer-XL: attention by content and by distance, to a segment and its memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn.functional._checks import require_shape
from omniattn.functional.masks import Mask
from omniattn.functional.scores import DistanceBias, DistanceRows
from omniattn.modules import _signatures
from omniattn.modules.cache import require_cache, storage_like, with_cache
from omniattn.modules.jagged import sequences_of
from omniattn.modules.kv_cache import KVCache
from omniattn.modules.layer import LayerConfig, config_or_fields
from omniattn.modules.linear import Linear
from omniattn.modules.mixer import Mixer
from omniattn.modules.state import State, Storage, takes_cache


class TransformerXLAttention(Mixer):
    """Causal attention to a segment and its memory, by content and by distance.

    ``s_ij = ((q_i + u) . k_j + (q_i + v) . r_{i + M - j}) / sqrt(D)`` with ``r = W_r sinusoid``;
    u and v are learned for each head, M is the length of the memory.

    Args:
        config: sizes and options.
        biases: u and v of another layer, `(first.r_w_bias, first.r_r_bias)`, which the layers of
            the paper share; None for those of this layer alone.
        device, dtype: of the parameters.

    Shape:
        x (B, T, dim), memory (B, M, dim) -> (B, T, dim); without memory and state x may be a jagged
        nested tensor. Parameters, named as in the release: qkv_net, r_net, o_net, r_w_bias (u) and
        r_r_bias (v), (num_heads, head_dim).

    Notes:
        Memory grows with T, not with T^2.

    Reference:
        Dai et al., Transformer-XL, 2019, arXiv 1901.02860.

    Example:
        >>> layer = TransformerXLAttention(TransformerXLAttention.Config(dim=8, num_heads=2))
        >>> x = torch.ones(1, 3, 8)
        >>> layer(x, memory=layer.next_memory(x, None)).shape
        torch.Size([1, 3, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim, num_heads, head_dim: sizes; default head_dim is dim / num_heads.
            memory_length: number of tokens that next_memory keeps.
            same_length: every query sees at most memory_length tokens.
            clamp_length: larger distances are clamped to this one, -1 for none.
            dropout_p, init_std, backend: as in Attention.
        """

        dim: int
        num_heads: int
        head_dim: int | None = None
        memory_length: int = 128
        same_length: bool = False
        clamp_length: int = -1
        dropout_p: float = 0.0
        init_std: float = 0.02
        backend: str | None = None

        @property
        def head_size(self) -> int:
            """Size of one head."""
            return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @config_or_fields(Config, _signatures.TransformerXLAttention)
    def __init__(
        self,
        config: Config,
        *,
        biases: tuple[nn.Parameter, nn.Parameter] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        width = c.num_heads * c.head_size

        def linear(n_in: int, n_out: int) -> Linear:
            config = Linear.Config(n_in, n_out, False, c.init_std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        def vector() -> nn.Parameter:
            shape = c.num_heads, c.head_size
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.qkv_net = linear(c.dim, 3 * width)
        self.r_net = linear(c.dim, width)
        self.o_net = linear(width, c.dim)
        self.r_w_bias, self.r_r_bias = (vector(), vector()) if biases is None else biases
        for name, bias in (("u", self.r_w_bias), ("v", self.r_r_bias)):
            require_shape("TransformerXLAttention", name, bias, (c.num_heads, c.head_size))
        if biases is None:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the biases u and v of the queries from N(0, init_std^2)."""
        nn.init.normal_(self.r_w_bias, std=self.config.init_std)
        nn.init.normal_(self.r_r_bias, std=self.config.init_std)

    def next_memory(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """The last memory_length tokens of [memory; x], without gradient: for the next segment."""
        both = x if memory is None else torch.cat([memory, x], 1)
        return both[:, max(0, both.shape[1] - self.config.memory_length) :].detach()

    def _sinusoid(self, length: int, x: Tensor) -> Tensor:
        """Rows (length, dim) of distances length - 1 .. 0: all sines, then all cosines."""
        c = self.config
        distance = torch.arange(length - 1, -1, -1, dtype=torch.float64, device=x.device)
        if c.clamp_length >= 0:
            distance = distance.clamp(max=c.clamp_length)
        exponent = torch.arange(0, c.dim, 2, dtype=torch.float64, device=x.device) / c.dim
        angle = distance[:, None] * 10000.0**-exponent
        return torch.cat([angle.sin(), angle.cos()], -1).to(x.dtype)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> KVCache:
        """An empty cache of what the layer has read, (B, T, 1, dim), as keys; without values."""
        like = storage_like(self.qkv_net.weight, **storage)
        return KVCache(batch, max_length, 1, self.config.dim, v_head_dim=0, **like)

    @takes_cache
    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """x (B, T, dim) -> (B, T, dim).

        Args:
            x: queries, and keys and values.
            memory: (B, M, dim), what the layer read before x; or a state that keeps all of that.
            state: a Cache, to which x is appended.
            rope: not used, distances have a term of their own.
            mask: as in Attention.
        """
        c = self.config
        cache = require_cache("TransformerXLAttention", state)
        if memory is not None and (x.is_nested or cache is not None):
            raise ValueError(
                "TransformerXLAttention: memory must be None where x is nested or with a state, "
                f"got memory.shape={tuple(memory.shape)}"
            )
        x, sequences = sequences_of("TransformerXLAttention", "x", x, state=cache)
        source = x if memory is None else torch.cat([memory, x], 1)
        if cache is not None:
            source = cache.append(x[:, :, None], x[:, :, None, :0])[0][:, :, 0]
            mask = with_cache(cache, mask, positional=True)
        before = source.shape[1] - x.shape[1]
        q, k, v = self.qkv_net(source).unflatten(-1, (3, c.num_heads, -1)).unbind(2)
        q = q[:, before:]
        scale = c.head_size**-0.5
        longest = x.shape[1] if sequences.nested is None else sequences.longest
        r = self.r_net(self._sinusoid(max(1, before + longest), x)).unflatten(-1, (c.num_heads, -1))
        # (q + v) . r = (q + u) . r + (v - u) . r
        rest = ((self.r_r_bias - self.r_w_bias) * r).sum(-1) * scale
        window = (c.memory_length - 1, 0) if c.same_length else (-1, 0)
        out = sequences.attention()(
            q + self.r_w_bias,
            k,
            v,
            relative_keys=DistanceRows(r, -1),
            relative=DistanceBias(rest, -1),
            causal=True,
            window_size=window,
            mask=mask,
            scale=scale,
            dropout_p=c.dropout_p if self.training else 0.0,
            backend=c.backend,
        )
        return sequences.restored(self.o_net(out.flatten(-2)))
