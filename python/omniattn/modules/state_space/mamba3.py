"""Mamba-3 layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.modules.base.fields import Backend, Epsilon, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.norm import RMSNorm, RMSNormGated
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.recurrent.recurrent import Device, draw_steps, fp32, zeros_of_states
from omniattn.modules.recurrent.state_mixer import StateMixer


class Mamba3(StateMixer):
    """State-space layer with trapezoidal steps, rotating states and R inputs for each token.

    With ``[z, v, B, C, dt, A, trap, angles] = x W_in``, ``dt = softplus(dt + dt_bias)``,
    ``adt = -max(f(A), A_floor) dt`` and RMS norms of B and C, y is the output of
    `functional.mamba3` with q = C, k = B, and the layer's is ``W_out y``. With `is_outproj_norm`
    ``norm(y_r) * silu(mimo_z_r * z)`` takes the place of ``y_r * silu(mimo_z_r * z)``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; dt_bias, B_bias, C_bias, D and the
            factors mimo_x, mimo_z and mimo_o are created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters in_proj, dt_bias, B_bias, C_bias (H, R, N), B_norm, C_norm, D, norm, out_proj and
        with `is_mimo` mimo_x, mimo_z, mimo_o (H, R, P): names and shapes as in mamba-ssm and fla.

    Reference:
        Lahoti et al., Mamba-3, 2026, arXiv 2603.15569. Verified against `modules/mamba3.py` of
        state-spaces/mamba, commit e9594ce1.

    Example:
        >>> Mamba3(dim=8, d_state=4, headdim=8)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            d_state: N, the size of B and C.
            expand: the width of v is expand * dim.
            headdim: P, the size of a head of v.
            ngroups: number of groups of heads that share B and C, before their biases per head.
            rope_fraction: share of the state that rotates, 0.5 or 1.
            decay: f of the decays: "heavy_tail" for x + 1 above 0 and 1 / (1 - x) below, as in
                mamba-ssm, or "softplus", as in fla.
            A_floor: least -A.
            is_mimo: True for R = mimo_rank inputs and outputs of each token, False for one.
            mimo_rank: R with is_mimo.
            is_outproj_norm: True for a norm of each head before the gate.
            norm_eps: eps of the norms.
            init_std: standard deviation of the projections' weights.
            backend: as in Attention.
        """

        dim: Size
        d_state: Size = 128
        expand: Size = 2
        headdim: Size = 64
        ngroups: Size = 1
        rope_fraction: float = 0.5
        decay: str = "heavy_tail"
        A_floor: float = 1e-4
        is_mimo: bool = False
        mimo_rank: Size = 4
        is_outproj_norm: bool = False
        norm_eps: Epsilon = 1e-5
        init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.width % self.headdim or self.num_heads % self.ngroups:
                raise ValueError(
                    "Mamba3: headdim must divide expand * dim, and ngroups the number of heads, "
                    f"got headdim={self.headdim}, expand={self.expand}, dim={self.dim}, "
                    f"ngroups={self.ngroups}"
                )
            if self.rope_fraction not in (0.5, 1.0):
                raise ValueError(
                    f"Mamba3: rope_fraction must be 0.5 or 1, got {self.rope_fraction}"
                )
            if self.d_state % 2 or self.pairs < 1:
                raise ValueError(
                    "Mamba3: d_state must be even and d_state * rope_fraction at least 2, got "
                    f"d_state={self.d_state}, rope_fraction={self.rope_fraction}"
                )
            if self.decay not in ("heavy_tail", "softplus"):
                raise ValueError(
                    "Mamba3: decay must be 'heavy_tail' or 'softplus', "
                    f"got decay={shown(self.decay)}"
                )
            if not self.A_floor >= 0:
                raise ValueError(f"Mamba3: A_floor must be at least 0, got A_floor={self.A_floor}")

        @property
        def width(self) -> int:
            """Width of v and z."""
            return self.expand * self.dim

        @property
        def num_heads(self) -> int:
            return self.width // self.headdim

        @property
        def rank(self) -> int:
            """Number R of inputs and outputs of a token."""
            return self.mimo_rank if self.is_mimo else 1

        @property
        def pairs(self) -> int:
            """Number of rotated pairs of a state's channels."""
            return int(self.d_state * self.rope_fraction) // 2

        @property
        def parts(self) -> tuple[int, ...]:
            """Widths of z, v, B, C, dt, A, trap and the angles."""
            shared = self.d_state * self.ngroups * self.rank
            return (self.width,) * 2 + (shared,) * 2 + (self.num_heads,) * 3 + (self.pairs,)

    config: Config
    mimo_x: nn.Parameter
    mimo_z: nn.Parameter
    mimo_o: nn.Parameter

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        own: dict[str, Any] = {"init_std": c.init_std, "backend": c.backend}
        self.in_proj = Linear(c.dim, sum(c.parts), False, **own, **factory)
        like = torch.empty(c.num_heads, device=device, dtype=fp32(dtype))
        self.dt_bias, self.D = nn.Parameter(like), nn.Parameter(like.clone())
        rows = like.new_empty(c.num_heads, c.rank, c.d_state)
        self.B_bias, self.C_bias = nn.Parameter(rows), nn.Parameter(rows.clone())
        norm = RMSNorm.Config(c.d_state, c.norm_eps, backend=c.backend)
        self.B_norm, self.C_norm = norm.build(**factory), norm.build(**factory)
        if c.is_mimo:
            for name in ("mimo_x", "mimo_z", "mimo_o"):
                factors = like.new_empty(c.num_heads, c.rank, c.headdim)
                self.register_parameter(name, nn.Parameter(factors))
        if c.is_outproj_norm:
            gated = RMSNormGated.Config(
                c.width, c.norm_eps, num_groups=c.num_heads, backend=c.backend
            )
            self.norm = gated.build(**factory)
        self.out_proj = Linear(c.width, c.dim, False, **own, **factory)
        self.reset_parameters()

    @property
    def undecayed(self) -> tuple[str, ...]:
        """Names of parameters without weight decay."""
        factors = ("mimo_x", "mimo_z", "mimo_o") if self.config.is_mimo else ()
        return ("B_bias", "C_bias", *factors)

    def reset_parameters(self) -> None:
        """Draws softplus(dt_bias) log-uniformly from 1e-3 to 0.1.

        Sets D, B_bias, C_bias and mimo_z to 1, and mimo_x and mimo_o to 1 / R.
        """
        with torch.no_grad():
            draw_steps(self.dt_bias, 1e-3, 0.1, 1e-4)
        for name, parameter in self.named_parameters(recurse=False):
            if name != "dt_bias":
                share = self.config.rank if name in ("mimo_x", "mimo_o") else 1
                nn.init.constant_(parameter, 1 / share)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates zeros in fp32 (fp64 for fp64).

        `theta` (B, H, A) are the angles and `s` (B, H, P, N) the state; `k` (B, H, N), or with
        is_mimo (B, R, H, N), and `v` (B, H, P) are the keys and values of the last token.
        """
        c = self.config
        wide = zeros_of_states(self.in_proj.weight, storage)
        rank = (c.rank,) if c.is_mimo else ()
        return RecurrentState(
            theta=wide.new_zeros(batch, c.num_heads, c.pairs),
            # The kernels store a state as (N, P).
            s=wide.new_zeros(batch, c.num_heads, c.d_state, c.headdim).mT,
            k=wide.new_zeros(batch, *rank, c.num_heads, c.d_state),
            v=wide.new_zeros(batch, c.num_heads, c.headdim),
        )

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        z, v, B, C, dt, A, trap, angles = self.in_proj(x).split(c.parts, -1)
        wide = self.dt_bias.dtype
        dt = nnf.softplus(dt.to(wide) + self.dt_bias)
        rates = heavy_tail if c.decay == "heavy_tail" else nnf.softplus
        adt = -rates(A.to(wide)).clamp(min=c.A_floor) * dt
        z, v = (t.unflatten(-1, (c.num_heads, c.headdim)) for t in (z, v))
        many = (c.rank,) if c.is_mimo else ()
        C, B = (t.unflatten(-1, (*many, c.ngroups, c.d_state)) for t in (C, B))
        C_bias: Tensor = self.C_bias
        B_bias: Tensor = self.B_bias
        mimo: dict[str, Any] = {}
        if c.is_mimo:
            mimo = {"mimo_v": self.mimo_x, "mimo_z": self.mimo_z, "mimo_out": self.mimo_o}
        else:
            C_bias, B_bias = C_bias[:, 0], B_bias[:, 0]
        if c.is_outproj_norm:
            mimo = {name: mimo[name] for name in mimo if name == "mimo_v"}
        names = "theta", "s", "k", "v"
        before = None
        if state is not None:
            before = (state["theta"], state["s"], state["k"], state["v"])
        y, after = functional.mamba3(
            *(self.C_norm(C), self.B_norm(B), v, adt, dt, trap),
            *(C_bias, B_bias, angles[:, :, None], self.D, None if c.is_outproj_norm else z),
            **mimo,
            interleaved=not c.is_mimo,
            initial_state=before,
            cu_seqlens=sequences.cu_seqlens,
            backend=c.backend,
        )
        if c.is_outproj_norm:
            y = self._normed(y, z)
        return self.out_proj(y.flatten(-2).to(x.dtype)), dict(zip(names, after, strict=True))

    def _normed(self, y: Tensor, z: Tensor) -> Tensor:
        """Applies norm and gate to y (B, T, H, P), or to y (B, T, R, H, P) and sums over R."""
        norm = cast(RMSNormGated, self.norm)
        if not self.config.is_mimo:
            return norm(y.flatten(-2), z.flatten(-2)).view_as(y)
        z = (z[:, :, None] * self.mimo_z.transpose(0, 1)).to(y.dtype)
        y = norm(y.flatten(-2), z.flatten(-2)).view_as(y)
        return (y * self.mimo_o.transpose(0, 1)).sum(2)


def heavy_tail(x: Tensor) -> Tensor:
    """Computes 1 + x above 0 and 1 / (1 - x) below."""
    return x.clamp(min=0) + (1 - x.clamp(max=0)).reciprocal()
