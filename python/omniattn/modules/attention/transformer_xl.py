"""Transformer-XL attention: relative positions and a memory of earlier segments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn.checks.arguments import (
    FLOATS,
    autocast_dtype,
    require_int,
    require_shape,
    require_tensor,
    shown,
)
from omniattn.functional.masks import Mask
from omniattn.functional.scores import DistanceBias, DistanceRows
from omniattn.modules.base.fields import Backend, Probability, SignedInt, Size
from omniattn.modules.base.forms import C, ConfigAlone, OnDevice, either
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import Mixer, require_tokens
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache, require_cache, with_cache


class _OnBiases(OnDevice):
    biases: tuple[nn.Parameter, nn.Parameter] | None = field(default=None, kw_only=True)


class _ByConfig(ConfigAlone[C], _OnBiases): ...


class TransformerXLAttention(Mixer):
    """Causal attention to a segment and its memory, with content and distance scores.

    ``s_ij = ((q_i + u) . k_j + (q_i + v) . r_{i + M - j}) / sqrt(D)`` with ``r = W_r sinusoid``;
    u and v are learned per head, M is the length of the memory.

    Args:
        config: sizes and options.
        biases: u and v of another layer, `(first.r_w_bias, first.r_r_bias)`, which all layers share
            in the paper; None for separate biases.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim), memory (B, M, dim) -> (B, T, dim); without memory and state x can be a jagged
        nested tensor. Parameters, named as in the release: qkv_net, r_net, o_net, r_w_bias (u) and
        r_r_bias (v), both (num_heads, head_dim).

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
            dim, num_heads, head_dim: width of x and y; number of heads; width of a head, default
                dim / num_heads.
            memory_length: number of tokens that next_memory keeps.
            same_length: True to limit every query to memory_length tokens.
            clamp_length: largest distance, to which larger ones are clamped; -1 for none.
            dropout_p, init_std, backend: as in Attention.
        """

        dim: Size
        num_heads: Size
        head_dim: Size | None = None
        memory_length: int = 128
        same_length: bool = False
        clamp_length: SignedInt = -1
        dropout_p: Probability = 0.0
        init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.head_dim is None:
                self._require_multiple("dim", "num_heads")
            if self.dim % 2:
                raise ValueError(
                    "TransformerXLAttention: dim must be even, as sines and cosines are pairs, "
                    f"got dim={self.dim}"
                )
            require_int("TransformerXLAttention", "clamp_length", self.clamp_length, -1)
            if self.same_length and self.memory_length < 1:
                raise ValueError(
                    "TransformerXLAttention: same_length needs a memory_length of at least 1, "
                    f"got memory_length={self.memory_length}"
                )

        @property
        def head_size(self) -> int:
            """Size of one head."""
            return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    class _Fields(Config, _OnBiases): ...

    @config_or_fields(Config, either(_ByConfig[Config], _Fields).init)
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
        if biases is not None:
            _require_biases(biases, (c.num_heads, c.head_size))
        self.r_w_bias, self.r_r_bias = (vector(), vector()) if biases is None else biases
        if biases is None:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the biases u and v of the queries from N(0, init_std^2)."""
        nn.init.normal_(self.r_w_bias, std=self.config.init_std)
        nn.init.normal_(self.r_r_bias, std=self.config.init_std)

    def next_memory(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """Returns the last memory_length tokens of [memory; x], detached, for the next segment."""
        require_tensor("TransformerXLAttention", "x", x)
        require_tokens("TransformerXLAttention", x, self.config.dim)
        if memory is not None:
            _require_memory(memory, x)
        both = x if memory is None else torch.cat([memory, x], 1)
        return both[:, max(0, both.shape[1] - self.config.memory_length) :].detach()

    def _sinusoid(self, length: int, x: Tensor) -> Tensor:
        """Computes rows (length, dim) of distances length - 1 .. 0: all sines, then all cosines."""
        c = self.config
        distance = torch.arange(length - 1, -1, -1, dtype=torch.float64, device=x.device)
        if c.clamp_length >= 0:
            distance = distance.clamp(max=c.clamp_length)
        exponent = torch.arange(0, c.dim, 2, dtype=torch.float64, device=x.device) / c.dim
        angle = distance[:, None] * 10000.0**-exponent
        return torch.cat([angle.sin(), angle.cos()], -1).to(x.dtype)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a cache of the layer's inputs (B, T, 1, dim), stored as keys without values."""
        sizes = (batch, max_length, 1, self.config.dim)
        return new.keys_and_values(self, self.qkv_net.weight, *sizes, v_head_dim=0, **storage)

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
        """Maps x (B, T, dim) to (B, T, dim).

        Args:
            x: new tokens.
            memory: (B, M, dim), the layer's inputs before x; alternatively use a state.
            state: a Cache of all earlier inputs, to which x is appended.
            rope: ignored; distances have their own score term.
            mask: as in Attention.
        """
        c = self.config
        cache = require_cache("TransformerXLAttention", state)
        x, sequences = sequences_of("TransformerXLAttention", "x", x, state=cache)
        require_tokens("TransformerXLAttention", x, c.dim)
        if memory is not None:
            if sequences.nested is not None or cache is not None:
                raise ValueError(
                    "TransformerXLAttention: memory must be None where x is nested or with a "
                    f"state, got memory={shown(memory)}"
                )
            _require_memory(memory, x)
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


def _require_biases(biases: Any, shape: tuple[int, int]) -> None:
    """Requires that `biases` is a pair of parameters of this shape."""
    pair = isinstance(biases, tuple | list) and len(biases) == 2
    if not pair or not all(isinstance(bias, nn.Parameter) for bias in biases):
        raise TypeError(
            "TransformerXLAttention: biases must be a pair of torch.nn.Parameter, "
            f"got biases={shown(biases)}"
        )
    for i, bias in enumerate(biases):
        require_shape("TransformerXLAttention", f"biases[{i}]", bias, shape)


def _require_memory(memory: Tensor, x: Tensor) -> None:
    """Requires that `memory` is (B, M, dim) for x (B, T, dim), with its dtype and device."""
    op = "TransformerXLAttention"
    require_tensor(op, "memory", memory)
    sizes = x.shape[0], x.shape[2]
    if memory.is_nested or memory.ndim != 3 or (memory.shape[0], memory.shape[2]) != sizes:
        raise ValueError(
            f"{op}: memory must have shape ({sizes[0]}, M, {sizes[1]}), got memory={shown(memory)}"
        )
    # Autocast casts both, but leaves float64 alone.
    cast = (dtype for dtype in FLOATS if dtype != torch.float64)
    fits = (x.dtype,) if autocast_dtype(x) is None or x.dtype == torch.float64 else tuple(cast)
    if memory.dtype not in fits:
        raise TypeError(
            f"{op}: memory must have the dtype of x, "
            f"got memory.dtype={memory.dtype}, x.dtype={x.dtype}"
        )
    if memory.device != x.device:
        raise ValueError(
            f"{op}: memory must be on the device of x, "
            f"got memory.device={memory.device}, x.device={x.device}"
        )
