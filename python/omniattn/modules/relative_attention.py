"""Attention with relative positions in its scores: T5, Transformer-XL, DeBERTa."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omniattn.functional.masks import Mask
from omniattn.functional.scores import T5Bias
from omniattn.modules.attention import with_cache
from omniattn.modules.jagged import sequences_of
from omniattn.modules.kv_cache import KVCache, require_cache, storage_like
from omniattn.modules.layer import Layer, LayerConfig, config_or_fields
from omniattn.modules.linear import Linear
from omniattn.modules.mixer import Mixer
from omniattn.modules.state import State

P2C_INDICES = ("code", "paper")


class T5RelativeBias(Layer):
    """T5's table of learned biases, one a bucket of distances and head.

    A stack has one in its first layer and gives its value to the `relative` argument of every
    Attention(scale=1); cross-attention has none.

    Args:
        config: sizes and options.
        device, dtype: of the table.

    Shape:
        () -> T5Bias. Parameter weight (num_buckets, num_heads).

    Reference:
        Raffel et al., Exploring the Limits of Transfer Learning, 2020, arXiv 1910.10683.

    Example:
        >>> T5RelativeBias(T5RelativeBias.Config(num_heads=4))().table.shape
        torch.Size([32, 4])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes; `bidirectional` for encoders; `init_std` of the table (T5: dim^-1/2)."""

        num_heads: int
        num_buckets: int = 32
        max_distance: int = 128
        bidirectional: bool = True
        init_std: float = 0.02

    @config_or_fields(Config)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        table = torch.empty(c.num_buckets, c.num_heads, device=device, dtype=dtype)
        self.weight = nn.Parameter(table)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table from N(0, init_std^2)."""
        nn.init.normal_(self.weight, std=self.config.init_std)

    def forward(self) -> T5Bias:
        """The term for functional.attention."""
        c = self.config
        return T5Bias(self.weight, c.bidirectional, c.max_distance)


