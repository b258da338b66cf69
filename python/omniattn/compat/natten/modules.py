"""Layers of `natten`, with NATTEN's arguments and names of weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from omniattn.checks.arguments import require_int
from omniattn.compat._errors import errors_as, require_real
from omniattn.compat.natten.neighborhood import Bools, Ints, neighborhood_attention_generic


class NeighborhoodAttentionGeneric(nn.Module):
    """Projection to q, k and v, neighborhood attention in a grid of `na_dim` axes, projection.

    Args:
        na_dim: number of axes of the grid.
        embed_dim: width of x and y.
        num_heads: number of heads, a divisor of embed_dim.
        kernel_size, stride, dilation, is_causal: see :func:`neighborhood_attention_generic`.
        qkv_bias: True for a bias of the projection to q, k and v.
        qk_scale: factor of the scores; None and 0 are 1 / sqrt(embed_dim / num_heads).
        proj_drop: probability of dropping an output.

    Shape:
        x (B, ..., embed_dim) -> (B, ..., embed_dim).
    """

    def __init__(
        self,
        na_dim: int,
        embed_dim: int,
        num_heads: int,
        kernel_size: Ints,
        stride: Ints = 1,
        dilation: Ints = 1,
        is_causal: Bools = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.op = f"NeighborhoodAttention{na_dim}D"
        require_int(self.op, "na_dim", na_dim, 1, 3)
        require_int(self.op, "num_heads", num_heads, 1)
        if embed_dim % num_heads:
            raise ValueError(
                f"{self.op}: embed_dim must be a multiple of num_heads, got embed_dim={embed_dim}, "
                f"num_heads={num_heads}"
            )
        self.na_dim, self.embed_dim, self.num_heads = na_dim, embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.scale = qk_scale or self.head_dim**-0.5
        self.kernel_size, self.stride, self.dilation, self.is_causal = (
            _each_axis(self.op, name, value, na_dim)
            for name, value in (
                ("kernel_size", kernel_size),
                ("stride", stride),
                ("dilation", dilation),
                ("is_causal", is_causal),
            )
        )
        self.qkv = nn.Linear(embed_dim, embed_dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(embed_dim, embed_dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        require_real(self.op, x=x)
        if x.ndim != self.na_dim + 2 or x.shape[-1] != self.embed_dim:
            raise ValueError(
                f"{self.op}: x must have {self.na_dim + 2} dimensions, the last one "
                f"{self.embed_dim}, got x.shape={tuple(x.shape)}"
            )
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        options = self.kernel_size, self.stride, self.dilation, self.is_causal
        with errors_as(self.op, "neighborhood_attention_generic"):
            out = neighborhood_attention_generic(q, k, v, *options, scale=self.scale)
        assert isinstance(out, Tensor)
        y: Tensor = self.proj_drop(self.proj(out.flatten(-2)))
        return y

    def extra_repr(self) -> str:
        names = "head_dim", "num_heads", "kernel_size", "stride", "dilation", "is_causal"
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class NeighborhoodAttention1D(NeighborhoodAttentionGeneric):
    """Neighborhood attention of a sequence, see :class:`NeighborhoodAttentionGeneric`."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kernel_size: Ints,
        stride: Ints = 1,
        dilation: Ints = 1,
        is_causal: Bools = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        proj_drop: float = 0.0,
    ) -> None:
        grid = kernel_size, stride, dilation, is_causal
        super().__init__(1, embed_dim, num_heads, *grid, qkv_bias, qk_scale, proj_drop)


class NeighborhoodAttention2D(NeighborhoodAttentionGeneric):
    """Neighborhood attention in two dimensions, see :class:`NeighborhoodAttentionGeneric`."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kernel_size: Ints,
        stride: Ints = 1,
        dilation: Ints = 1,
        is_causal: Bools = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        proj_drop: float = 0.0,
    ) -> None:
        grid = kernel_size, stride, dilation, is_causal
        super().__init__(2, embed_dim, num_heads, *grid, qkv_bias, qk_scale, proj_drop)


class NeighborhoodAttention3D(NeighborhoodAttentionGeneric):
    """Neighborhood attention in three dimensions, see :class:`NeighborhoodAttentionGeneric`."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kernel_size: Ints,
        stride: Ints = 1,
        dilation: Ints = 1,
        is_causal: Bools = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        proj_drop: float = 0.0,
    ) -> None:
        grid = kernel_size, stride, dilation, is_causal
        super().__init__(3, embed_dim, num_heads, *grid, qkv_bias, qk_scale, proj_drop)


def _each_axis(op: str, name: str, value: Any, axes: int) -> tuple[Any, ...]:
    """Returns one value for each axis."""
    each = tuple(value) if isinstance(value, (list, tuple)) else (value,) * axes
    if len(each) != axes:
        raise ValueError(f"{op}: {name} must have {axes} values, got {name}={value}")
    return each
