"""MesaNet and Gated KalmaNet."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn.compat._fla.mesa import chunk_gka, chunk_mesa_net
from omniattn.compat._fla.parts import l2norm
from omniattn.compat.fla_layers.delta import DeltaLayer


class MesaNet(DeltaLayer):
    """MesaNet, see :func:`functional.mesa_net`.

    Args:
        hidden_size: width of x and y.
        num_heads, head_dim: number and width of heads.
        mode: "chunk"; has no effect.
        use_output_gate: True for a gate of the outputs.
        use_short_conv: has no effect, as in fla: q and k are always convolved.
        conv_size, conv_bias: short convolutions of q and k.
        layer_idx: number of the layer, for a cache.
        norm_eps: added to the mean square of the outputs.
        lambda_lower_bound: least regularisation.
        max_cg_step_training, max_cg_step_decoding: most steps of conjugate gradients, without
            and with past tokens.
    """

    modes = ("chunk",)
    _projected = ("q", "k")

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 16,
        head_dim: int = 128,
        mode: str = "chunk",
        use_output_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        lambda_lower_bound: float = 0.25,
        max_cg_step_training: int = 30,
        max_cg_step_decoding: int = 30,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        keys, values, heads = self._heads(hidden_size, 1, head_dim, num_heads, None)
        self.use_gate = self.use_output_gate = use_output_gate
        self.lambda_lower_bound = lambda_lower_bound
        self.max_cg_step_training = max_cg_step_training
        self.max_cg_step_decoding = max_cg_step_decoding
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.a_proj = nn.Linear(hidden_size, heads)
        self.b_proj = nn.Linear(hidden_size, heads)
        first = math.log(math.expm1(1 - lambda_lower_bound))
        self.lambda_params = nn.Parameter(torch.full((keys,), first))
        self.lambda_params._no_weight_decay = True  # type: ignore[attr-defined]
        self._convolutions(True, conv_size, conv_bias, "silu", q=keys, k=keys)
        self._output(norm_eps)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in (*projected, self.v_proj(x)))
        state = sequences.pop("initial_state")
        kk, kv = (None, None) if state is None else state
        training, decoding = self.max_cg_step_training, self.max_cg_step_decoding
        lamb = nnf.softplus(self.lambda_params.float()) + self.lambda_lower_bound
        o, kk, kv = chunk_mesa_net(
            *(q, k, v, nnf.logsigmoid(self.a_proj(x).float()), self.b_proj(x).float().sigmoid()),
            lamb.view(self.num_heads, -1),
            h_kk_init=kk,
            h_kv_init=kv,
            max_CG_iteration=training if state is None else decoding,
            use_qk_l2norm_in_kernel=True,
            **sequences,
        )
        return self._projected_out(o, x), (kk, kv)


class GatedKalmaNet(DeltaLayer):
    """Gated KalmaNet, see :func:`functional.gated_kalmanet`.

    The layer is that of a pull request to fla, commit b22c42ca.

    Args:
        hidden_size: width of x and y.
        expand_v: width of a head of values, as a multiple of head_dim.
        head_dim, num_heads: width and number of heads of q and k.
        num_v_heads: number of heads of values, a multiple of num_heads.
        num_kv_heads: number of heads of keys and values, a divisor of num_heads; not together with
            num_v_heads.
        mode: "chunk" or "fused_recurrent"; has no effect.
        use_beta_gate: True for factors of keys and values.
        use_alpha_connection: False for the ridge regression alone.
        use_v_conv: False for no short convolution of v.
        use_forgetting_gate: True for decays of the products of keys with values.
        use_forgetting_gate_kk: True for the same decays of the products of keys.
        gla_rescale: True for outputs times 1 / sqrt(head_dim).
        ridge_ratio, num_iter: strength of the ridge and most steps of the solver.
        use_gate: False for no gate of the outputs.
        conv_size: number of taps of the short convolutions.
        layer_idx: number of the layer, for a cache.
        norm_eps: added to the mean square of the outputs.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        num_kv_heads: int | None = None,
        mode: str = "chunk",
        use_beta_gate: bool = True,
        use_alpha_connection: bool = True,
        use_v_conv: bool = True,
        use_forgetting_gate: bool = True,
        use_forgetting_gate_kk: bool = True,
        gla_rescale: bool = True,
        ridge_ratio: float = 0.02,
        num_iter: int = 30,
        use_gate: bool = True,
        conv_size: int = 4,
        layer_idx: int | None = None,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        if num_v_heads is not None and (num_kv_heads is not None or num_v_heads % num_heads):
            raise ValueError(
                "GatedKalmaNet: num_v_heads must be a multiple of num_heads, and None with "
                f"num_kv_heads, got num_v_heads={num_v_heads}, num_heads={num_heads}, "
                f"num_kv_heads={num_kv_heads}"
            )
        heads = self._heads(hidden_size, expand_v, head_dim, num_heads, num_v_heads)[2]
        self._group(num_kv_heads)
        self.use_beta_gate, self.use_alpha_connection = use_beta_gate, use_alpha_connection
        self.use_v_conv, self.use_forgetting_gate = use_v_conv, use_forgetting_gate
        self.use_forgetting_gate_kk = use_forgetting_gate_kk
        self.scale = head_dim**-0.5 if gla_rescale else 1.0
        self.ridge_ratio, self.num_iter, self.use_gate = ridge_ratio, num_iter, use_gate
        widths = {"q": self.key_dim, "k": self.key_dim_per_group, "v": self.value_dim_per_group}
        for name, width in widths.items():
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, width, bias=False))
        if use_beta_gate:
            self.b_proj = nn.Linear(hidden_size, heads)
        if use_alpha_connection:
            self.alpha_proj = nn.Linear(hidden_size, heads)
        if use_forgetting_gate:
            self.a_proj = nn.Linear(hidden_size, heads, bias=False)
            self._decays(torch.empty(heads).uniform_(0, 16), heads)
        if not use_v_conv:
            del widths["v"]
        self._projected = tuple(widths)
        self._convolutions(True, conv_size, False, "silu", **widths)
        self._output(norm_eps)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        if not self.use_v_conv:
            projected = [*projected, self.get_submodule("v_proj")(x)]
        widths = self.head_dim, self.head_dim, self.head_v_dim
        rows = (t.unflatten(-1, (-1, n)) for t, n in zip(projected, widths, strict=True))
        q, k, v = (t.repeat_interleave(self.num_v_heads // t.shape[2], 2) for t in rows)
        q, k = l2norm(q), l2norm(k)
        if self.use_beta_gate:
            beta = self.b_proj(x).sigmoid()[..., None] + 1e-6
            k, v = (beta * k).to(k.dtype), (beta * v).to(v.dtype)
        g = None
        if self.use_forgetting_gate:
            step = self.a_proj(x).float() + self.dt_bias
            g = -self.A_log.float().exp() * nnf.softplus(step)
        o, recurrent = chunk_gka(
            *(q, k, v, g, g if self.use_forgetting_gate_kk else None),
            self.alpha_proj(x).sigmoid() if self.use_alpha_connection else None,
            scale=self.scale,
            ridge_ratio=self.ridge_ratio,
            num_iter=self.num_iter,
            **sequences,
        )
        return self._projected_out(o, x), recurrent
