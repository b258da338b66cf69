"""Additive position encodings: of embeddings (sinusoidal, learned) and of scores (ALiBi)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import (
    is_one_of,
    require_int,
    require_integers,
    require_rows,
    require_tensor,
    shown,
)
from omniattn.modules.base.fields import Positive, Size
from omniattn.modules.base.forms import Arguments, ByConfig, C, ConfigAlone, OnDevice, either
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields


def _token_positions(layer: Any, x: Tensor, positions: Tensor | int) -> Tensor:
    """Returns the positions of x (B, T, dim), given as ids or as the first position."""
    op, dim = type(layer).__name__, layer.config.dim
    require_tensor(op, "x", x)
    if x.dim() < 2 or x.shape[-1] != dim:
        raise ValueError(f"{op}: x must have shape (B, T, {dim}), got x.shape={tuple(x.shape)}")
    if not isinstance(positions, Tensor):
        require_int(op, "positions", positions)
        return torch.arange(positions, positions + x.shape[-2], device=x.device)
    require_integers(op, "positions", positions)
    shape = positions.shape
    if (
        len(shape) not in (1, 2)
        or shape[-1] != x.shape[-2]
        or (len(shape) == 2 and not is_one_of(shape[0], 1, x.shape[0]))
    ):
        raise ValueError(
            f"{op}: positions must have shape (T,) or (B, T), got positions.shape={tuple(shape)}, "
            f"x.shape={tuple(x.shape)}"
        )
    return positions.long()


class SinusoidalPositional(Layer):
    """Computes y = x + PE[p], or x * sqrt(dim) + PE[p] with `scale_input`.

    PE is the table of `functional.sinusoidal`.

    Args:
        config: width and form of the table.

    Shape:
        x (B, T, dim) -> (B, T, dim).

    Reference:
        Vaswani et al., "Attention Is All You Need", 2017, arXiv 1706.03762.

    Example:
        >>> SinusoidalPositional(SinusoidalPositional.Config(2))(torch.zeros(1, 1, 2))
        tensor([[[0., 1.]]])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Width and form of the table.

        Args:
            dim: width of x.
            layout, freqs, base: see functional.sinusoidal.
            scale_input: True to multiply x by sqrt(dim).
        """

        dim: Size
        layout: str = "interleaved"
        freqs: str = "transformer"
        base: Positive = 10000.0
        scale_input: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            nowhere = torch.empty(0, dtype=torch.int64)
            functional.sinusoidal(  # validates the options
                nowhere, self.dim, layout=self.layout, freqs=self.freqs, base=self.base
            )

    @config_or_fields(Config, either(ConfigAlone[Config], Config).init)
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor, positions: Tensor | int = 0) -> Tensor:
        """Maps x (B, T, dim) to the same shape.

        positions: (T,) or (B, T) of any integer dtype, or the first position as an int.
        """
        c = self.config
        table = functional.sinusoidal(
            _token_positions(self, x, positions), c.dim, layout=c.layout, freqs=c.freqs, base=c.base
        )
        return (x * c.dim**0.5 if c.scale_input else x) + table.to(x.dtype)


class SinCosPositional2d(Layer):
    """Adds the 2-D sin-cos table of a patch grid, see `functional.sincos_2d`.

    Args:
        config: width, number of prefix tokens and order of the halves.

    Shape:
        x (B, prefix + height * width, dim) -> the same shape.

    Reference:
        He et al., "Masked Autoencoders", 2021, arXiv 2111.06377.

    Example:
        >>> SinCosPositional2d(SinCosPositional2d.Config(4))(torch.zeros(1, 6, 4), (2, 3)).shape
        torch.Size([1, 6, 4])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Width, prefix tokens and order of the halves.

        Args:
            dim: width of x.
            prefix: number of tokens before the grid, which get zeros.
            order, base: see functional.sincos_2d.
        """

        dim: Size
        prefix: int = 0
        order: str = "wh"
        base: Positive = 10000.0

        def __post_init__(self) -> None:
            super().__post_init__()
            # Validates the options.
            functional.sincos_2d(self.dim, 0, 0, order=self.order, base=self.base)

    @config_or_fields(Config, either(ConfigAlone[Config], Config).init)
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Maps x (B, prefix + height * width, dim) to the same shape; grid is (height, width)."""
        c = self.config
        require_tensor("SinCosPositional2d", "x", x)
        if not isinstance(grid, (tuple, list)) or len(grid) != 2:
            raise TypeError(
                f"SinCosPositional2d: grid must be (height, width), got grid={shown(grid)}"
            )
        table = functional.sincos_2d(
            c.dim,
            *grid,
            prefix=c.prefix,
            order=c.order,
            base=c.base,
            device=x.device,
            dtype=x.dtype,
        )
        if x.dim() < 2 or x.shape[-2:] != table.shape:
            raise ValueError(
                f"SinCosPositional2d: x must have shape (B, {table.shape[0]}, {c.dim}) for the "
                f"grid, got x.shape={tuple(x.shape)}, grid={tuple(grid)}, prefix={c.prefix}"
            )
        return x + table


