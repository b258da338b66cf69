"""MesaNet."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn.compat._fla.mesa import chunk_mesa_net
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
