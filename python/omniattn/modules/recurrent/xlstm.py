"""xLSTM layers: mLSTM and sLSTM."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn import functional
from omniattn.modules.base.fields import Backend, Epsilon, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.short_conv import ShortConvolution
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.caches.cache import storage_like
from omniattn.modules.recurrent.headwise import Headwise
from omniattn.modules.recurrent.recurrent import Device, zeros_of_states
from omniattn.modules.recurrent.state_mixer import StateMixer

__all__ = ["MLSTM", "SLSTM"]


@dataclass(frozen=True)
class XLSTMConfig(LayerConfig):
    """Common options of mLSTM and sLSTM.

    Args:
        dim: width of x and y.
        num_heads: number of heads.
        layer_idx, num_layers: index of the layer in its model, from 0, and number of layers; the
            initial parameters depend on them.
        conv_size: number of taps of the causal convolution with SiLU; 0 for none.
        norm_eps: eps of the output norm, which is per head.
        backend: as in Attention.
    """

    dim: Size
    num_heads: Size
    layer_idx: int = 0
    num_layers: Size = 1
    conv_size: int = 4
    norm_eps: Epsilon = 1e-5
    backend: Backend = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_idx >= self.num_layers:
            raise ValueError(
                f"{self.layer.__name__}: layer_idx must be below num_layers, "
                f"got layer_idx={self.layer_idx}, num_layers={self.num_layers}"
            )


class _XLSTM(StateMixer):
    """Base class with a convolution of `inner` channels and an output norm per head."""

    config: XLSTMConfig

    def _build(self, inner: int, **factory: Any) -> None:
        c = self.config
        self.conv1d: ShortConvolution | None = None
        if c.conv_size > 0:
            conv = ShortConvolution.Config(inner, c.conv_size, True, backend=c.backend)
            self.conv1d = conv.build(**factory)
        #: Weight (inner,) of the norm, which multiplies by 1 + weight.
        self.norm_weight = nn.Parameter(torch.empty(inner, **factory))

    def _convolved(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences
    ) -> tuple[Tensor, dict[str, Any]]:
        """Computes silu(conv(x)) and the state of the convolution."""
        if self.conv1d is None:
            return x, {}
        before = None if state is None else state["conv"].to(x.dtype)
        y, after = self.conv1d(x, before, sequences.cu_seqlens)
        return y, {"conv": after}

    def _normed(self, h: Tensor) -> Tensor:
        """Normalises each head of h (B, T, H, D); returns (B, T, H D)."""
        c = self.config
        x = h.flatten(-2)
        weight = (1 + self.norm_weight).to(x.dtype)
        return functional.group_norm(x, c.num_heads, weight, eps=c.norm_eps, backend=c.backend)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates the functional's states in fp32 (fp64 for fp64), and `conv`, conv1d's state."""
        wide = zeros_of_states(self.norm_weight, storage)
        tensors = self._empty(batch, wide)
        if self.conv1d is not None:
            dtype = storage_like(self.norm_weight, **storage)["dtype"]
            tensors["conv"] = self.conv1d.new_state(batch, wide.new_zeros(0, dtype=dtype))
        return RecurrentState(**tensors)

    def _headwise(self, name: str, x: Tensor) -> Tensor:
        y: Tensor = self.get_submodule(name)(x)
        return y.flatten(-2)

    @abstractmethod
    def _empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """Returns the states of the recurrence before the first token."""


