"""Rodimus of `fla.layers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.compat._errors import errors_of
from omniattn.compat._fla.conv import ShortConvolution
from omniattn.compat.fla_layers.base import RecurrentLayer
from omniattn.modules.recurrent.rodimus import recurrence


class RodimusAttention(RecurrentLayer):
    """Rodimus, see :class:`modules.Rodimus`.

    Args:
        block_type: must be "rodimus"; "rodimus_plus" of fla hands states to another layer.
        mode: "chunk" or "fused_recurrent"; has no effect.
        hidden_size: width of x and y.
        input_gate_low_rank: width between the two layers of the gate of v, or "auto".
        expand_ratio: width of q and k.
        use_short_conv, conv_size, conv_bias: short convolution.
        norm_eps: eps of the output norm.
        k_norm_eps: must be None, for 1e-12.
        residual_in_fp32: True for a residual weight in fp32; sums are in fp32 either way.
        layer_idx: number of the layer, for a cache.
    """

    def __init__(
        self,
        block_type: str = "rodimus",
        mode: str = "chunk",
        hidden_size: int = 1024,
        input_gate_low_rank: float | str | None = "auto",
        expand_ratio: int = 64,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = True,
        norm_eps: float = 1e-5,
        k_norm_eps: float | None = None,
        residual_in_fp32: bool = True,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        for name, given, wanted in (
            ("block_type", block_type, "rodimus"),
            ("k_norm_eps", k_norm_eps, None),
        ):
            if given != wanted:
                raise NotImplementedError(
                    f"RodimusAttention: {name} must be {wanted!r}, got {name}={shown(given)}"
                )
        self.hidden_size, self.norm_eps, self.use_short_conv = hidden_size, norm_eps, use_short_conv
        self.d_inner, self.mem_size = -(-2 * hidden_size // 8) * 8, expand_ratio
        auto = input_gate_low_rank == "auto"
        rank = max(hidden_size // 64, 16) if auto else int(input_gate_low_rank or 0)
        wide, size = self.d_inner, expand_ratio
        self.gate_proj = nn.Linear(hidden_size, wide, bias=False)
        self.up_proj = nn.Linear(hidden_size, wide, bias=False)
        self.activation_norm = nn.Module()
        self.activation_norm.weight = nn.Parameter(torch.ones(wide))
        self.down_proj = nn.Linear(wide, hidden_size, bias=False)
        if use_short_conv:
            self.short_conv = ShortConvolution(wide, conv_size, conv_bias, "silu")
        dtype = torch.float32 if residual_in_fp32 else None
        self.residual_weight = nn.Parameter(torch.ones(wide, dtype=dtype))
        self.k_proj = nn.Linear(wide, size, bias=False)
        self.q_proj = nn.Linear(wide, size, bias=False)
        self.g_gate_proj, self.tau_gate_proj = nn.Linear(wide, size), nn.Linear(wide, size)
        self.i_gate_proj = nn.Sequential(nn.Linear(wide, rank, bias=False), nn.Linear(rank, wide))

    def _convolved(
        self, x: Tensor, state: dict[str, Any] | None, use_cache: bool | None, **options: Any
    ) -> tuple[list[Tensor], Any]:
        h = self.up_proj(x)
        if not self.use_short_conv:
            return [h, h], None
        cache = None if state is None else state["conv_state"]
        u, cache = self.short_conv(h, cache=cache, output_final_state=bool(use_cache), **options)
        return [h, u], cache

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        options = {name: sequences[name] for name in ("initial_state", "cu_seqlens")}
        with errors_of("RodimusAttention"):
            o, state = recurrence(self, *projected, **options)
            weight: Any = self.activation_norm.weight
            o = functional.rms_norm_gated(
                o, self.gate_proj(x), weight, eps=self.norm_eps, norm_before_gate=False
            )
        y: Tensor = self.down_proj(o)
        return y, state if sequences["output_final_state"] else None
