"""Neighborhood attention in 1-D to 3-D grids, with NATTEN's arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import require_int, require_number, require_tensor
from omniattn.functional.masks import GridNeighborhood, Mask
from omniattn.functional.masks.grid import each_axis
from omniattn.modules.base.dropout import Dropout
from omniattn.modules.base.fields import Backend, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import require_no_mask
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache
from omniattn.modules.sparse.sparse_attention import QKV, SparseAttention


@dataclass(frozen=True)
class NeighborhoodConfig(LayerConfig):
    """Sizes and options, named as in NATTEN.

    Args:
        dim: width of x and y, `embed_dim` in NATTEN from 0.20 on.
        num_heads: number of heads, a divisor of dim.
        kernel_size, stride, dilation, is_causal: the neighborhood, one value per axis or one for
            all axes, see :class:`omniattn.functional.masks.GridNeighborhood`.
        qkv_bias: True to add a bias to the projection to q, k and v.
        qk_scale: factor of the scores, default 1 / sqrt(dim / num_heads).
        attn_drop, proj_drop: dropout probabilities of the attention weights and of y.
        init_std: standard deviation of the weights.
        backend: backend of all ops of the layer.
    """

    dim: Size
    num_heads: Size
    kernel_size: int | tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    dilation: int | tuple[int, ...] = 1
    is_causal: bool | tuple[bool, ...] = False
    qkv_bias: bool = True
    qk_scale: float | None = None
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    init_std: float = 0.02
    backend: Backend = None

    #: Number of dimensions of the grid.
    axes: ClassVar[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_multiple("dim", "num_heads")
        op = type(self).__qualname__.removesuffix(".Config")
        for name in ("kernel_size", "stride", "dilation", "is_causal"):
            each = each_axis(op, name, getattr(self, name), self.axes)
            for n in each if name != "is_causal" else ():
                require_int(op, name, n, 1)
        for name in ("attn_drop", "proj_drop"):
            require_number(op, name, getattr(self, name), 0, 1)
        self.mask(self.least)

    @property
    def least(self) -> tuple[int, ...]:
        """Shape of the smallest grid that contains a window."""
        kernels, steps = (
            each_axis(type(self).__qualname__, name, getattr(self, name), self.axes)
            for name in ("kernel_size", "dilation")
        )
        return tuple(kernel * step for kernel, step in zip(kernels, steps, strict=True))

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that rotary embeddings rotate."""
        return self.dim // self.num_heads

    def mask(self, shape: tuple[int, ...]) -> GridNeighborhood:
        """Returns the mask of the neighborhoods in a grid of this shape."""
        return GridNeighborhood(shape, self.kernel_size, self.stride, self.dilation, self.is_causal)


