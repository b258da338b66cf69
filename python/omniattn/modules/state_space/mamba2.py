"""Mamba-2 layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
from omniattn.functional.recurrences._steps import decay_rates, in_place, ssd_inplace
from omniattn.functional.state_space.ssd import require_limits
from omniattn.modules.base.fields import Backend, Epsilon, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.norm import RMSNormGated
from omniattn.modules.base.short_conv import ShortConvolution
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.caches.cache import storage_like
from omniattn.modules.recurrent.delta_net import draw_rates
from omniattn.modules.recurrent.recurrent import Device, fp32, zeros_of_states
from omniattn.modules.recurrent.state_mixer import StateMixer


class Mamba2(StateMixer):
    """State-space layer with one decay per head and token.

    With ``[z, u, dt] = x W_in`` and ``[v, B, C] = silu(conv(u))``:

    ``h_t = exp(dt_t A) h_{t-1} + dt_t v_t B_t^T``, ``y_t = h_t C_t + D v_t`` with
    ``dt = softplus(dt + dt_bias)`` and ``A = -exp(A_log)`` per head; the output is
    ``W_out norm(y * silu(z))``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log, D and dt_bias are created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters in_proj, conv1d, dt_bias, A_log, D, norm and out_proj: names and shapes as in
        mamba-ssm and transformers.

    Reference:
        Dao and Gu, Transformers are SSMs, 2024, arXiv 2405.21060.

    Example:
        >>> Mamba2(dim=8, d_state=4, headdim=8)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            d_state: N, the size of B and C.
            d_conv: number of taps of the causal convolution.
            expand: the width of v is expand * dim.
            headdim: P, the size of a head of v.
            ngroups: number of groups of heads that share B and C; the norm is per group.
            dt_limit: smallest and largest dt, infinite for no limit.
            bias, conv_bias: True if in_proj and out_proj, or the convolution, have biases.
            norm_eps: eps of the gated norm.
            init_std: standard deviation of the projections' weights.
            backend: as in Attention.
        """

        dim: Size
        d_state: int = 128
        d_conv: int = 4
        expand: int = 2
        headdim: Size = 64
        ngroups: Size = 1
        dt_limit: tuple[float, float] = (0.0, math.inf)
        bias: bool = False
        conv_bias: bool = True
        norm_eps: Epsilon = 1e-5
        init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("dim", "d_state", "d_conv", "expand", "headdim", "ngroups"):
                if getattr(self, name) < 1:
                    raise ValueError(
                        f"Mamba2: {name} must be at least 1, got {name}={getattr(self, name)}"
                    )
            require_limits("Mamba2", self.dt_limit, softplus=True)
            if self.width % self.headdim:
                raise ValueError(
                    "Mamba2: expand * dim must be a multiple of headdim, got "
                    f"expand={self.expand}, dim={self.dim}, headdim={self.headdim}"
                )
            if self.num_heads % self.ngroups:
                raise ValueError(
                    "Mamba2: ngroups must divide the number of heads, got "
                    f"ngroups={self.ngroups}, expand * dim / headdim={self.num_heads}"
                )

        @property
        def width(self) -> int:
            """Width of v and z."""
            return self.expand * self.dim

        @property
        def num_heads(self) -> int:
            return self.width // self.headdim

        @property
        def conv_width(self) -> int:
            """Number of channels of the convolution: v, B and C."""
            return self.width + 2 * self.ngroups * self.d_state

        @property
        def projected(self) -> int:
            """Number of channels of in_proj."""
            return self.width + self.conv_width + self.num_heads

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        own: dict[str, Any] = {"bias": c.bias, "init_std": c.init_std, "backend": c.backend}
        self.in_proj = Linear(c.dim, c.projected, **own, **factory)
        conv = ShortConvolution.Config(c.conv_width, c.d_conv, c.conv_bias, backend=c.backend)
        self.conv1d = ShortConvolution(conv, **factory)
        like = torch.empty(c.num_heads, device=device, dtype=fp32(dtype))
        self.dt_bias, self.A_log, self.D = (nn.Parameter(like.clone()) for _ in range(3))
        norm = RMSNormGated.Config(
            c.width, c.norm_eps, False, num_groups=c.ngroups, casting="llama", backend=c.backend
        )
        self.norm = RMSNormGated(norm, **factory)
        self.out_proj = Linear(c.width, c.dim, **own, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws -A uniformly from (1, 16); sets D to 1.

        Draws softplus(dt_bias) log-uniformly from 1e-3 to 0.1.
        """
        draw_rates(self.A_log, self.dt_bias, 1.0)
        nn.init.ones_(self.D)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates zeros: `s` (B, H, P, N) in fp32 (fp64 for fp64), and `conv`, conv1d's state."""
        c = self.config
        wide = zeros_of_states(self.in_proj.weight, storage)
        like = wide.new_zeros(0, dtype=storage_like(self.in_proj.weight, **storage)["dtype"])
        # The kernels store a state as (N, P).
        s = wide.new_zeros(batch, c.num_heads, c.d_state, c.headdim).mT
        return RecurrentState(s=s, conv=self.conv1d.new_state(batch, like))

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        c = self.config
        packed = sequences.cu_seqlens is not None
        if state is not None and not packed and self._steps_in_place(x, state):
            return self._step(x, state), None
        z, u, dt = self.in_proj(x).split((c.width, c.conv_width, c.num_heads), -1)
        before = None if state is None else state["conv"].to(u.dtype)
        u, conv = self.conv1d(u, before, sequences.cu_seqlens)
        shared = c.ngroups * c.d_state
        v, B, C = u.split((c.width, shared, shared), -1)
        y, s = functional.ssd(
            v.unflatten(-1, (c.num_heads, c.headdim)),
            dt,
            -self.A_log.exp(),
            B.unflatten(-1, (c.ngroups, c.d_state)),
            C.unflatten(-1, (c.ngroups, c.d_state)),
            D=self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_limit=c.dt_limit,
            initial_state=None if state is None else state["s"],
            cu_seqlens=sequences.cu_seqlens,
            backend=c.backend,
        )
        return self.out_proj(self.norm(y.flatten(-2), z)), {"s": s, "conv": conv}

    def _steps_in_place(self, x: Tensor, state: RecurrentState) -> bool:
        """Returns True if x is a single token and the ops can update the state in place."""
        s, conv = state["s"], state["conv"]
        own = self.A_log, self.D, self.dt_bias, self.conv1d.weight
        return (
            x.shape[1] == 1
            and self.config.backend is None
            and conv.dtype == x.dtype == self.conv1d.weight.dtype
            and s.dtype == self.D.dtype == self.A_log.dtype == self.dt_bias.dtype == fp32(x.dtype)
            and (s.mT.is_contiguous() or s.is_contiguous())
            and in_place(x, s, conv, *own)
        )

    def _step(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Computes forward for one token and updates the state in place."""
        c = self.config
        z, u, dt = self.in_proj(x).split((c.width, c.conv_width, c.num_heads), -1)
        taps = state.derived("taps", self.conv1d.weight, self.conv1d.step_taps)
        u, _ = self.conv1d(u, state["conv"], taps=taps)
        shared = c.ngroups * c.d_state
        v, B, C = u.split((c.width, shared, shared), -1)
        least, largest = c.dt_limit
        y = ssd_inplace(
            v.unflatten(-1, (c.num_heads, c.headdim)),
            dt,
            state.derived("A", self.A_log, decay_rates),
            B.unflatten(-1, (c.ngroups, c.d_state)),
            C.unflatten(-1, (c.ngroups, c.d_state)),
            self.D,
            None,
            self.dt_bias,
            state["s"],
            True,
            least,  # -inf needs no special case: softplus is positive
            largest,
        )
        return cast(Tensor, self.out_proj(self.norm(y.flatten(-2), z)))