class LearnedPositional(Layer):
    """Computes y = x + weight[p] with a trained table (max_positions, dim) that can be resized.

    Args:
        config: size and initialisation of the table.
        device, dtype: device and dtype of the table.

    Shape:
        x (B, T, dim) -> (B, T, dim).

    Raises:
        ValueError: a position is outside the table; positions are never clamped (checked on the
            CPU; a device-side assertion of torch on CUDA).

    Reference:
        Devlin et al., "BERT", 2018, arXiv 1810.04805; images: Dosovitskiy et al., 2020, arXiv
        2010.11929.

    Example:
        >>> table = LearnedPositional(LearnedPositional.Config(max_positions=4, dim=2))
        >>> table.interpolate(8).weight.shape
        torch.Size([8, 2])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Size and initialisation of the table.

        Args:
            max_positions, dim: number and width of the rows.
            init_std: standard deviation of the initial table.
        """

        max_positions: Size
        dim: Size
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
        self.config = config
        shape = (config.max_positions, config.dim)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table from N(0, init_std^2)."""
        if self.drawn_outside:
            return
        nn.init.normal_(self.weight, std=self.config.init_std)

    def forward(self, x: Tensor, positions: Tensor | int = 0) -> Tensor:
        """Maps x (B, T, dim) to the same shape.

        positions: (T,) or (B, T) of any integer dtype, or the first position as an int.
        """
        p = _token_positions(self, x, positions)
        require_rows("LearnedPositional", "positions", p, self.config.max_positions)
        return x + nn.functional.embedding(p, self.weight)

    def interpolate(self, length: int) -> LearnedPositional:
        """Returns a new layer with the table linearly interpolated to `length` rows."""
        return self._resized(functional.interpolate_positions(self.weight.detach(), length))

    def interpolate_grid(
        self,
        old: tuple[int, int],
        new: tuple[int, int],
        *,
        prefix: int = 0,
        offset: float = 0.0,
        antialias: bool = False,
    ) -> LearnedPositional:
        """Returns a new layer for another patch grid, see `functional.interpolate_grid`."""
        return self._resized(
            functional.interpolate_grid(
                self.weight.detach(), old, new, prefix=prefix, offset=offset, antialias=antialias
            )
        )

    def _resized(self, weight: Tensor) -> LearnedPositional:
        config = replace(self.config, max_positions=weight.shape[0])
        resized = LearnedPositional(config, device="meta")
        resized.weight = nn.Parameter(weight)
        return resized


class _Device(Arguments):
    device: torch.device | str | None = field(default=None, kw_only=True)


class _ByConfig(ConfigAlone[C], _Device): ...


class ALiBi(Layer):
    """Computes the attention bias ``-m_h |i - j|`` with slopes m of `functional.alibi_slopes`.

    Args:
        config: number of heads and options.
        device: device of the slopes, which are float32 for every model dtype.

    Shape:
        forward(Tq, Tk) -> (1, num_heads, Tq, Tk), the `bias` argument of attention.

    Reference:
        Press, Smith, Lewis, "Train Short, Test Long", 2021, arXiv 2108.12409.

    Example:
        >>> ALiBi(ALiBi.Config(num_heads=8))(1, 3)[0, 0]
        tensor([[-1.0000, -0.5000, -0.0000]])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Number of heads and options.

        Args:
            num_heads: number of attention heads.
            max_exponent: see functional.alibi_slopes.
            trainable: True for trainable slopes.
            form: see functional.alibi_bias.
        """

        num_heads: Size
        max_exponent: Positive = 8.0
        trainable: bool = False
        form: str = "distance"

        def __post_init__(self) -> None:
            super().__post_init__()
            slopes = functional.alibi_slopes(self.num_heads, max_exponent=self.max_exponent)
            functional.alibi_bias(slopes, 0, 0, form=self.form)  # validates the form

    slopes: Tensor

    class _Fields(Config, _Device): ...

    @config_or_fields(Config, either(_ByConfig[Config], _Fields).init)
    def __init__(self, config: Config, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        slopes = torch.empty(config.num_heads, device=device, dtype=torch.float32)
        if config.trainable:
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the paper's slopes; checkpoints contain them only if they are trainable."""
        c = self.config
        self.slopes.copy_(functional.alibi_slopes(c.num_heads, max_exponent=c.max_exponent))

    def forward(self, q_len: int, k_len: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the bias of the last q_len of k_len tokens as queries, in `dtype`."""
        bias = functional.alibi_bias(self.slopes, q_len, k_len, form=self.config.form)
        return bias if dtype is None else bias.to(dtype)
