"""The layer of xLSTM-7B: the matrix LSTM cell with capped gates, beside a feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
from omniattn.modules.base.fields import Backend, Epsilon, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.recurrent.recurrent import Device, zeros_of_states
from omniattn.modules.recurrent.state_mixer import StateMixer

__all__ = ["LargeMLSTM"]


class LargeMLSTM(StateMixer):
    """mLSTM on projections of x, as in xLSTM-7B, whose blocks have a feed-forward layer too.

    ``y = W_o (sigmoid(W_g x) * norm(h))`` with h of :func:`functional.mlstm` on q, k, v = W x and
    the gates ``cap tanh((W x + b) / cap)``; norm is a LayerNorm per head without bias.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj (qk_dim, dim), v_proj, g_proj (v_dim, dim), igate, fgate with
        biases, norm_weight (v_dim,), o_proj.

    Reference:
        Beck et al., xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference, 2025,
        arXiv 2503.13427.

    Example:
        >>> LargeMLSTM(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            num_heads: number of heads.
            qk_dim, v_dim: width of all heads of q and of k, default dim / 2; of v, default dim.
            gate_cap: cap of the gates before their activations, 0 for none.
            norm_eps: eps of the output norm.
            eps: constant added to the cell's denominator.
            init_std, out_init_std, backend: as in Attention.
        """

        dim: Size
        num_heads: Size
        qk_dim: Size | None = None
        v_dim: Size | None = None
        gate_cap: float = 15.0
        norm_eps: Epsilon = 1e-6
        eps: Epsilon = 1e-6
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            for name, width in (("qk_dim", self.keys), ("v_dim", self.values)):
                if width % self.num_heads:
                    raise ValueError(
                        f"LargeMLSTM: {name} must be a multiple of num_heads, "
                        f"got {name}={width}, num_heads={self.num_heads}"
                    )

        @property
        def keys(self) -> int:
            """Width of all heads of q and of k."""
            return self.dim // 2 if self.qk_dim is None else self.qk_dim

        @property
        def values(self) -> int:
            """Width of all heads of v."""
            return self.dim if self.v_dim is None else self.v_dim

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config

        def linear(n_in: int, n_out: int, std: float, bias: bool = False) -> Linear:
            own = Linear.Config(n_in, n_out, bias, std, c.backend)
            return Linear(own, device=device, dtype=dtype)

        self.q_proj = linear(c.dim, c.keys, c.init_std)
        self.k_proj = linear(c.dim, c.keys, c.init_std)
        self.v_proj = linear(c.dim, c.values, c.init_std)
        self.g_proj = linear(c.dim, c.values, c.init_std)
        self.igate = linear(c.dim, c.num_heads, 0.0, bias=True)
        self.fgate = linear(c.dim, c.num_heads, 0.0, bias=True)
        self.draws("igate", "fgate")
        self.norm_weight = nn.Parameter(torch.empty(c.values, device=device, dtype=dtype))
        self.o_proj = linear(c.values, c.dim, c.out_init_std)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Zeroes the gates' weights; their biases are -10 and 3 to 6, so that little changes."""
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.igate.weight)
        nn.init.zeros_(self.fgate.weight)
        assert self.igate.bias is not None and self.fgate.bias is not None
        nn.init.constant_(self.igate.bias, -10.0)
        self.fgate.bias.copy_(torch.linspace(3, 6, self.config.num_heads))

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates the states of the cell, `c`, `n` and `m`, in fp32 (fp64 for fp64)."""
        c = self.config
        zeros = zeros_of_states(self.o_proj.weight, storage)
        k, v = c.keys // c.num_heads, c.values // c.num_heads
        shapes = {"c": (k, v), "n": (k,), "m": ()}
        tensors = {n: zeros.new_zeros(batch, c.num_heads, *shape) for n, shape in shapes.items()}
        return RecurrentState(**tensors)

    def _capped(self, gate: Tensor) -> Tensor:
        cap = self.config.gate_cap
        return cap * torch.tanh(gate / cap) if cap else gate

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).unflatten(-1, (c.num_heads, -1)) for layer in layers)
        h, (matrix, n, m) = functional.mlstm(
            q,
            k,
            v,
            self._capped(self.igate(x)),
            self._capped(self.fgate(x)),
            eps=c.eps,
            initial_state=None if state is None else (state["c"], state["n"], state["m"]),
            cu_seqlens=sequences.cu_seqlens,
            backend=c.backend,
        )
        h, weight = h.flatten(-2), self.norm_weight.to(h.dtype)
        h = functional.group_norm(h, c.num_heads, weight, eps=c.norm_eps, backend=c.backend)
        y: Tensor = self.o_proj(self.g_proj(x).sigmoid() * h)
        return y, {"c": matrix, "n": n, "m": m}
