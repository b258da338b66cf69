"""Layers with several keys for each token: Comba, gated delta product and gated DeltaNet-2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omniattn.checks.arguments import require_int
from omniattn.compat._fla.calls import decays_of
from omniattn.compat._fla.variants import chunk_comba, chunk_gated_delta_product, chunk_gdn2
from omniattn.compat.fla_layers.delta import DeltaLayer, warn_without_convolutions


class Comba(DeltaLayer):
    """Comba, see :func:`functional.comba`: ``p = sigmoid(decay) k``, and q - D p in place of q.

    Args:
        hidden_size: width of x and y.
        expand_v: width of a head of values, as a multiple of head_dim.
        head_dim, num_heads: width and number of heads of q and k.
        num_v_heads: number of heads of values, a multiple of num_heads.
        mode: "chunk" or "fused_recurrent"; has no effect.
        use_short_conv: False for no short convolutions of q, k and v.
        use_output_gate: False for no gate of the outputs.
        use_output_correction: False for q in place of q - D p.
        use_inner_decay: False for p = k.
        correction_factor: initial value of D.
        conv_size, conv_bias: number of taps and bias of the convolutions.
        layer_idx: number of the layer, for a cache.
        norm_eps: added to the mean square of the outputs.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        use_output_gate: bool = True,
        use_output_correction: bool = True,
        use_inner_decay: bool = True,
        correction_factor: float = 1.0,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        sizes = self._heads(hidden_size, expand_v, head_dim, num_heads, num_v_heads)
        self.use_gate = self.use_output_gate = use_output_gate
        self.use_output_correction, self.use_inner_decay = use_output_correction, use_inner_decay
        keys, values, heads = sizes
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.a_proj = nn.Linear(hidden_size, heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, heads, bias=False)
        if use_inner_decay:
            self.decay = nn.Parameter(torch.ones(num_heads))
        if use_output_correction:
            self.D = nn.Parameter(torch.full((num_heads,), float(correction_factor)))
            self.D._no_weight_decay = True  # type: ignore[attr-defined]
        self._decays(torch.empty(heads).uniform_(0, 16), heads)
        warn_without_convolutions(use_short_conv)
        self._convolutions(use_short_conv, conv_size, conv_bias, "silu", q=keys, k=keys, v=values)
        self._output(norm_eps, "sigmoid")

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, k, v = self._activated(projected)
        q, k = (t.unflatten(-1, (-1, self.head_k_dim)) for t in (q, k))
        p = k * self.decay[:, None].sigmoid() if self.use_inner_decay else k
        if self.use_output_correction:
            q = q - self.D[:, None] * p
        g = decays_of("Comba", self.a_proj(x), self.A_log, self.dt_bias, None)
        o, recurrent = chunk_comba(
            q, k, v.unflatten(-1, (-1, self.head_v_dim)), p, g, self.b_proj(x).sigmoid(),
            use_qk_l2norm_in_kernel=True, **sequences,
        )  # fmt: skip
        return self._projected_out(o, x), recurrent


class GatedDeltaProduct(DeltaLayer):
    """Gated DeltaProduct, see :func:`functional.gated_delta_product`.

    Args:
        hidden_size, expand_v, head_dim, num_heads, num_v_heads, mode: see :class:`Comba`.
        use_output_gate, use_short_conv, conv_size, conv_bias, layer_idx, norm_eps: see there.
        use_forget_gate: False for no decays.
        allow_neg_eigval: False for writing strengths up to 1, not 2.
        num_householder: number of keys of a token.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_output_gate: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        use_forget_gate: bool = True,
        allow_neg_eigval: bool = True,
        num_householder: int = 2,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        require_int("GatedDeltaProduct", "num_householder", num_householder, 1)
        sizes = self._heads(hidden_size, expand_v, head_dim, num_heads, num_v_heads)
        self.use_gate = self.use_output_gate = use_output_gate
        self.use_forget_gate, self.allow_neg_eigval = use_forget_gate, allow_neg_eigval
        self.num_householder = num_householder
        queries, heads = sizes[0], sizes[2]
        keys, values = queries * num_householder, sizes[1] * num_householder
        self.q_proj = nn.Linear(hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.b_proj = nn.Linear(hidden_size, heads * num_householder, bias=False)
        if use_forget_gate:
            self.a_proj = nn.Linear(hidden_size, heads, bias=False)
            self._decays(torch.empty(heads).uniform_(0, 16), heads)
        warn_without_convolutions(use_short_conv)
        widths = {"q": queries, "k": keys, "v": values}
        self._convolutions(use_short_conv, conv_size, conv_bias, "silu", **widths)
        self._output(norm_eps)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, k, v = self._activated(projected)
        count = self.num_householder
        beta = self.b_proj(x).sigmoid() * (1 + self.allow_neg_eigval)
        g = None
        if self.use_forget_gate:
            g = decays_of("GatedDeltaProduct", self.a_proj(x), self.A_log, self.dt_bias, None)
        o, recurrent = chunk_gated_delta_product(
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (count, -1, self.head_k_dim)).flatten(1, 2),
            v.unflatten(-1, (count, -1, self.head_v_dim)).flatten(1, 2),
            g, beta.unflatten(-1, (count, -1)).flatten(1, 2), count,
            use_qk_l2norm_in_kernel=True, **sequences,
        )  # fmt: skip
        return self._projected_out(o, x), recurrent


class GatedDeltaNet2(DeltaLayer):
    """Gated DeltaNet-2, see :func:`functional.gated_delta_rule_2`.

    Args:
        hidden_size, expand_v, head_dim, num_heads, num_v_heads, mode: see :class:`Comba`.
        use_short_conv, conv_size, conv_bias, layer_idx, norm_eps: see there.
        allow_neg_eigval: True for erased shares up to 2.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        sizes = self._heads(hidden_size, expand_v, head_dim, num_heads, num_v_heads)
        self.allow_neg_eigval = allow_neg_eigval
        keys, values, _ = sizes
        if self.num_v_heads % num_heads:
            raise ValueError(
                "GatedDeltaNet2: num_v_heads must be a multiple of num_heads, got "
                f"num_v_heads={num_v_heads}, num_heads={num_heads}"
            )
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self._convolutions(use_short_conv, conv_size, conv_bias, "silu", q=keys, k=keys, v=values)
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, keys, bias=False),
        )
        self.b_proj = nn.Linear(hidden_size, keys, bias=False)
        self.w_proj = nn.Linear(hidden_size, values, bias=False)
        self._decays(torch.empty(num_heads).uniform_(1, 16), keys)
        self._output_of_rank(norm_eps)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, k, v = self._activated(projected)
        b = self.b_proj(x).sigmoid() * (1 + self.allow_neg_eigval)
        w = self.w_proj(x).sigmoid().unflatten(-1, (-1, self.head_v_dim))
        q, k, g, b = (t.unflatten(-1, (-1, self.head_k_dim)) for t in (q, k, self.f_proj(x), b))
        g = decays_of("GatedDeltaNet2", g, self.A_log, self.dt_bias, None)
        g, b = (t.repeat_interleave(self.num_v_heads // self.num_heads, 2) for t in (g, b))
        o, recurrent = chunk_gdn2(
            q, k, v.unflatten(-1, (-1, self.head_v_dim)), g, b, w,
            use_qk_l2norm_in_kernel=True, **sequences,
        )  # fmt: skip
        return self._projected_out(o, x), recurrent
