"""Delta rules of fla.ops: plain, gated, Kimi's, and DPLR and IPLR."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_shape
from omniattn.compat._cp import FLACPContext
from omniattn.compat._fla.calls import Call, beta_of, decays_of, delta_call, fla_function
from omniattn.compat._fla.parts import l2norm
from omniattn.reference.precision import widen

__all__ = [
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gated_oja_rule",
    "chunk_gdn",
    "chunk_iplr_delta_rule",
    "chunk_kda",
    "fused_chunk_delta_rule",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_oja_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_iplr_delta_rule",
    "fused_recurrent_kda",
]


@fla_function()
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.delta_rule`."""
    return functional.delta_rule, (q, k, v, beta)


@fla_function()
def fused_chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes `chunk_delta_rule`; newer versions of fla recommend that function instead."""
    return functional.delta_rule, (q, k, v, beta)


@fla_function()
def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Call:
    """Computes :func:`functional.delta_rule`; beta is 1 if None, and may be (B, T, H, V)."""
    beta = _ones(v, q) if beta is None else beta
    return delta_call("fused_recurrent_delta_rule", functional.delta_rule, (q, k, v), beta)


@fla_function()
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cp_context: FLACPContext | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.gated_delta_rule`.

    With `use_gate_in_kernel` the decays are ``-exp(A_log) softplus(g + dt_bias)``. With a
    `cp_context` other ranks have other tokens of the row, see `build_cp_context`.
    """
    if use_gate_in_kernel:
        g = decays_of("chunk_gated_delta_rule", g, A_log, dt_bias, None)
    beta = beta_of("chunk_gated_delta_rule", beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return functional.gated_delta_rule, (q, k, v, g, beta)


@fla_function()
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.gated_delta_rule` with decays g (B, T, H), or
    :func:`functional.kimi_delta_attention` with gk (B, T, H, K); g and gk are added.

    gv, decays of the values, must be None. beta is 1 if None, and may be (B, T, H, V).
    """
    op = "fused_recurrent_gated_delta_rule"
    beta = _ones(v, q) if beta is None else beta
    beta = beta_of(op, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if use_gate_in_kernel:
        if g is None:
            raise ValueError(f"{op}: g must be given with use_gate_in_kernel=True, got g=None")
        g = decays_of(op, g, A_log, dt_bias, None)
    if gk is None:
        g = widen(q).new_zeros(v.shape[:3]) if g is None else g
        return delta_call(op, functional.gated_delta_rule, (q, k, v, g), beta)
    if g is not None:
        require_shape(op, "gk", gk, (*g.shape, q.shape[-1]))
        gk = widen(gk) + widen(g)[..., None]
    return delta_call(op, functional.kimi_delta_attention, (q, k, v, gk), beta)


@fla_function()
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cp_context: FLACPContext | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.kimi_delta_attention`.

    With `use_gate_in_kernel` the decays are ``-exp(A_log) softplus(g + dt_bias)``, or
    ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``. `safe_gate` has no effect. With
    `return_intermediate_states` a third result has the states before every 64 tokens. With a
    `cp_context` other ranks have other tokens of the row, see `build_cp_context`.
    """
    if use_gate_in_kernel:
        g = decays_of("chunk_kda", g, A_log, dt_bias, lower_bound)
    beta = beta_of("chunk_kda", beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return functional.kimi_delta_attention, (q, k, v, g, beta)


@fla_function(without_effect={"safe_gate"})
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes `chunk_kda`; beta may be (B, T, H, V)."""
    op = "fused_recurrent_kda"
    if use_gate_in_kernel:
        g = decays_of(op, g, A_log, dt_bias, lower_bound)
    beta = beta_of(op, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return delta_call(op, functional.kimi_delta_attention, (q, k, v, g), beta)


@fla_function(without_effect={"safe_gate", "lower_bound"})
def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cp_context: FLACPContext | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.dplr_delta_rule`. `safe_gate` and `lower_bound` have no effect;
    for `cp_context` see `build_cp_context`."""
    return functional.dplr_delta_rule, (q, k, v, a, b, gk)


@fla_function()
def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Call:
    """Computes :func:`functional.dplr_delta_rule`."""
    return functional.dplr_delta_rule, (q, k, v, a, b, gk)


@fla_function()
def chunk_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.dplr_delta_rule` without a decay."""
    return functional.dplr_delta_rule, (q, k, v, a, b, 0 * _ones(v, q))


@fla_function()
def fused_recurrent_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Call:
    """Computes :func:`functional.dplr_delta_rule` without a decay."""
    return functional.dplr_delta_rule, (q, k, v, a, b, 0 * _ones(v, q))


def _ones(v: Tensor, q: Tensor) -> Tensor:
    return widen(q).new_ones(v.shape[:3])


@fla_function(also={"gv"})
def chunk_gated_oja_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gv: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_q_l2norm: bool = False,
    use_k_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.gated_oja_rule`, of rows of length 1 if their flag is True."""
    return _oja(q, k, v, gv, beta, use_q_l2norm, use_k_l2norm)


@fla_function(also={"gv"})
def fused_recurrent_gated_oja_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_q_l2norm: bool = False,
    use_k_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes `chunk_gated_oja_rule`; beta is 1 by default."""
    return _oja(q, k, v, gv, beta, use_q_l2norm, use_k_l2norm)


def _oja(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gv: Tensor | None,
    beta: Tensor | None,
    unit_q: bool,
    unit_k: bool,
) -> Call:
    q, k = l2norm(q) if unit_q else q, l2norm(k) if unit_k else k
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    if gv is None:
        gv = widen(v).new_zeros(v.shape)
    return functional.gated_oja_rule, (q, k, v, gv, beta)


#: Shorter names of fla.
chunk_gdn, fused_recurrent_gdn = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
