"""Feed-forward layers, plain and gated, each computed by one op."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils.checkpoint import checkpoint

from omniattn import functional
from omniattn.checks.arguments import require_number, shown
from omniattn.functional.layers.activation import activated
from omniattn.functional.layers.ffn import ACTIVATIONS
from omniattn.modules.base.fields import Backend, Probability, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear, is_plain
from omniattn.modules.base.mixer import ChannelMixer
from omniattn.suggestions import did_you_mean

#: Name of a gated activation -> activation of the gate.
GATED_ACTIVATIONS = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "glu": "sigmoid",
    "bilinear": "identity",
    "clamped_swiglu": "clamped_swiglu",
}


Convolve = Callable[[torch.Tensor], torch.Tensor]


class _FeedForward(ChannelMixer):
    """Base class of MLP and GatedMLP: calls the projections if they are not plain linears."""

    config: Any
    up_proj: Linear
    down_proj: Linear
    act: torch.nn.Module | None

    @property
    def convolved_width(self) -> int:
        return int(self.config.hidden_dim) * (2 if hasattr(self, "gate_proj") else 1)

    def _by_layers(
        self,
        x: torch.Tensor,
        activation: str,
        gate: Linear | None = None,
        convolve: Convolve | None = None,
        **clamp: float,
    ) -> torch.Tensor:
        """Computes the op's formula by calling the projections, which may have adapters."""
        c = self.config

        def run(x: torch.Tensor) -> torch.Tensor:
            up = self.up_proj(x)
            first, second = (up, None) if gate is None else (gate(x), up)
            if convolve is not None:
                hidden = up if second is None else torch.cat((first, second), -1)
                first, second = (*convolve(hidden).split(c.hidden_dim, -1), None)[:2]
            if self.act is None:
                hidden = activated(first, second, activation=activation, backend=c.backend, **clamp)
            else:
                hidden = self.act(first)
            hidden = functional.dropout(hidden, c.dropout_p, training=self.training)
            y: torch.Tensor = self.down_proj(hidden)
            return y

        if c.recompute and torch.is_grad_enabled():
            again: torch.Tensor = checkpoint(run, x, use_reentrant=False)
            return again
        return run(x)


class MLP(_FeedForward):
    """Computes y = dropout(act(x W_up + b_up)) W_down + b_down.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (..., dim) -> (..., dim). Weights up_proj (hidden_dim, dim), down_proj (dim, hidden_dim);
        with `learned` also those of act.

    Reference:
        Vaswani et al., "Attention Is All You Need", 2017, arXiv 1706.03762.

    Example:
        >>> MLP(MLP.Config(8, 32))(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim, hidden_dim: width of x and y, inner width.
            activation: one of those of `omniattn.functional.mlp`.
            bias: True to add biases to both projections.
            init_std, out_init_std: standard deviations of the weights of up_proj and down_proj;
                models scale the latter by 1 / sqrt(2 layers).
            backend: backend of all ops of the layer.
            dropout_p: dropout probability of the activations.
            recompute: True to save no tensor of the hidden size for the backward pass.
            learned: config of a layer that maps (..., hidden_dim) to the same shape, such as XIELU
                or PolyNorm, in place of `activation`; None for none.
        """

        activations: ClassVar[Mapping[str, Any]] = ACTIVATIONS

        dim: Size
        hidden_dim: Size
        activation: str = "gelu"
        bias: bool = True
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None
        dropout_p: Probability = 0.0
        recompute: bool = False
        learned: LayerConfig | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.activation not in self.activations:
                raise ValueError(
                    f"{type(self).__qualname__.removesuffix('.Config')}: activation must be one of "
                    f"{', '.join(self.activations)}, got activation={shown(self.activation)}"
                    f"{did_you_mean(self.activation, self.activations)}"
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
        wide = Linear.Config(c.dim, c.hidden_dim, c.bias, c.init_std, c.backend)
        narrow = Linear.Config(c.hidden_dim, c.dim, c.bias, c.out_init_std, c.backend)
        self.up_proj = Linear(wide, device=device, dtype=dtype)
        self.act = None if c.learned is None else c.learned.build(device=device, dtype=dtype)
        self.down_proj = Linear(narrow, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, *, convolve: Convolve | None = None) -> torch.Tensor:
        """Maps x (..., dim) to (..., dim); `convolve` is as in ChannelMixer."""
        c = self.config
        plain = self.act is None and convolve is None
        if not plain or not is_plain(self.up_proj, self.down_proj):
            return self._by_layers(x, c.activation, convolve=convolve)
        return functional.mlp(
            x,
            self.up_proj.weight,
            self.down_proj.weight,
            up_bias=self.up_proj.bias,
            down_bias=self.down_proj.bias,
            activation=c.activation,
            dropout_p=c.dropout_p if self.training else 0.0,
            recompute=c.recompute,
            backend=c.backend,
        )


def check_clamp(op: str, clamp: tuple[float, float]) -> None:
    """Requires that `clamp` is a valid (alpha, limit) of clamped_swiglu."""
    if len(clamp) != 2:
        raise ValueError(f"{op}: clamp must be (alpha, limit), got clamp={shown(clamp)}")
    for name, value in zip(("alpha", "limit"), clamp, strict=True):
        require_number(op, f"{name} of clamp", value, above=0)


class GatedMLP(_FeedForward):
    """Computes y = dropout(act(x W_gate) * (x W_up)) W_down.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (..., dim) -> (..., dim). Weights gate_proj and up_proj (hidden_dim, dim), down_proj
        (dim, hidden_dim).

    Reference:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202.

    Example:
        >>> GatedMLP(GatedMLP.Config(8, 24))(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    @dataclass(frozen=True)
    class Config(MLP.Config):
        """Sizes and options, as in MLP.

        Args:
            activation: swiglu, geglu, geglu_tanh, reglu, glu, bilinear or clamped_swiglu.
            clamp: (alpha, limit) of clamped_swiglu (gpt-oss).
        """

        activations = GATED_ACTIVATIONS

        activation: str = "swiglu"
        bias: bool = False
        clamp: tuple[float, float] = (1.702, 7.0)

        def __post_init__(self) -> None:
            super().__post_init__()
            check_clamp("GatedMLP", self.clamp)

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
        self.act = None
        wide = Linear.Config(c.dim, c.hidden_dim, c.bias, c.init_std, c.backend)
        narrow = Linear.Config(c.hidden_dim, c.dim, c.bias, c.out_init_std, c.backend)
        self.gate_proj = Linear(wide, device=device, dtype=dtype)
        self.up_proj = Linear(wide, device=device, dtype=dtype)
        self.down_proj = Linear(narrow, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, *, convolve: Convolve | None = None) -> torch.Tensor:
        """Maps x (..., dim) to (..., dim); `convolve` is as in ChannelMixer, of (gate, up)."""
        c = self.config
        if convolve is not None or not is_plain(self.gate_proj, self.up_proj, self.down_proj):
            alpha, limit = c.clamp
            name = GATED_ACTIVATIONS[c.activation]
            return self._by_layers(x, name, self.gate_proj, convolve, alpha=alpha, limit=limit)
        return functional.glu_mlp(
            x,
            self.gate_proj.weight,
            self.up_proj.weight,
            self.down_proj.weight,
            gate_bias=self.gate_proj.bias,
            up_bias=self.up_proj.bias,
            down_bias=self.down_proj.bias,
            activation=GATED_ACTIVATIONS[c.activation],
            alpha=c.clamp[0],
            limit=c.clamp[1],
            dropout_p=c.dropout_p if self.training else 0.0,
            recompute=c.recompute,
            backend=c.backend,
        )
