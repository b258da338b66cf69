"""RMSNorm, LayerNorm, and their gated and per-head forms."""

from dataclasses import dataclass

import torch
from torch import nn

from omniattn import functional
from omniattn.checks.arguments import require_choice
from omniattn.functional.layers.gated_norm import GATES
from omniattn.modules.base.fields import Backend, Casting, Epsilon, Signed, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields
from omniattn.modules.base.mixer import Norm

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class RMSNorm(Norm, nn.RMSNorm):
    """Computes y = x (offset + w) / sqrt(mean(x^2) + eps) over the last dimension.

    Args:
        config: size and options, as in functional.rms_norm; `offset=1`, with a weight that starts
            at 0, is Gemma's form.
        device, dtype: device and dtype of the weight.

    Shape:
        x (..., dim) -> (..., dim). With `residual` (..., dim): (norm(h), h), h = x + residual, in
        float32 if the residual is.

    Reference:
        Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv 1910.07467.

    Example:
        >>> RMSNorm(RMSNorm.Config(4))(torch.ones(1, 4))
        tensor([[1.0000, 1.0000, 1.0000, 1.0000]], grad_fn=...)
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Size and options of the norm.

        Args:
            dim: size of the last dimension.
            eps: added to the mean square.
            offset: added to the weight.
            casting: where half-precision inputs are rounded, see functional.rms_norm.
            backend: backend of the op.
        """

        dim: Size
        eps: Epsilon = 1e-6
        offset: Signed = 0.0
        casting: Casting = "fp32"
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
        self.config = c = config  # nn.RMSNorm's constructor calls reset_parameters, which reads it
        nn.RMSNorm.__init__(self, c.dim, c.eps, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialises the weight so that offset + w = 1."""
        nn.init.constant_(self.weight, 1 - self.config.offset)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> Normed:
        """Maps x (..., dim) to y, or (y, x + residual) when a residual is given."""
        c = self.config
        return functional.rms_norm(
            x,
            self.weight,
            eps=c.eps,
            offset=c.offset,
            casting=c.casting,
            residual=residual,
            backend=c.backend,
        )


class LayerNorm(Norm, nn.LayerNorm):
    """Computes y = (x - mean) w / sqrt(var + eps) + b over the last dimension.

    Args:
        config: size and options.
        device, dtype: of weight and bias.

    Shape:
        x (..., dim) -> (..., dim). With `residual` (..., dim): (norm(h), h), h = x + residual, in
        float32 if the residual is.

    Reference:
        Ba, Kiros, Hinton, "Layer Normalization", 2016, arXiv 1607.06450.

    Example:
        >>> LayerNorm(LayerNorm.Config(2))(torch.tensor([[-3.0, 3.0]])).round()
        tensor([[-1.,  1.]], grad_fn=...)
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Size and options of the norm.

        Args:
            dim: size of the last dimension.
            eps: added to the variance.
            bias: True to add a bias.
            backend: backend of the op.
        """

        dim: Size
        eps: Epsilon = 1e-5
        bias: bool = True
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
        self.config = c = config  # nn.LayerNorm's constructor calls reset_parameters
        nn.LayerNorm.__init__(self, c.dim, c.eps, bias=c.bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> Normed:
        """Maps x (..., dim) to y, or (y, x + residual) when a residual is given."""
        c = self.config
        return functional.layer_norm(
            x, self.weight, self.bias, eps=c.eps, residual=residual, backend=c.backend
        )


class GroupNorm(Layer):
    """Normalises each head of the last dimension, then applies a weight and bias per channel.

    Args:
        config: size, number of heads (groups) and options.
        device, dtype: of weight and bias.

    Shape:
        x (..., dim) -> (..., dim).

    Reference:
        Wu, He, "Group Normalization", 2018, arXiv 1803.08494; per head: Sun et al., "Retentive
        Network", 2023, arXiv 2307.08621.

    Example:
        >>> GroupNorm(GroupNorm.Config(4, num_groups=2, affine=False))(torch.ones(1, 4))
        tensor([[0., 0., 0., 0.]])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Size and options of the norm.

        Args:
            dim: size of the last dimension.
            num_groups: number of heads, a divisor of dim.
            eps: added to the variance, or to the mean square.
            center: True to subtract the mean; False for RMS-normalised heads (RetNet).
            affine: True for a weight, and with `center` a bias, per channel.
            backend: backend of the op.
        """

        dim: Size
        num_groups: Size
        eps: Epsilon = 1e-5
        center: bool = True
        affine: bool = True
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            _check_groups("GroupNorm", self.dim, self.num_groups)

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

        def vector() -> nn.Parameter | None:
            if not config.affine:
                return None
            return nn.Parameter(torch.empty(config.dim, device=device, dtype=dtype))

        self.weight = vector()
        self.bias = vector() if config.center else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0."""
        if self.drawn_outside:
            return
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x (..., dim) to (..., dim)."""
        c = self.config
        return functional.group_norm(
            x,
            c.num_groups,
            self.weight,
            self.bias,
            eps=c.eps,
            center=c.center,
            backend=c.backend,
        )


class RMSNormGated(Layer):
    """Computes RMSNorm(x) w act(gate), or RMSNorm(x act(gate)) w, in groups of the last dimension.

    Args:
        config: size and options; `norm_before_gate` selects the first form.
        device, dtype: device and dtype of the weight.

    Shape:
        x, gate (..., dim) -> (..., dim).

    Reference:
        Dao, Gu, "Transformers are SSMs", 2024, arXiv 2405.21060; Yang et al., "Gated Delta
        Networks", 2024, arXiv 2412.06464.

    Example:
        >>> norm = RMSNormGated(RMSNormGated.Config(2, activation="sigmoid"))
        >>> norm(torch.ones(1, 2), torch.zeros(1, 2))
        tensor([[0.5000, 0.5000]], grad_fn=...)
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Size and options, as in functional.rms_norm_gated."""

        dim: Size
        eps: Epsilon = 1e-6
        norm_before_gate: bool = True
        activation: str = "silu"
        num_groups: Size = 1
        casting: Casting = "fp32"
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            _check_groups("RMSNormGated", self.dim, self.num_groups)
            require_choice("RMSNormGated", "activation", self.activation, GATES)

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
        self.weight = nn.Parameter(torch.empty(config.dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Maps x, gate (..., dim) to (..., dim)."""
        c = self.config
        return functional.rms_norm_gated(
            x,
            gate,
            self.weight,
            eps=c.eps,
            norm_before_gate=c.norm_before_gate,
            activation=c.activation,
            num_groups=c.num_groups,
            casting=c.casting,
            backend=c.backend,
        )


def _check_groups(name: str, dim: int, num_groups: int) -> None:
    if num_groups <= 0 or dim % num_groups:
        raise ValueError(
            f"{name}: num_groups must divide dim, got num_groups={num_groups}, dim={dim}"
        )
