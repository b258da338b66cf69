"""Short causal convolution before a recurrence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.functional.recurrences._steps import causal_conv1d_inplace
from omniattn.modules.base.fields import Backend, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields


class ShortConvolution(Layer):
    """Computes y_t = act(bias + sum_k weight[:, k] x_{t + k - (K - 1)}), depthwise.

    With a residual x_t is added. Without an activation this is the filter with 1 added to its last
    tap, so that it costs no further pass over x.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim), state (B, dim, K - 1) or None -> y (B, T, dim) and the state after x.
        Parameters weight (dim, 1, K), as in torch.nn.Conv1d, and bias (dim).

    Reference:
        See functional.causal_conv1d.

    Example:
        >>> conv = ShortConvolution(dim=8)
        >>> y, state = conv(torch.ones(1, 3, 8))
        >>> y.shape, state.shape
        (torch.Size([1, 3, 8]), torch.Size([1, 8, 3]))
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: number of channels.
            kernel_size: K, the number of filter taps.
            bias: True to add a bias.
            activation: "silu" or None.
            backend: backend of the op.
            residual: True to add x.
        """

        dim: Size
        kernel_size: int = 4
        bias: bool = False
        activation: str | None = "silu"
        backend: Backend = None
        residual: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.kernel_size < 1 or self.activation not in (None, "silu"):
                raise ValueError(
                    "ShortConvolution: kernel_size must be >= 1, and activation 'silu' or None, "
                    f"got kernel_size={self.kernel_size}, activation={shown(self.activation)}"
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
        self.config = config
        shape = (config.dim, 1, config.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        bias = torch.empty(config.dim, device=device, dtype=dtype)
        self.bias = nn.Parameter(bias) if config.bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias uniformly from +- K^-0.5, as torch.nn.Conv1d does."""
        bound = self.config.kernel_size**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def new_state(self, batch: int, like: Tensor) -> Tensor:
        """Returns the state before the first token: zeros with like's device and dtype."""
        # The kernels' layout: channels are contiguous.
        return like.new_zeros(batch, self.config.kernel_size - 1, self.config.dim).mT

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        taps: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Maps x (B, T, dim) to y (B, T, dim) and the state (B, dim, K - 1) after x.

        With `cu_seqlens`, x has one row of packed sequences with one state each, as in
        functional.causal_conv1d. With `taps`, from `step_taps`, T is 1 and the state
        is updated in place.
        """
        c = self.config
        if state is not None and taps is not None:
            y: Tensor = causal_conv1d_inplace(x, taps, self.bias, state, c.activation == "silu")
        else:
            y, state = functional.causal_conv1d(
                x,
                self.filter(self.weight)[:, 0],
                self.bias,
                activation=c.activation,
                initial_state=state,
                cu_seqlens=cu_seqlens,
                return_final_state=True,
                backend=c.backend,
            )
        return x + y if c.residual and c.activation is not None else y, state

    def filter(self, weight: Tensor) -> Tensor:
        """Returns the weight (dim, 1, K) with the residual in its last tap, if it belongs there."""
        if not self.config.residual or self.config.activation is not None:
            return weight
        return torch.cat((weight[..., :-1], weight[..., -1:] + 1), -1)

    def step_taps(self, weight: Tensor) -> Tensor:
        """Returns the `taps` of the weight, (dim, K) with channels contiguous in memory."""
        return self.filter(weight).detach()[:, 0].mT.contiguous().mT
