"""Small selective state-space layer with one state for all channels and an output gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn import functional
from omniattn.functional.recurrences.linear_attention import log_sigmoid
from omniattn.modules.base.fields import Backend, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mlp import GatedMLP
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.recurrent.recurrent import Device, fp32, zeros_of_states
from omniattn.modules.recurrent.state_mixer import StateMixer


class SimpleSelectiveSSM(StateMixer):
    """Simplified Mamba for teaching, without step sizes, convolution and inner width.

    ``y_t = MLP(h_t) * x_t`` of ``h_t = S_t^T C_t``, ``S_t = diag(A_t) S_{t-1} + B_t x_t^T``, with
    ``B_t = W_B x_t``, ``C_t = W_C x_t`` and ``A = exp(-softplus(a))``, or with `a_dep`
    ``A_t = sigmoid(W_A x_t)``; ``MLP(h) = W_down (silu(W_gate h) * W_up h)``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; a is created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters b_proj, c_proj (N, dim), a (N) or a_proj (N, dim), and mlp.

    Reference:
        Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
        arXiv 2312.00752, section 3.2, for the selection mechanism.

    Example:
        >>> SimpleSelectiveSSM(dim=8)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            d_state: N, the number of states per channel.
            hidden_dim: inner width of the MLP, default 2 dim.
            a_dep: True if decays depend on the token.
            init_std, backend: as in Attention.
        """

        dim: Size
        d_state: int = 16
        hidden_dim: Size | None = None
        a_dep: bool = False
        init_std: float = 0.02
        backend: Backend = None

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        own: dict[str, Any] = {"init_std": c.init_std, "backend": c.backend}
        self.b_proj = Linear(c.dim, c.d_state, **own, **factory)
        self.c_proj = Linear(c.dim, c.d_state, **own, **factory)
        if c.a_dep:
            self.a_proj = Linear(c.dim, c.d_state, **own, **factory)
        else:
            self.a = nn.Parameter(torch.empty(c.d_state, device=device, dtype=fp32(dtype)))
        mlp = GatedMLP.Config(c.dim, c.hidden_dim or 2 * c.dim, **own)
        self.mlp = mlp.build(**factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises decays from 1/2 to 1 - 2^-N', N' = min(N, 16), to cover many time scales."""
        if not self.config.a_dep:
            rate = torch.linspace(-1, -min(self.config.d_state, 16), self.config.d_state)
            # softplus(a) = -ln A
            self.a.copy_((-torch.log1p(-torch.exp2(rate.double()))).expm1().log())

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates zeros: `s` (B, N, dim) in fp32 (fp64 for fp64)."""
        zeros = zeros_of_states(self.b_proj.weight, storage)
        return RecurrentState(s=zeros.new_zeros(batch, self.config.d_state, self.config.dim))

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.config.a_dep:
            logits: Tensor = self.a_proj(x)
            g = log_sigmoid(logits.to(fp32(logits.dtype)))
        else:
            g = -nnf.softplus(self.a).expand(*x.shape[:2], -1)
        h, after = functional.gated_linear_attention(
            self.c_proj(x)[:, :, None],
            self.b_proj(x)[:, :, None],
            x[:, :, None],
            g[:, :, None],
            scale=1.0,
            initial_state=None if state is None else state["s"][:, None],
            cu_seqlens=sequences.cu_seqlens,
            backend=self.config.backend,
        )
        y: Tensor = self.mlp(h[:, :, 0])
        return y * x.to(y.dtype), {"s": after[:, 0]}