class TransformerXLAttention(Mixer):
    """Causal attention to a segment and its memory, by content and by distance.

    ``s_ij = ((q_i + u) . k_j + (q_i + v) . r_{i + M - j}) / sqrt(D)`` with ``r = W_r sinusoid``;
    u and v are learned for each head, M is the length of the memory.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        x (B, T, dim), memory (B, M, dim) -> (B, T, dim); without memory and state x may be a jagged
        nested tensor. Parameters, named as in the release: qkv_net, r_net, o_net, r_w_bias (u) and
        r_r_bias (v), (num_heads, head_dim).

    Notes:
        The distance term is a (B, H, T, M + T) tensor, of the longest T where x is nested.

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
            same_length: a query sees memory_length tokens at most, wherever it stands.
            clamp_length: distances beyond count as this one, -1 for none.
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

    @config_or_fields(Config)
    def __init__(
        self,
        config: Config,
        *,
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
        self.r_w_bias, self.r_r_bias = vector(), vector()
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

    def new_state(
        self,
        batch: int,
        max_length: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """An empty cache of what the layer has read, (B, T, 1, dim), as keys; without values."""
        like = storage_like(self.qkv_net.weight, device, dtype)
        return KVCache(batch, max_length, 1, self.config.dim, v_head_dim=0, **like)

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
        by_place = sequences.padded(q + self.r_r_bias)
        sinusoid = self._sinusoid(before + by_place.shape[1], x)
        r = self.r_net(sinusoid).unflatten(-1, (c.num_heads, -1))
        scale = c.head_size**-0.5
        by_distance = torch.einsum("bihd,chd->bhic", by_place, r) * scale
        window = (c.memory_length - 1, 0) if c.same_length else (-1, 0)
        out = sequences.attention()(
            q + self.r_w_bias,
            k,
            v,
            causal=True,
            window_size=window,
            mask=mask,
            bias=_shift(by_distance),
            scale=scale,
            dropout_p=c.dropout_p if self.training else 0.0,
            backend=c.backend,
        )
        return sequences.restored(self.o_net(out.flatten(-2)))


def _shift(x: Tensor) -> Tensor:
    """x[i, c] of distance K - 1 - c -> y[i, j] of distance i + K - T - j, right for j <= i + K - T.

    One more column makes row i start one place later for each row before it.
    """
    tokens, keys = x.shape[-2:]
    padded = nn.functional.pad(x, (1, 0)).flatten(-2)[..., tokens:]
    return padded.unflatten(-1, (tokens, keys))


class DisentangledAttention(Layer):
    """Attention by content, content to position and position to content.

    ``s_ij = (q_i . k_j + q_i . kr_d + k_j . qr_d) / sqrt(f D)``, f the number of terms, with
    ``d = clamp(rel(i - j) + span, 0, 2 span - 1)`` and kr, qr the position embeddings under the key
    and query projections. With log buckets far distances share a row.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        x (B, T, dim) or a jagged nested tensor, positions (2 span, dim) -> as x. Parameters, named
        as in DeBERTa-v2: query_proj, key_proj, value_proj and, unless shared, pos_key_proj,
        pos_query_proj.

    Notes:
        The position terms are a (B, H, T, T) tensor, of the longest T where x is nested. The output
        projection belongs to the block.

    Reference:
        He et al., DeBERTa, 2020, arXiv 2006.03654; DeBERTaV3, 2021, arXiv 2111.09543.

    Example:
        >>> config = DisentangledAttention.Config(dim=8, num_heads=2, max_distance=4)
        >>> DisentangledAttention(config)(torch.ones(1, 5, 8), torch.ones(8, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim, num_heads: sizes.
            max_distance: m, of the embedded distances.
            buckets: b of the log buckets, 0 for none; span is b, or without buckets m.
            content_to_position, position_to_content: the terms.
            share_projections: positions use the projections of the content (v2, v3).
            clamp_distance: limit distances to m - 1 before bucketing, as Microsoft's code does and
                transformers does not.
            p2c_index: the row of position to content is "code" d_ij, as in all checkpoints, or
                "paper" d_ji, as in the paper.
            dropout_p, init_std, backend: as in Attention.
        """

        dim: int
        num_heads: int
        max_distance: int = 512
        buckets: int = 0
        content_to_position: bool = True
        position_to_content: bool = True
        share_projections: bool = True
        clamp_distance: bool = True
        p2c_index: str = "code"
        dropout_p: float = 0.0
        init_std: float = 0.02
        backend: str | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.dim % self.num_heads:
                raise ValueError(
                    "DisentangledAttention: dim must be a multiple of num_heads, "
                    f"got dim={self.dim}, num_heads={self.num_heads}"
                )
            if self.buckets and not 2 <= self.buckets // 2 < self.max_distance - 1:
                raise ValueError(
                    "DisentangledAttention: buckets must be >= 4 with buckets / 2 < "
                    f"max_distance - 1, got buckets={self.buckets}, "
                    f"max_distance={self.max_distance}"
                )
            if self.p2c_index not in P2C_INDICES:
                raise ValueError(
                    f"DisentangledAttention: p2c_index must be one of {', '.join(P2C_INDICES)}, "
                    f"got p2c_index={self.p2c_index!r}"
                )

        @property
        def span(self) -> int:
            """Half the number of position embeddings."""
            return self.buckets or self.max_distance

    @config_or_fields(Config)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config

        def linear() -> Linear:
            config = Linear.Config(c.dim, c.dim, True, c.init_std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        self.query_proj, self.key_proj, self.value_proj = linear(), linear(), linear()
        if not c.share_projections:
            self.pos_key_proj, self.pos_query_proj = linear(), linear()

    def _rows(self, tokens: int, device: torch.device) -> Tensor:
        """The embedding's row d (T, T) of query i and key j."""
        c = self.config
        position = torch.arange(tokens, device=device)
        distance = position[:, None] - position
        if c.clamp_distance:
            distance = distance.clamp(1 - c.max_distance, c.max_distance - 1)
        if c.buckets:
            middle = c.buckets // 2
            size = distance.abs().clamp(min=1).double()
            far = (size / middle).log() / math.log((c.max_distance - 1) / middle) * (middle - 1)
            far = (far.ceil() + middle) * distance.sign()
            distance = torch.where(distance.abs() <= middle, distance, far.long())
        return (distance + c.span).clamp(0, 2 * c.span - 1)

    def forward(self, x: Tensor, positions: Tensor, *, mask: Tensor | Mask | None = None) -> Tensor:
        """x (B, T, dim) -> (B, T, dim) of the heads, before the output projection.

        Args:
            x: content.
            positions: (2 span, dim), the (normed) embeddings of the distances -span .. span - 1.
            mask: as in Attention.
        """
        c = self.config

        def heads(projection: nn.Module, t: Tensor) -> Tensor:
            split: Tensor = projection(t).unflatten(-1, (c.num_heads, -1))
            return split

        if positions.shape != (2 * c.span, c.dim):
            raise ValueError(
                f"DisentangledAttention: positions must have shape {(2 * c.span, c.dim)}, "
                f"got positions={tuple(positions.shape)}"
            )
        x, sequences = sequences_of("DisentangledAttention", "x", x)
        q, k = heads(self.query_proj, x), heads(self.key_proj, x)
        by_place = sequences.padded(q), sequences.padded(k)
        rows = self._rows(by_place[0].shape[1], x.device)[None, None]
        terms: list[Tensor] = []
        if c.content_to_position:
            projection = self.key_proj if c.share_projections else self.pos_key_proj
            scores = torch.einsum("bihd,rhd->bhir", by_place[0], heads(projection, positions))
            terms.append(scores.gather(-1, rows.expand(*scores.shape[:2], -1, -1)))
        if c.position_to_content:
            projection = self.query_proj if c.share_projections else self.pos_query_proj
            scores = torch.einsum("bjhd,rhd->bhrj", by_place[1], heads(projection, positions))
            rows = rows.mT if c.p2c_index == "paper" else rows
            terms.append(scores.gather(-2, rows.expand(*scores.shape[:2], -1, -1)))
        scale = (q.shape[-1] * (1 + len(terms))) ** -0.5
        out = sequences.attention()(
            q,
            k,
            heads(self.value_proj, x),
            mask=mask,
            bias=sum(terms[1:], terms[0]) * scale if terms else None,
            scale=scale,
            dropout_p=c.dropout_p if self.training else 0.0,
            backend=c.backend,
        )
        return sequences.restored(out.flatten(-2))
