"""Spatial-reduction attention (PVT, PVT v2): attention to a downsampled image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_tensor
from omniattn.modules.base.fields import Backend, Epsilon, Probability, Size, SizeOrZero
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.norm import LayerNorm


class SpatialReductionAttention(Layer):
    """Attention with keys and values from x downsampled by a strided convolution and LayerNorm.

    ``y = W_o softmax(scale q k^T) v`` with q from x, k and v from ``LN(conv(x))``. The convolution
    is R x R with stride R and no padding, so keys exclude rows and columns beyond a multiple of R.
    With `pool`, k and v are from ``gelu(LN(conv(mean(x))))`` instead, where the means are those of
    the parts of a grid of pool x pool, and the convolution is 1 x 1 (linear attention of PVT v2).

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, height, width, dim) -> the same shape.
        Parameters, named as in the release: q, kv, sr, norm (both only with sr_ratio > 1 or pool),
        proj.

    Reference:
        Wang et al., Pyramid Vision Transformer, 2021, arXiv 2102.12122; pool: Wang et al., PVT v2,
        2021, arXiv 2106.13797.

    Example:
        >>> config = SpatialReductionAttention.Config(dim=8, num_heads=2, sr_ratio=2)
        >>> SpatialReductionAttention(config)(torch.ones(1, 6, 4, 8)).shape
        torch.Size([1, 6, 4, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options: `sr_ratio` is R, 1 for no reduction; `bias` applies to q, k and v.

        Args:
            pool: side of the grid of keys, 0 to reduce them by sr_ratio.
        """

        dim: Size
        num_heads: Size
        sr_ratio: Size = 1
        bias: bool = False
        norm_eps: Epsilon = 1e-5
        dropout_p: Probability = 0.0
        init_std: float = 0.02
        backend: Backend = None
        pool: SizeOrZero = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            self._require_multiple("dim", "num_heads")

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

        def linear(n_out: int, bias: bool) -> Linear:
            config = Linear.Config(c.dim, n_out, bias, c.init_std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        self.q = linear(c.dim, c.bias)
        self.kv = linear(2 * c.dim, c.bias)
        self.proj = linear(c.dim, True)
        if self._reduces:
            side = 1 if c.pool else c.sr_ratio
            self.sr = nn.Conv2d(c.dim, c.dim, side, stride=side, device=device, dtype=dtype)
            norm = LayerNorm.Config(c.dim, c.norm_eps, backend=c.backend)
            self.norm = LayerNorm(norm, device=device, dtype=dtype)

    @property
    def _reduces(self) -> bool:
        return self.config.sr_ratio > 1 or self.config.pool > 0

    def _reduced(self, x: Tensor) -> Tensor:
        """Returns the tokens of keys and values."""
        maps, pool = x.permute(0, 3, 1, 2), self.config.pool
        if pool:
            maps = nn.functional.adaptive_avg_pool2d(maps, pool)
        y: Tensor = self.norm(self.sr(maps).permute(0, 2, 3, 1).contiguous())
        return nn.functional.gelu(y) if pool else y

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (B, height, width, dim) to the same shape."""
        c = self.config
        require_tensor("SpatialReductionAttention", "x", x)
        source = self._reduced(x) if self._reduces else x
        q = self.q(x.flatten(1, 2)).unflatten(-1, (c.num_heads, -1))
        k, v = self.kv(source.flatten(1, 2)).unflatten(-1, (2, c.num_heads, -1)).unbind(2)
        out = functional.attention(
            q, k, v, dropout_p=c.dropout_p if self.training else 0.0, backend=c.backend
        )
        y: Tensor = self.proj(out.flatten(-2))
        return y.view(x.shape)
