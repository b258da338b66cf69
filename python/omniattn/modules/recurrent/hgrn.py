"""HGRN: a gated linear recurrence with one state per channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn import functional
from omniattn.functional.recurrences.linear_attention import log_sigmoid
from omniattn.modules.base.fields import Backend, Epsilon, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.norm import RMSNormGated
from omniattn.modules.base.short_conv import ShortConvolution
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.caches.cache import storage_like
from omniattn.modules.recurrent.recurrent import Device, fp32, zeros_of_states
from omniattn.modules.recurrent.state_mixer import StateMixer


def bounded_decays(logits: Tensor, bound: float | Tensor) -> tuple[Tensor, Tensor]:
    """Returns 1 - a and log a of ``a = l + (1 - l) sigmoid(logits)`` with the bound l."""
    forgotten = (1 - bound) * (-logits).sigmoid()
    if isinstance(bound, Tensor):  # some may be 0, for which log1p would be inexact
        g = torch.logaddexp(bound.log(), torch.log1p(-bound) + log_sigmoid(logits))
    else:
        g = log_sigmoid(logits) if bound == 0 else torch.log1p(-forgotten)
    return forgotten, g


def require_bound(op: str, bound: float, of_channels: bool) -> None:
    """Requires a bound in [0, 1), which is 0 where each channel has its own."""
    if not 0 <= bound < 1:
        raise ValueError(f"{op}: lower_bound must be in [0, 1), got lower_bound={bound}")
    if of_channels and bound != 0:
        raise ValueError(
            f"{op}: lower_bound must be 0 with channel_bounds=True, got lower_bound={bound}"
        )


class HGRN(StateMixer):
    """Linear recurrence whose forget gates also weigh the inputs.

    ``h_t = a_t * h_{t-1} + (1 - a_t) * silu(x W_i)`` with ``a = l + (1 - l) sigmoid(x W_f)`` and
    the lower bound l; ``y = W_o (norm(h) * silu(x W_g))`` with one norm of all channels.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters i_proj, f_proj, g_proj (expand * dim, dim), o_norm (expand * dim,) and o_proj,
        and with convolutions i_conv1d and f_conv1d: names and shapes as in fla, whose g_norm is
        o_norm here.

    Reference:
        Qin et al., Hierarchically Gated Recurrent Neural Network for Sequence Modeling, 2023, arXiv
        2311.04823. Verified against `layers/hgrn.py` of fla-org/flash-linear-attention, commit
        bc3b101d, which has real states where the paper has complex ones.

    Example:
        >>> HGRN(dim=8)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            expand: number of channels of the state for each of x.
            conv_size: number of taps of the causal convolutions of inputs and forget gates, which
                have no activation; 0 for none.
            conv_bias: True if the convolutions have biases.
            lower_bound: least decay l, in [0, 1). In the paper it grows from layer to layer.
            channel_bounds: True for a least decay of each channel, the buffer lower_bounds
                (expand * dim,): zeros that a checkpoint replaces.
            norm_eps: eps of the output norm.
            init_std, backend: as in Attention.
        """

        dim: Size
        expand: Size = 1
        conv_size: int = 0
        conv_bias: bool = False
        lower_bound: float = 0.0
        channel_bounds: bool = False
        norm_eps: Epsilon = 1e-5
        init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            require_bound("HGRN", self.lower_bound, self.channel_bounds)

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        width = c.expand * c.dim

        def linear(n_in: int, n_out: int) -> Linear:
            return Linear(Linear.Config(n_in, n_out, False, c.init_std, c.backend), **factory)

        for name in "ifg":
            self.add_module(f"{name}_proj", linear(c.dim, width))
        if c.conv_size > 0:
            conv = ShortConvolution.Config(width, c.conv_size, c.conv_bias, None, c.backend)
            self.i_conv1d, self.f_conv1d = (conv.build(**factory) for _ in "if")
        if c.channel_bounds:
            zeros = torch.zeros(width, device=device, dtype=fp32(dtype))
            self.register_buffer("lower_bounds", zeros)
        norm = RMSNormGated.Config(width, c.norm_eps, activation="silu", backend=c.backend)
        self.o_norm = norm.build(**factory)
        self.o_proj = linear(width, c.dim)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates zeros: `h` (B, C) in fp32 (fp64 for fp64) and the convolutions' states."""
        c = self.config
        wide = zeros_of_states(self.o_proj.weight, storage)
        tensors = {"h": wide.new_zeros(batch, c.expand * c.dim)}
        if c.conv_size > 0:
            like = wide.new_zeros(0, dtype=storage_like(self.o_proj.weight, **storage)["dtype"])
            for name in "if":
                tensors[f"{name}_conv"] = self._conv(name).new_state(batch, like)
        return RecurrentState(**tensors)

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        after: dict[str, Tensor] = {}
        inputs, logits = (self._part(name, x, state, sequences, after) for name in "if")
        logits = logits.to(fp32(logits.dtype))
        bound = self.get_buffer("lower_bounds") if c.channel_bounds else c.lower_bound
        forgotten, g = bounded_decays(logits, bound)
        h, after["h"] = functional.linear_scan(
            nnf.silu(inputs) * forgotten.to(inputs),
            g,
            initial_state=None if state is None else state["h"],
            cu_seqlens=sequences.cu_seqlens,
            backend=c.backend,
        )
        y: Tensor = self.o_proj(self.o_norm(h, self.get_submodule("g_proj")(x)))
        return y, after

    def _conv(self, name: str) -> ShortConvolution:
        return cast(ShortConvolution, self.get_submodule(f"{name}_conv1d"))

    def _part(
        self,
        name: str,
        x: Tensor,
        state: RecurrentState | None,
        sequences: Sequences,
        after: dict[str, Tensor],
    ) -> Tensor:
        """Computes the inputs or logits, and stores the state of their convolution in `after`."""
        y: Tensor = self.get_submodule(f"{name}_proj")(x)
        if self.config.conv_size > 0:
            key = f"{name}_conv"
            before = None if state is None else state[key].to(y.dtype)
            y, after[key] = self._conv(name)(y, before, sequences.cu_seqlens)
        return y
