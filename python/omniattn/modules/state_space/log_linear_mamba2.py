"""Mamba-2 layer with a state for each power of two of past tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn import functional
from omniattn.modules.base.fields import Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.caches.cache import storage_like
from omniattn.modules.recurrent.recurrent import Device, zeros_of_states
from omniattn.modules.state_space.mamba2 import Mamba2


class LogLinearMamba2(Mamba2):
    """Mamba-2 whose queries weigh their past by blocks, whose sizes are powers of two.

    With ``[z, u, dt, l] = x W_in``, ``[v, B, C] = silu(conv(u))``, ``dt = softplus(dt + dt_bias)``
    and ``A = -exp(A_log)`` per head:

    ``y = log_linear_attention(C, B, dt v, dt A, softplus(L l)) + D v``; the output is
    ``W_out norm(y * silu(z))``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log, D, L and dt_bias are created in
            fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters as in Mamba2, with H L more rows in in_proj, and L (H, L): names and shapes as in
        fla.

    Reference:
        Guo et al., Log-Linear Attention, 2025, arXiv 2506.04761.

    Example:
        >>> LogLinearMamba2(dim=8, d_state=4, headdim=8)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(Mamba2.Config):
        """Sizes and options, as in Mamba2.

        Args:
            num_levels: number L of levels; sequences have at most 2^(L-1) tokens.
        """

        num_levels: Size = 15

        @property
        def projected(self) -> int:
            return super().projected + self.num_heads * self.num_levels

    config: Config
    #: Names of the parameters that optimizers do not decay.
    undecayed = ("L",)

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        like = torch.empty_like(self.D)
        self.L = nn.Parameter(like.new_ones(config.num_heads, config.num_levels))

    def reset_parameters(self) -> None:
        """Draws parameters as in Mamba2; sets L to 1."""
        super().reset_parameters()
        if hasattr(self, "L"):
            nn.init.ones_(self.L)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates zeros: `s` (B, H, L, N, P) and `position` (B), the number of tokens, in fp32
        (fp64 for fp64), and `conv`, conv1d's state."""
        c = self.config
        wide = zeros_of_states(self.in_proj.weight, storage)
        like = wide.new_zeros(0, dtype=storage_like(self.in_proj.weight, **storage)["dtype"])
        s = wide.new_zeros(batch, c.num_heads, c.num_levels, c.d_state, c.headdim)
        conv = self.conv1d.new_state(batch, like)
        return RecurrentState(s=s, position=wide.new_zeros(batch), conv=conv)

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        c = self.config
        widths = (c.width, c.conv_width, c.num_heads, c.num_heads * c.num_levels)
        z, u, dt, dl = self.in_proj(x).split(widths, -1)
        before = None if state is None else state["conv"].to(u.dtype)
        u, conv = self.conv1d(u, before, sequences.cu_seqlens)
        shared = c.ngroups * c.d_state
        v, B, C = u.split((c.width, shared, shared), -1)
        v = v.unflatten(-1, (c.num_heads, c.headdim))
        dt = nnf.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias).clamp(*c.dt_limit)
        scales = nnf.softplus(self.L * dl.unflatten(-1, self.L.shape).to(self.L.dtype))
        y, s = functional.log_linear_attention(
            C.unflatten(-1, (c.ngroups, c.d_state)),
            B.unflatten(-1, (c.ngroups, c.d_state)),
            (v * dt[..., None]).to(v.dtype),
            dt * -self.A_log.exp(),
            scales,
            initial_state=None if state is None else state["s"],
            position=None if state is None else state["position"].long(),
            cu_seqlens=sequences.cu_seqlens,
            backend=c.backend,
        )
        y = (y + self.D[:, None] * v).to(v.dtype)
        after = {"s": s, "conv": conv}
        if state is not None:
            packed = sequences.cu_seqlens
            count = x.shape[1] if packed is None else packed.diff()
            after["position"] = state["position"] + count
        return self.out_proj(self.norm(y.flatten(-2), z)), after
