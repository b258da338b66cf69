"""Base of Mamba and Longhorn: a gated scan of channels after a causal convolution."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.functional.recurrences._steps import in_place, selective_scan_inplace
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.short_conv import ShortConvolution
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.caches.cache import storage_like
from omniattn.modules.recurrent.recurrent import fp32, zeros_of_states
from omniattn.modules.recurrent.state_mixer import StateMixer

__all__ = ["GatedScan"]


class GatedScan(StateMixer):
    """Computes ``y = W_out scan(u, delta, B, C, z)`` of ``[u, z] = x W_in``, ``u = silu(conv(u))``.

    A subclass has in_proj, conv1d, out_proj and the skip D (inner), and computes delta, B and C
    from u. Its config has `inner`, `d_state` and `backend`.
    """

    config: Any
    in_proj: Linear
    conv1d: ShortConvolution
    out_proj: Linear
    D: torch.nn.Parameter

    def _add_inputs(self, **factory: Any) -> Callable[..., Linear]:
        """Adds in_proj and conv1d, and returns the function that builds further projections.

        Its arguments are the sizes, whether there is a bias, and the standard deviation.
        """
        c = self.config

        def linear(n_in: int, n_out: int, bias: bool = False, std: float = c.init_std) -> Linear:
            return Linear(Linear.Config(n_in, n_out, bias, std, c.backend), **factory)

        self.in_proj = linear(c.dim, 2 * c.inner, c.bias)
        conv = ShortConvolution.Config(c.inner, c.d_conv, c.conv_bias, backend=c.backend)
        self.conv1d = conv.build(**factory)
        return linear

    @property
    @abstractmethod
    def _parameters_of_scan(self) -> tuple[Tensor, ...]:
        """Parameters of the scan; the last one is the bias (inner) of delta."""

    @property
    def _has_single_steps(self) -> bool:
        """True if the op of single tokens takes B and C of this layer: one group of them."""
        return True

    @abstractmethod
    def _inputs(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns delta (B, T, inner), B and C (B, T, N) or (B, T, G, N)."""

    @abstractmethod
    def _scan(
        self, u: Tensor, delta: Tensor, b: Tensor, rows: Tensor, z: Tensor, **given: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns the output and the last state of the scan."""

    @abstractmethod
    def _rates(self, state: RecurrentState) -> Tensor | None:
        """Returns A without gradient; None for Longhorn's rule."""

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates zeros: `ssm` (B, inner, N) in fp32 (fp64 for fp64) and `conv`, conv1d's state."""
        c = self.config
        wide = zeros_of_states(self.out_proj.weight, storage)
        dtype = storage_like(self.out_proj.weight, **storage)["dtype"]
        conv = self.conv1d.new_state(batch, wide.new_zeros(0, dtype=dtype))
        return RecurrentState(ssm=wide.new_zeros(batch, c.inner, c.d_state), conv=conv)

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        packed = sequences.cu_seqlens is not None
        if state is not None and not packed and self._steps_in_place(x, state):
            return self._step(x, state), None
        u, z = self.in_proj(x).chunk(2, -1)
        before = None if state is None else state["conv"].to(u.dtype)
        u, conv = self.conv1d(u, before, sequences.cu_seqlens)
        y, ssm = self._scan(
            u,
            *self._inputs(u),
            z,
            initial_state=None if state is None else state["ssm"],
            cu_seqlens=sequences.cu_seqlens,
            backend=self.config.backend,
        )
        return self.out_proj(y), {"ssm": ssm, "conv": conv}

    def _steps_in_place(self, x: Tensor, state: RecurrentState) -> bool:
        """Returns True if x is a single token and the ops can update the state in place."""
        ssm, conv = state["ssm"], state["conv"]
        *others, bias = self._parameters_of_scan
        return (
            x.shape[1] == 1
            and self.config.backend is None
            and self._has_single_steps
            and conv.dtype == x.dtype == self.conv1d.weight.dtype
            and all(p.dtype == ssm.dtype for p in others)
            and ssm.dtype == fp32(x.dtype)
            and ssm.is_contiguous()
            and in_place(x, ssm, conv, self.conv1d.weight, bias, *others)
        )

    def _step(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Computes forward for one token and updates the state in place."""
        u, z = self.in_proj(x).chunk(2, -1)
        taps = state.derived("taps", self.conv1d.weight, self.conv1d.step_taps)
        u, _ = self.conv1d(u, state["conv"], taps=taps)
        delta, b, rows = self._inputs(u)
        rates = self._rates(state)
        y = selective_scan_inplace(
            u,
            delta,
            rates,
            b[:, :, None],
            rows[:, :, None],
            self.D,
            z,
            self._parameters_of_scan[-1].to(self.D.dtype),
            state["ssm"],
            rates is not None,
        )
        return cast(Tensor, self.out_proj(y))