class _Neighborhood(Layer):
    """Base class: qkv projection, neighborhood attention in a grid, output projection."""

    config: NeighborhoodConfig

    def _build(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        c = self.config

        def linear(n_out: int, bias: bool) -> Linear:
            config = Linear.Config(c.dim, n_out, bias, c.init_std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        self.qkv = linear(3 * c.dim, c.qkv_bias)
        self.proj = linear(c.dim, True)
        self.drop = Dropout(c.proj_drop)

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Projects x (B, T, dim) to q, k and v (B, T, H, D)."""
        return self.qkv(x).unflatten(-1, (3, self.config.num_heads, -1)).unbind(2)

    def _in_grid(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        c = self.config
        return functional.attention(
            *(q, k, v),
            mask=mask,
            scale=c.qk_scale,
            dropout_p=c.attn_drop if self.training else 0.0,
            backend=c.backend,
        )

    def _joined(self, out: Tensor) -> Tensor:
        y: Tensor = self.drop(self.proj(out))
        return y

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (B, height, width, dim), or (B, depth, height, width, dim), to the same shape."""
        c, op = self.config, type(self).__name__
        require_tensor(op, "x", x)
        if x.is_nested or x.dim() != c.axes + 2 or x.shape[-1] != c.dim:
            got = "a nested tensor" if x.is_nested else f"x.shape={tuple(x.shape)}"
            grid = ", ".join(("depth", "height", "width")[-c.axes :])
            raise ValueError(f"{op}: x must have shape (B, {grid}, {c.dim}), got {got}")
        shape = tuple(x.shape[1:-1])
        out = self._in_grid(c.mask(shape), *self._heads(x.flatten(1, -2)))
        return self._joined(out.flatten(-2)).view(x.shape)


class NeighborhoodAttention1D(_Neighborhood, SparseAttention):
    """Attention of each token to its `kernel_size` nearest tokens.

    A decoder's mixer requires is_causal=True; sequences can then be shorter than the window.

    Args:
        config: sizes and options, see `NeighborhoodConfig`.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters, named as in NATTEN: qkv, proj.

    Reference:
        Hassani et al., Neighborhood Attention Transformer, 2022, arXiv 2204.07143.

    Example:
        >>> layer = NeighborhoodAttention1D(dim=8, num_heads=2, kernel_size=3, dilation=2)
        >>> layer(torch.ones(1, 10, 8)).shape
        torch.Size([1, 10, 8])
    """

    @dataclass(frozen=True)
    class Config(NeighborhoodConfig):
        """Fields of `NeighborhoodConfig`."""

        axes = 1

    config: Config

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
        self.config = config
        self._build(device, dtype)

    @property
    def _causal(self) -> bool:
        return self.config.is_causal in (True, (True,))

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a cache of keys and values; requires is_causal=True and stride=1."""
        c = self.config
        if not self._causal or c.stride not in (1, (1,)):
            raise ValueError(
                "NeighborhoodAttention1D: a state must have is_causal=True and stride=1, "
                f"got is_causal={c.is_causal}, stride={c.stride}"
            )
        sizes = (batch, max_length, c.num_heads, c.dim // c.num_heads)
        return new.keys_and_values(self, self.qkv.weight, *sizes, **storage)

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
            x: the tokens after those in `state`. For a jagged nested tensor the result is jagged,
                and each sequence attends only to itself.
            state: from `new_state`; the new keys and values are appended.
            rope: (cos, sin) at the positions of x (of x.values() if nested), from RotaryEmbedding.
            mask: must be None.
        """
        require_no_mask("NeighborhoodAttention1D", mask)
        return self._run(x, state, rope, mask)

    def _projected(
        self,
        x: Tensor,
        suffix: str,
        rope: tuple[Tensor, Tensor] | None,
        at: Callable[[], Tensor],
    ) -> QKV:
        q, k, v = self._heads(x)
        if rope is not None:
            q, k = functional.apply_rotary(q, k, *rope, backend=self.config.backend)
        return q, k, v

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        c, (q, k, v), length = self.config, tensors, tensors[1].shape[1]
        if self._causal:  # treats the tokens as the first of a sufficiently large grid
            length = max(length, *c.least)
        return self._in_grid(c.mask((length,)), q, k, v) if length else q

    def _output(self, out: Tensor, x: Tensor) -> Tensor:
        return self._joined(out)


class NeighborhoodAttention2D(_Neighborhood):
    """Attention of each token of an image to a window around it.

    Args:
        config: sizes and options, see `NeighborhoodConfig`.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, height, width, dim) -> the same shape.
        Parameters, named as in NATTEN: qkv, proj.

    Reference:
        Hassani et al., Neighborhood Attention Transformer, 2022, arXiv 2204.07143.

    Example:
        >>> layer = NeighborhoodAttention2D(dim=8, num_heads=2, kernel_size=(3, 5))
        >>> layer(torch.ones(1, 4, 5, 8)).shape
        torch.Size([1, 4, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(NeighborhoodConfig):
        """Fields of `NeighborhoodConfig`."""

        axes = 2

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
        self.config = config
        self._build(device, dtype)


class NeighborhoodAttention3D(_Neighborhood):
    """Attention of each token of a video to a window around it.

    Args:
        config: sizes and options, see `NeighborhoodConfig`.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, depth, height, width, dim) -> the same shape.
        Parameters, named as in NATTEN: qkv, proj.

    Reference:
        Hassani et al., Faster Neighborhood Attention, 2024, arXiv 2403.04690.

    Example:
        >>> sizes = {"kernel_size": (2, 3, 3), "is_causal": (True, False, False)}
        >>> layer = NeighborhoodAttention3D(dim=8, num_heads=2, **sizes)
        >>> layer(torch.ones(1, 2, 4, 5, 8)).shape
        torch.Size([1, 2, 4, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(NeighborhoodConfig):
        """Fields of `NeighborhoodConfig`."""

        axes = 3

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
        self.config = config
        self._build(device, dtype)
