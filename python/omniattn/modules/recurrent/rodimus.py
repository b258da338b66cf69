"""Rodimus: a gated recurrence whose decays have a temperature, with its own gated projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
from omniattn.modules.base.norm import RMSNormGated
from omniattn.modules.base.short_conv import ShortConvolution
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.caches.cache import storage_like
from omniattn.modules.recurrent.recurrent import Device, Result, fp32, zeros_of_states
from omniattn.modules.recurrent.state_mixer import StateMixer


class Rodimus(StateMixer):
    """Gated linear attention of one head, whose keys and decays share a gate and a temperature.

    With ``h = x W_h`` and ``u = silu(conv(h))``, ``g = softplus(u W_g + b)``,
    ``tau = sigmoid(u W_t + b)`` and ``k = u W_k``:
    ``S_t = diag(exp(-g_t tau_t)) S_{t-1} + (g_t^tau_t k_t / |k_t|) v_t^T`` with
    ``v = h * sigmoid(h W_1 W_2 + b)``, ``o_t = S_t^T (u_t W_q) / sqrt(N) + r * u_t``,
    ``y = norm(o * silu(x W_z)) W_o``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; residual_weight is created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters up_proj, gate_proj, down_proj, q_proj, k_proj, g_gate_proj, tau_gate_proj,
        i_gate_proj of two layers, activation_norm, residual_weight (r) and short_conv: names and
        shapes as in fla.

    Reference:
        He et al., Rodimus*: Breaking the Accuracy-Efficiency Trade-Off with Efficient Attentions,
        2024, arXiv 2410.06577. Verified against `layers/rodimus.py` of
        fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> Rodimus(dim=8, d_state=4)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            d_state: N, the width of q and k.
            expand: the width of h is expand * dim.
            gate_rank: width between the two layers of the gate of v, default dim // 64, at least
                16.
            conv_size: number of taps of the causal convolution; 0 for u = h.
            conv_bias: True if the convolution has a bias.
            norm_eps: eps of the norm.
            init_std, backend: as in Attention.
        """

        dim: Size
        d_state: Size = 64
        expand: Size = 2
        gate_rank: Size | None = None
        conv_size: int = 4
        conv_bias: bool = True
        norm_eps: Epsilon = 1e-5
        init_std: float = 0.02
        backend: Backend = None

        @property
        def width(self) -> int:
            """Width of h."""
            return self.expand * self.dim

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def linear(n_in: int, n_out: int, bias: bool = False) -> Linear:
            return Linear(Linear.Config(n_in, n_out, bias, c.init_std, c.backend), **factory)

        self.gate_proj, self.up_proj = linear(c.dim, c.width), linear(c.dim, c.width)
        norm = RMSNormGated.Config(c.width, c.norm_eps, norm_before_gate=False, backend=c.backend)
        self.activation_norm = norm.build(**factory)
        self.down_proj = linear(c.width, c.dim)
        if c.conv_size > 0:
            conv = ShortConvolution.Config(c.width, c.conv_size, c.conv_bias, "silu", c.backend)
            self.short_conv = conv.build(**factory)
        like = torch.empty(c.width, device=device, dtype=fp32(dtype))
        self.residual_weight = nn.Parameter(like)
        self.k_proj, self.q_proj = linear(c.width, c.d_state), linear(c.width, c.d_state)
        self.g_gate_proj = linear(c.width, c.d_state, True)
        self.tau_gate_proj = linear(c.width, c.d_state, True)
        rank = c.gate_rank or max(c.dim // 64, 16)
        self.i_gate_proj = nn.Sequential(linear(c.width, rank), linear(rank, c.width, True))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets residual_weight to 1."""
        nn.init.ones_(self.residual_weight)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates zeros: `s` (B, 1, N, C) in fp32 (fp64 for fp64) and the convolution's state."""
        c = self.config
        wide = zeros_of_states(self.down_proj.weight, storage)
        tensors = {"s": wide.new_zeros(batch, 1, c.d_state, c.width)}
        if c.conv_size > 0:
            like = wide.new_zeros(0, dtype=storage_like(self.down_proj.weight, **storage)["dtype"])
            tensors["conv"] = self.short_conv.new_state(batch, like)
        return RecurrentState(**tensors)

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        after: dict[str, Tensor] = {}
        h = u = self.up_proj(x)
        if c.conv_size > 0:
            before = None if state is None else state["conv"].to(h.dtype)
            u, after["conv"] = self.short_conv(h, before, sequences.cu_seqlens)
        o, after["s"] = recurrence(
            *(self, h, u),
            initial_state=None if state is None else state["s"],
            cu_seqlens=sequences.cu_seqlens,
            backend=c.backend,
        )
        y: Tensor = self.down_proj(self.activation_norm(o, self.gate_proj(x)))
        return y, after


def recurrence(layer: Any, h: Tensor, u: Tensor, **options: Any) -> Result:
    """Computes o (B, T, C) and the final state (N, 1, N, C) of a layer with Rodimus' parameters."""
    wide = fp32(h.dtype)
    g = nnf.softplus(layer.g_gate_proj(u).to(wide))
    tau = layer.tau_gate_proj(u).to(wide).sigmoid()
    q, k = layer.q_proj(u), nnf.normalize(layer.k_proj(u).to(wide), dim=-1) * g**tau
    v = h * layer.i_gate_proj(h).sigmoid()
    of_head = (t[:, :, None] for t in (q, k.to(q.dtype), v, -g * tau))
    o, state = functional.gated_linear_attention(*of_head, **options)
    return (o[:, :, 0] + u.to(wide) * layer.residual_weight).to(o.dtype), state
