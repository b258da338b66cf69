"""Relative positions in attention scores: T5's biases and DeBERTa's attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omniattn.checks.arguments import require_tensor
from omniattn.functional.masks import Mask
from omniattn.functional.scores import DistanceRows, T5Bias
from omniattn.modules.base.fields import Backend, Probability, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import require_tokens

P2C_INDICES = ("code", "paper")


class T5RelativeBias(Layer):
    """T5's learned attention biases, one per distance bucket and head.

    A stack has one such layer and passes its result to the `relative` argument of every
    self-attention layer Attention(scale=1).

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the table.

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
        """Sizes; `bidirectional` is True for encoders; `init_std` of the table (T5: dim^-1/2)."""

        num_heads: Size
        num_buckets: Size = 32
        max_distance: Size = 128
        bidirectional: bool = True
        init_std: float = 0.02

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
        table = torch.empty(c.num_buckets, c.num_heads, device=device, dtype=dtype)
        self.weight = nn.Parameter(table)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table from N(0, init_std^2)."""
        nn.init.normal_(self.weight, std=self.config.init_std)

    def forward(self) -> T5Bias:
        """Returns the score term for functional.attention."""
        c = self.config
        return T5Bias(self.weight, c.bidirectional, c.max_distance)


class DisentangledAttention(Layer):
    """Attention with content-to-content, content-to-position and position-to-content scores.

    ``s_ij = (q_i . k_j + q_i . kr_d + k_j . qr_d) / sqrt(f D)`` with f the number of terms,
    ``d = clamp(rel(i - j) + span, 0, 2 span - 1)``, and kr, qr the key and query projections of the
    position embeddings. With log buckets large distances share a row.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) or a jagged nested tensor, positions (2 span, dim) -> the shape of x.
        Parameters, named as in DeBERTa-v2: query_proj, key_proj, value_proj and, unless shared,
        pos_key_proj, pos_query_proj; o_proj with `out_proj`.

    Notes:
        Memory grows with T, not with T^2. Without `out_proj` the enclosing block provides the
        output projection.

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
            dim, num_heads: width of x and number of heads.
            max_distance: m, bound of the embedded distances.
            buckets: b, number of log buckets, 0 for none; span is b, or without buckets m.
            content_to_position, position_to_content: True to add the score term.
            share_projections: True if positions use the content projections (v2, v3).
            clamp_distance: True to clamp distances to m - 1 before bucketing, as in Microsoft's
                code but not in transformers.
            p2c_index: row of the position-to-content term: "code" for d_ij, as in all checkpoints,
                or "paper" for d_ji.
            dropout_p, init_std, backend: as in Attention.
            key_bias: True for biases of the key projections (v2, v3; v1 has none).
            out_proj: True to add an output projection with bias.
            out_init_std: standard deviation of its weight.
        """

        dim: Size
        num_heads: Size
        max_distance: Size = 512
        buckets: int = 0
        content_to_position: bool = True
        position_to_content: bool = True
        share_projections: bool = True
        clamp_distance: bool = True
        p2c_index: str = "code"
        dropout_p: Probability = 0.0
        init_std: float = 0.02
        backend: Backend = None
        key_bias: bool = True
        out_proj: bool = False
        out_init_std: float = 0.02

        def __post_init__(self) -> None:
            super().__post_init__()
            self._require_multiple("dim", "num_heads")
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

        def linear(bias: bool = True, std: float = c.init_std) -> Linear:
            config = Linear.Config(c.dim, c.dim, bias, std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        self.query_proj, self.key_proj, self.value_proj = linear(), linear(c.key_bias), linear()
        if not c.share_projections:
            self.pos_key_proj, self.pos_query_proj = linear(c.key_bias), linear()
        if c.out_proj:
            self.o_proj = linear(std=c.out_init_std)

    def _reach(self) -> int:
        """Returns the distance from which all distances share a row."""
        c = self.config
        if c.clamp_distance or not c.buckets:
            return c.max_distance
        middle = c.buckets // 2
        steps = (c.buckets - middle - 1) / (middle - 1)
        return int(middle * ((c.max_distance - 1) / middle) ** steps) + 2

    def _rows(self, distance: Tensor) -> Tensor:
        """Returns the embedding row d of each distance i - j."""
        c = self.config
        if c.clamp_distance:
            distance = distance.clamp(1 - c.max_distance, c.max_distance - 1)
        if c.buckets:
            middle = c.buckets // 2
            size = distance.abs().clamp(min=1).double()
            far = (size / middle).log() / math.log((c.max_distance - 1) / middle) * (middle - 1)
            far = (far.ceil() + middle) * distance.sign()
            distance = torch.where(distance.abs() <= middle, distance, far.long())
        return (distance + c.span).clamp(0, 2 * c.span - 1)

    def _terms(self, positions: Tensor) -> dict[str, DistanceRows]:
        """Returns the positional score terms as options of functional.attention."""
        c = self.config
        reach = self._reach()
        distance = torch.arange(reach, -reach - 1, -1, device=positions.device)  # i - j
        own = not c.share_projections

        def rows(projection: nn.Module, distance: Tensor) -> DistanceRows:
            heads = projection(positions).unflatten(-1, (c.num_heads, -1))
            return DistanceRows(heads.index_select(0, self._rows(distance)), reach)

        found = {}
        if c.content_to_position:
            projection = self.pos_key_proj if own else self.key_proj
            found["relative_keys"] = rows(projection, distance)
        if c.position_to_content:
            projection = self.pos_query_proj if own else self.query_proj
            sign = -1 if c.p2c_index == "paper" else 1
            found["relative_queries"] = rows(projection, sign * distance)
        return found

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        mask: Tensor | Mask | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim): the heads' outputs, projected with `out_proj`.

        Args:
            x: content.
            positions: (2 span, dim), (normalised) embeddings of the distances -span .. span - 1.
            mask: as in Attention.
            context: (B, T, dim), the content of keys and values; default x. Not with a nested x.
        """
        c = self.config

        def heads(projection: nn.Module, t: Tensor) -> Tensor:
            split: Tensor = projection(t).unflatten(-1, (c.num_heads, -1))
            return split

        require_tensor("DisentangledAttention", "x", x)
        require_tensor("DisentangledAttention", "positions", positions)
        if positions.shape != (2 * c.span, c.dim):
            raise ValueError(
                f"DisentangledAttention: positions must have shape {(2 * c.span, c.dim)}, "
                f"got positions={tuple(positions.shape)}"
            )
        x, sequences = sequences_of("DisentangledAttention", "x", x)
        require_tokens("DisentangledAttention", x, self.config.dim)
        source = x if context is None else context
        if source is not x:
            self._require_context(x, source, sequences.nested is not None)
        terms = 1 + c.content_to_position + c.position_to_content
        out = sequences.attention()(
            heads(self.query_proj, x),
            heads(self.key_proj, source),
            heads(self.value_proj, source),
            mask=mask,
            scale=(c.dim // c.num_heads * terms) ** -0.5,
            dropout_p=c.dropout_p if self.training else 0.0,
            backend=c.backend,
            **self._terms(positions),
        )
        out = out.flatten(-2)
        return sequences.restored(self.o_proj(out) if c.out_proj else out)

    def _require_context(self, x: Tensor, context: Tensor, nested: bool) -> None:
        """Requires content of keys that are as many as the queries."""
        require_tensor("DisentangledAttention", "context", context)
        if nested or context.is_nested:
            raise ValueError("DisentangledAttention: context must be None where x is nested")
        if context.shape != x.shape:
            raise ValueError(
                "DisentangledAttention: context must have the shape of x, got "
                f"context.shape={tuple(context.shape)}, x.shape={tuple(x.shape)}"
            )
