"""mamba-ssm's Mamba-3 layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn import modules
from omniattn.checks.arguments import shown
from omniattn.compat._errors import require_real
from omniattn.modules.base.state import RecurrentState
from omniattn.modules.state_space.mamba3 import heavy_tail

__all__ = ["Mamba3", "heavy_tail_activation"]


def heavy_tail_activation(x: Tensor) -> Tensor:
    """Computes 1 + x above 0 and 1 / (1 - x) below."""
    require_real("heavy_tail_activation", x=x)
    return heavy_tail(x)


class Mamba3(modules.Mamba3):
    """Computes :class:`omniattn.modules.Mamba3`, with mamba-ssm's arguments and states.

    Args:
        d_model: width of u.
        d_state, expand, headdim, ngroups, rope_fraction: see there.
        A_floor, is_outproj_norm, is_mimo, mimo_rank: see there.
        dt_min, dt_max, dt_init_floor: range and least value of the first steps; other values than
            those of `modules.Mamba3` raise an error.
        fuse_pregate_headwise_norm, chunk_size, dropout, n_layer, kwargs: accepted and ignored, as
            they affect only the speed, or nothing.
        layer_idx: key of the layer's states in `inference_params`.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        fuse_pregate_headwise_norm: bool = True,
        chunk_size: int = 64,
        dropout: float = 0.0,
        layer_idx: int | None = None,
        n_layer: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"dt_min": dt_min, "dt_max": dt_max, "dt_init_floor": dt_init_floor}
        for (name, value), known in zip(given.items(), (0.001, 0.1, 1e-4), strict=True):
            if value != known:
                raise NotImplementedError(f"Mamba3: {name} must be {known}, got {name}={value}")
        config = modules.Mamba3.Config(
            d_model,
            d_state,
            expand,
            headdim,
            ngroups,
            rope_fraction,
            A_floor=A_floor,
            is_mimo=is_mimo,
            mimo_rank=mimo_rank,
            is_outproj_norm=is_outproj_norm,
        )
        super().__init__(config, device=device, dtype=dtype)
        self.layer_idx, self.chunk_size, self.A_floor = layer_idx, chunk_size, A_floor
        self.d_model, self.d_state, self.expand = d_model, d_state, expand
        self.headdim, self.is_mimo, self.is_outproj_norm = headdim, is_mimo, is_outproj_norm
        self.mimo_rank = mimo_rank if is_mimo else 1
        self.d_inner = expand * d_model
        self.nheads, self.num_bc_heads = self.d_inner // headdim, ngroups

    def forward(  # type: ignore[override]
        self,
        u: Tensor,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """Maps u (B, T, d_model) to the same shape; with cu_seqlens B is 1.

        `inference_params` has seqlen_offset, the number of tokens before u, and
        key_value_memory_dict, where states are stored. seq_idx is ignored, as in mamba-ssm.
        """
        require_real("Mamba3", u=u)
        if inference_params is None:
            if cu_seqlens is None:
                return super().forward(u)
            nested = torch.nested.nested_tensor_from_jagged(u[0], cu_seqlens)
            return super().forward(nested).values()[None]
        if cu_seqlens is not None:
            raise NotImplementedError(
                f"Mamba3: cu_seqlens must be None with inference_params, got {shown(cu_seqlens)}"
            )
        states = inference_params.key_value_memory_dict
        if self.layer_idx not in states:
            states[self.layer_idx] = self.allocate_inference_cache(len(u), 0)
        if inference_params.seqlen_offset == 0:
            for t in states[self.layer_idx]:
                t.zero_()
        return self._after(u, states[self.layer_idx])

    def step(
        self,
        u: Tensor,
        angle_state: Tensor,
        ssm_state: Tensor,
        k_state: Tensor,
        v_state: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Maps a token u (B, d_model) to the same shape; updates and returns the states."""
        states = angle_state, ssm_state, k_state, v_state
        return self._after(u[:, None], states)[:, 0], *states

    def allocate_inference_cache(
        self,
        batch_size: int,
        max_seqlen: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        inplace_state: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns zeros in fp32 (fp64 for fp64).

        Angles are (B, H, A), states (B, H, P, N), keys (B, R, H, N) and values (B, H, P).
        """
        state = self.new_state(batch_size, max_seqlen, device=device, dtype=dtype)
        k = state["k"] if self.config.is_mimo else state["k"][:, None]
        return state["theta"], state["s"], k, state["v"]

    def _after(self, u: Tensor, states: tuple[Tensor, ...]) -> Tensor:
        """Computes forward after the tokens in `states` and updates them."""
        theta, s, k, v = states
        k = k if self.config.is_mimo else k[:, 0]
        return super().forward(u, state=RecurrentState(theta=theta, s=s, k=k, v=v))
