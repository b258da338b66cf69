"""Swin: attention within (shifted) windows of an image, a block, and patch merging."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_tensor
from omniattn.functional.masks import Documents
from omniattn.functional.scores import WindowBias
from omniattn.modules.base.fields import Backend, Epsilon, Positive, Probability, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.norm import LayerNorm
from omniattn.modules.base.residual import DropPath


class WindowAttention(Layer):
    """Multi-head attention within windows of M x M tokens, with a learned relative position bias.

    Images whose sides are not multiples of M are padded with zeros, which are attended to. With a
    `shift` the image is first rolled, and tokens from different parts of the image do not attend to
    each other. An image no larger than a window is one window without a shift.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, height, width, dim) -> the same shape.
        Parameters, named as in Microsoft's release: qkv, proj, relative_position_bias_table ((2 M -
        1)^2, num_heads).

    Reference:
        Liu et al., Swin Transformer, 2021, arXiv 2103.14030.

    Example:
        >>> layer = WindowAttention(WindowAttention.Config(dim=8, num_heads=2, window=4, shift=2))
        >>> layer(torch.ones(1, 10, 9, 8)).shape
        torch.Size([1, 10, 9, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        `window` is M, `shift` is less than M and 0 for none; `bias` applies to all projections.
        """

        dim: Size
        num_heads: Size
        window: Size = 7
        shift: int = 0
        bias: bool = True
        dropout_p: Probability = 0.0
        init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            self._require_multiple("dim", "num_heads")
            if not 0 <= self.shift < self.window:
                raise ValueError(
                    "WindowAttention: shift must be in 0..window - 1, "
                    f"got shift={self.shift}, window={self.window}"
                )

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

        def linear(n_out: int) -> Linear:
            config = Linear.Config(c.dim, n_out, c.bias, c.init_std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        self.qkv = linear(3 * c.dim)
        self.proj = linear(c.dim)
        shape = ((2 * c.window - 1) ** 2, c.num_heads)
        table = torch.empty(shape, device=device, dtype=dtype)
        self.relative_position_bias_table = nn.Parameter(table)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table from N(0, 0.02^2), truncated."""
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (B, height, width, dim) to the same shape."""
        c = self.config
        require_tensor("WindowAttention", "x", x)
        height, width = x.shape[1:3]
        size, shift, table = c.window, c.shift, self.relative_position_bias_table
        if min(height, width) <= size:
            size, shift = min(height, width), 0
            # Offsets within a smaller window are in the middle of the table.
            side = torch.arange(c.window - size, c.window + size - 1, device=x.device)
            table = table.unflatten(0, (2 * c.window - 1, -1))[side[:, None], side].flatten(0, 1)
        x = nn.functional.pad(x, (0, 0, 0, -width % size, 0, -height % size))
        if shift:
            x = x.roll((-shift, -shift), (1, 2))
        q, k, v = self.qkv(_windows(x, size)).unflatten(-1, (3, c.num_heads, -1)).unbind(2)
        out = functional.attention(
            q,
            k,
            v,
            mask=Documents(_regions(x, size, shift)) if shift else None,
            relative=WindowBias(table, (size, size)),
            dropout_p=c.dropout_p if self.training else 0.0,
            backend=c.backend,
        )
        y = _image(self.proj(out.flatten(-2)), x.shape, size)
        if shift:
            y = y.roll((shift, shift), (1, 2))
        return y[:, :height, :width].contiguous()


def _windows(x: Tensor, size: int) -> Tensor:
    """Maps (B, H, W, C) to windows (B H W / size^2, size^2, C) in row-major order."""
    x = x.unflatten(2, (-1, size)).unflatten(1, (-1, size))
    return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def _image(windows: Tensor, shape: torch.Size, size: int) -> Tensor:
    """Computes the inverse of _windows."""
    batch, height, width, channels = shape
    x = windows.view(batch, height // size, width // size, size, size, channels)
    return x.transpose(2, 3).reshape(shape)


def _regions(x: Tensor, size: int, shift: int) -> Tensor:
    """Labels (B windows, size^2) each token by the part of the unrolled image it came from."""

    def parts(length: int) -> Tensor:
        position = torch.arange(length, device=x.device)
        return (position >= length - size).long() + (position >= length - shift).long()

    labels = 3 * parts(x.shape[1])[:, None] + parts(x.shape[2])
    return _windows(labels.expand(x.shape[0], -1, -1)[..., None], size)[..., 0]


class SwinBlock(Layer):
    """Computes x = x + WindowAttention(LN(x)), then x = x + MLP(LN(x)).

    Both branches have stochastic depth.

    Args:
        config: config of the attention; `mlp_ratio`, the MLP's inner width over dim; `drop_path_p`,
            the probability to drop a branch.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, height, width, dim) -> the same shape.
        Parameters norm1, attn, norm2, mlp.fc1, mlp.fc2.

    Example:
        >>> block = SwinBlock(SwinBlock.Config(WindowAttention.Config(8, 2, window=4)))
        >>> block(torch.ones(1, 8, 8, 8)).shape
        torch.Size([1, 8, 8, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Config of the attention, and options of the block."""

        attention: WindowAttention.Config
        mlp_ratio: Positive = 4.0
        drop_path_p: Probability = 0.0
        norm_eps: Epsilon = 1e-5

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
        a = config.attention
        norm = LayerNorm.Config(a.dim, config.norm_eps, backend=a.backend)
        hidden = int(a.dim * config.mlp_ratio)
        wide = Linear.Config(a.dim, hidden, True, a.init_std, a.backend)
        narrow = Linear.Config(hidden, a.dim, True, a.init_std, a.backend)
        self.norm1 = LayerNorm(norm, device=device, dtype=dtype)
        self.attn = WindowAttention(a, device=device, dtype=dtype)
        self.norm2 = LayerNorm(norm, device=device, dtype=dtype)
        self.mlp = nn.ModuleDict(
            {
                "fc1": Linear(wide, device=device, dtype=dtype),
                "fc2": Linear(narrow, device=device, dtype=dtype),
            }
        )
        self.drop_path = DropPath(config.drop_path_p)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (B, height, width, dim) to the same shape."""
        x = x + self.drop_path(self.attn(self.norm1(x)))
        hidden = nn.functional.gelu(self.mlp["fc1"](self.norm2(x)))
        y: Tensor = x + self.drop_path(self.mlp["fc2"](hidden))
        return y


class PatchMerging(Layer):
    """Halves height and width: concatenates 2 x 2 patches, normalises, and projects to 2 dim.

    Args:
        config: sizes and options; `dim` is the width of x.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, height, width, dim) -> (B, ceil(height / 2), ceil(width / 2), 2 dim); odd sides are
        padded with zeros. Parameters norm (4 dim), reduction.

    Example:
        >>> PatchMerging(PatchMerging.Config(8))(torch.ones(1, 5, 4, 8)).shape
        torch.Size([1, 3, 2, 16])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options."""

        dim: Size
        norm_eps: Epsilon = 1e-5
        init_std: float = 0.02
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
        norm = LayerNorm.Config(4 * c.dim, c.norm_eps, backend=c.backend)
        self.norm = LayerNorm(norm, device=device, dtype=dtype)
        reduction = Linear.Config(4 * c.dim, 2 * c.dim, False, c.init_std, c.backend)
        self.reduction = Linear(reduction, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (B, height, width, dim) to (B, ceil(height / 2), ceil(width / 2), 2 dim)."""
        require_tensor("PatchMerging", "x", x)
        x = nn.functional.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        # Order of the release: the first column of each 2 x 2 patch, then the second.
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        y: Tensor = self.reduction(self.norm(torch.cat(parts, -1)))
        return y
