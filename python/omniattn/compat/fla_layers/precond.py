"""Layers with preconditioned delta rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn.compat._fla.parts import fused_kda_gate
from omniattn.compat._fla.precond import (
    chunk_precond_gated_delta_rule,
    fused_recurrent_precond_kda,
)
from omniattn.compat.fla_layers.base import get_layer_cache
from omniattn.compat.fla_layers.delta import (
    DeltaLayer,
    GatedDeltaNet,
    KimiDeltaAttention,
    time_steps,
)


class _Precond(DeltaLayer):
    """Parameters and states of the mean squares of keys."""

    #: Name of the projection of their decays, and least initial rate.
    _decay: str
    _least: float

    def _precondition(self, heads: int, squash_x: float, squash_eps: float, center: float) -> None:
        self.squash_x, self.squash_eps, self.log_atk_scale_init = squash_x, squash_eps, center
        for name in (self._decay, "b_atk_proj"):
            self.add_module(name, nn.Linear(self.hidden_size, heads, bias=False))
        self.log_atk_scale = nn.Parameter(torch.full((heads,), float(center)))
        self.A_log_atk = nn.Parameter(torch.empty(heads).uniform_(self._least, 16).log())
        self.dt_bias_atk = nn.Parameter(time_steps(heads))
        for parameter in (self.log_atk_scale, self.A_log_atk, self.dt_bias_atk):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def _squares(self, x: Tensor, past_key_values: Any) -> dict[str, Any]:
        """Returns the gates, the state and the options of the mean squares of keys."""
        step = self.get_submodule(self._decay)(x).float() + self.dt_bias_atk
        state = get_layer_cache(self, past_key_values)
        return {
            "g_atk": -self.A_log_atk.float().exp() * nnf.softplus(step),
            "beta_atk": self.get_submodule("b_atk_proj")(x).sigmoid(),
            "log_atk_scale": self.log_atk_scale,
            "initial_A_state": None if state is None else state["A_state"],
            "x": self.squash_x,
            "eps": self.squash_eps,
        }


class PrecondGatedDeltaNet(_Precond, GatedDeltaNet):
    """Preconditioned gated DeltaNet, see :func:`functional.preconditioned_delta_rule`.

    Args:
        hidden_size, expand_v, head_dim, num_heads, num_v_heads: see :class:`GatedDeltaNet`.
        mode: "chunk", "fused_recurrent" or "naive"; has no effect.
        use_gate, use_short_conv, allow_neg_eigval, conv_size, conv_bias: see there.
        layer_idx, norm_eps: see there.
        squash_x, squash_eps: x and eps of the function.
        log_atk_scale_init: first values of its log_atk_scale.
    """

    modes = ("chunk", "fused_recurrent", "naive")
    _decay, _least = "a_atk_proj", 0.0

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        squash_x: float = 1.5,
        squash_eps: float = 1e-6,
        log_atk_scale_init: float = -0.2,
    ) -> None:
        super().__init__(
            *(hidden_size, expand_v, head_dim, num_heads, num_v_heads, mode, use_gate),
            *(use_short_conv, allow_neg_eigval, conv_size, conv_bias, layer_idx, norm_eps),
        )
        self._precondition(num_heads, squash_x, squash_eps, log_atk_scale_init)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        if not self.use_short_conv:
            projected = [nnf.silu(t) for t in projected]
        q, k, v = projected
        q, k = (t.unflatten(-1, (-1, self.head_k_dim)) for t in (q, k))
        o, s, a = chunk_precond_gated_delta_rule(
            q=q,
            k=k,
            v=v.unflatten(-1, (-1, self.head_v_dim)),
            g=-self.A_log.float().exp() * nnf.softplus(self.a_proj(x).float() + self.dt_bias),
            beta=self.b_proj(x).sigmoid() * (1 + self.allow_neg_eigval),
            **self._squares(x, given["past_key_values"]),
            **sequences,
        )
        return self._projected_out(o, x), {"recurrent_state": s, "A_state": a}


class PrecondKDA(_Precond, KimiDeltaAttention):
    """Preconditioned Kimi delta attention, see :func:`functional.preconditioned_delta_rule`.

    Args:
        hidden_size, expand_v, head_dim, num_heads, num_v_heads: see :class:`GatedDeltaNet`.
        mode, use_short_conv, allow_neg_eigval: see there.
        safe_gate, lower_bound: see :class:`KimiDeltaAttention`.
        conv_size, conv_bias, layer_idx, norm_eps: see there.
        squash_x, squash_eps, log_atk_scale_init: see :class:`PrecondGatedDeltaNet`.
    """

    _decay, _least = "a_proj", 1.0

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        squash_x: float = 1.5,
        squash_eps: float = 1e-6,
        log_atk_scale_init: float = -0.2,
    ) -> None:
        super().__init__(
            *(hidden_size, expand_v, head_dim, num_heads, num_v_heads, mode, use_short_conv),
            *(allow_neg_eigval, safe_gate, lower_bound, conv_size, conv_bias, layer_idx, norm_eps),
        )
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        nn.init.zeros_(self.dt_bias)
        self._precondition(self.num_v_heads, squash_x, squash_eps, log_atk_scale_init)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        if not self.use_short_conv:
            projected = [nnf.silu(t) for t in projected]
        q, k, v = projected
        q, k, g = (t.unflatten(-1, (-1, self.head_k_dim)) for t in (q, k, self.f_proj(x)))
        beta = self.b_proj(x).sigmoid() * (1 + self.allow_neg_eigval)
        o, s, a = fused_recurrent_precond_kda(
            q=q,
            k=k,
            v=v.unflatten(-1, (-1, self.head_v_dim)),
            g=fused_kda_gate(g, self.A_log, self.dt_bias, lower_bound=self.lower_bound),
            beta=beta.repeat_interleave(self.num_v_heads // self.num_heads, -1),
            **self._squares(x, given["past_key_values"]),
            **sequences,
        )
        return self._projected_out(o, x), {"recurrent_state": s, "A_state": a}