class MLSTM(_XLSTM):
    """mLSTM block: the matrix LSTM cell between an up and a down projection.

    With [u, z] = x W_up and c = silu(conv(u)): q and k are block-diagonal projections of c, v of u,
    the gates are linear in [q, k, v], and ``y = W_down ((norm(h) + skip * c) * silu(z))`` with h of
    :func:`functional.mlstm`. Blocks of this layer need no feed-forward layer.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters proj_up, q_proj, k_proj, v_proj, conv1d, igate, fgate, norm_weight,
        learnable_skip, proj_down.

    Reference:
        Beck et al., xLSTM: Extended Long Short-Term Memory, 2024, arXiv 2405.04517.

    Example:
        >>> MLSTM(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(XLSTMConfig):
        """Sizes and options, as in XLSTMConfig.

        Args:
            inner_dim: width of u and z; default 2 dim, rounded up to a multiple of 64.
            block_size: number of channels per block of the q, k and v projections.
            eps: constant added to the cell's denominator.
        """

        inner_dim: Size | None = None
        block_size: int = 4
        eps: Epsilon = 1e-6

        def __post_init__(self) -> None:
            super().__post_init__()
            for unit in ("num_heads", "block_size"):
                if self.inner % getattr(self, unit):
                    raise ValueError(
                        f"MLSTM: inner_dim must be a multiple of {unit}, "
                        f"got inner_dim={self.inner}, {unit}={getattr(self, unit)}"
                    )

        @property
        def inner(self) -> int:
            return self.inner_dim or -(-2 * self.dim // 64) * 64

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        # The official code's initialisation: "small init" and Wang's.
        small, last = math.sqrt(0.4 / c.dim), 2 / c.num_layers / math.sqrt(c.dim)
        self.proj_up = _linear(c, c.dim, 2 * c.inner, small, **factory)
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(
                name,
                Headwise(c.inner // c.block_size, c.block_size, c.block_size, small, **factory),
            )
        self.igate = _linear(c, 3 * c.inner, c.num_heads, 0.0, True, **factory)
        self.fgate = _linear(c, 3 * c.inner, c.num_heads, 0.0, True, **factory)
        self.draws("igate", "fgate")
        self._build(c.inner, **factory)
        self.learnable_skip = nn.Parameter(torch.empty(c.inner, **factory))
        self.proj_down = _linear(c, c.inner, c.dim, last, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Zeroes the gate weights; forget biases range from 3 to 6, so that little is forgotten."""
        nn.init.zeros_(self.norm_weight)
        nn.init.ones_(self.learnable_skip)
        assert self.igate.bias is not None and self.fgate.bias is not None
        nn.init.zeros_(self.igate.weight)
        nn.init.zeros_(self.fgate.weight)
        nn.init.normal_(self.igate.bias, std=0.1)
        self.fgate.bias.copy_(torch.linspace(3, 6, self.config.num_heads))

    def _empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        heads, size = self.config.num_heads, self.config.inner // self.config.num_heads
        shapes = {"c": (size, size), "n": (size,), "m": ()}
        return {name: like.new_zeros(batch, heads, *shape) for name, shape in shapes.items()}

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        u, z = self.proj_up(x).chunk(2, -1)
        conv, after = self._convolved(u, state, sequences)
        inputs = {"q_proj": conv, "k_proj": conv, "v_proj": u}
        q, k, v = (self._headwise(name, t) for name, t in inputs.items())
        every = torch.cat((q, k, v), -1)
        q, k, v = (t.unflatten(-1, (c.num_heads, -1)) for t in (q, k, v))
        h, (matrix, n, m) = functional.mlstm(
            q,
            k,
            v,
            self.igate(every),
            self.fgate(every),
            eps=c.eps,
            initial_state=None if state is None else (state["c"], state["n"], state["m"]),
            cu_seqlens=sequences.cu_seqlens,
            backend=c.backend,
        )
        mixed = (self._normed(h) + self.learnable_skip * conv) * nnf.silu(z)
        y: Tensor = self.proj_down(mixed)
        return y, {"c": matrix, "n": n, "m": m} | after


class SLSTM(_XLSTM):
    """sLSTM: the scalar LSTM with exponential gates and recurrent weights within heads.

    The gates i and f are block-diagonal projections (per head) of silu(conv(x)), z and o of x;
    ``y = norm(h)`` with h of :func:`functional.slstm`. A feed-forward layer follows it.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters conv1d, igate, fgate, zgate, ogate (block-diagonal), recurrent (4, H, D, D) and
        bias (4, H, D) of the gates i, f, z, o, and norm_weight.

    Reference:
        Beck et al., xLSTM: Extended Long Short-Term Memory, 2024, arXiv 2405.04517.

    Example:
        >>> SLSTM(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    #: Biases by gate and head, without weight decay.
    undecayed: ClassVar[tuple[str, ...]] = ("bias",)

    @dataclass(frozen=True)
    class Config(XLSTMConfig):
        """Sizes and options, as in XLSTMConfig."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self._require_multiple("dim", "num_heads")

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        size = c.dim // c.num_heads
        for name in ("igate", "fgate", "zgate", "ogate"):
            std = math.sqrt(0.4 / c.dim)
            self.add_module(name, Headwise(c.num_heads, size, size, std, **factory))
        self.recurrent = nn.Parameter(torch.empty(4, c.num_heads, size, size, **factory))
        self.bias = nn.Parameter(torch.empty(4, c.num_heads, size, **factory))
        self._build(c.dim, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Zeroes the recurrent weights and spreads the forget biases over channels, by depth."""
        c = self.config
        for parameter in (self.recurrent, self.bias, self.norm_weight):
            nn.init.zeros_(parameter)
        size = self.bias.shape[-1]
        n = torch.arange(size, dtype=torch.float64) / max(size - 1, 1)
        depth = c.layer_idx / max(c.num_layers - 1, 1)
        self.bias[1] = (5 - 12 * n ** (0.3 + 1.3 * depth)).to(self.bias.dtype)

    def _empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        return {"s": like.new_zeros(batch, *self.bias.shape)}

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        conv, after = self._convolved(x, state, sequences)
        inputs = {"igate": conv, "fgate": conv, "zgate": x, "ogate": x}
        gates = [self._headwise(name, t) for name, t in inputs.items()]
        every = torch.stack(gates, -2).unflatten(-1, (c.num_heads, -1))
        h, s = functional.slstm(
            every + self.bias.to(every.dtype),
            self.recurrent,
            initial_state=None if state is None else state["s"],
            cu_seqlens=sequences.cu_seqlens,
            backend=c.backend,
        )
        return self._normed(h), {"s": s} | after


def _linear(
    c: XLSTMConfig, n_in: int, n_out: int, std: float, bias: bool = False, **factory: Any
) -> Linear:
    return Linear(Linear.Config(n_in, n_out, bias, std, c.backend), **factory)
