"""The delta rules of fla.ops: plain, gated, of Kimi, of low rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omniattn import functional
from omniattn.compat._fla import Result, beta_of, decays_of, run
from omniattn.reference.precision import widen

__all__ = [
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
]


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
) -> Result:
    """:func:`functional.delta_rule`."""
    return run(
        "chunk_delta_rule",
        functional.delta_rule,
        (q, k, v, beta),
        initial_state,
        output_final_state,
        cu_seqlens,
        options=options,
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
    )


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
) -> Result:
    """:func:`functional.delta_rule`; beta is 1 where it is None."""
    return run(
        "fused_recurrent_delta_rule",
        functional.delta_rule,
        (q, k, v, widen(q).new_ones(v.shape[:3]) if beta is None else beta),
        initial_state,
        output_final_state,
        cu_seqlens,
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
    )


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
    **options: Any,
) -> Result:
    """:func:`functional.gated_delta_rule`.

    With `use_gate_in_kernel` the decays are ``-exp(A_log) softplus(g + dt_bias)``.
    """
    op = "chunk_gated_delta_rule"
    if use_gate_in_kernel:
        g = decays_of(g, A_log, dt_bias, None)
    return run(
        op,
        functional.gated_delta_rule,
        (q, k, v, g, beta_of(op, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)),
        initial_state,
        output_final_state,
        cu_seqlens,
        state_v_first=state_v_first,
        options=options,
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
    )


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
) -> Result:
    """:func:`functional.gated_delta_rule` of decays g (B, T, H), or
    :func:`functional.kimi_delta_attention` of gk (B, T, H, K); of both, of their sum.

    gv, decays of the values, must be None. beta is 1 where it is None.
    """
    op = "fused_recurrent_gated_delta_rule"
    if g is not None and use_gate_in_kernel:
        g = decays_of(g, A_log, dt_bias, None)
    call = functional.gated_delta_rule if gk is None else functional.kimi_delta_attention
    decay = gk if gk is not None else widen(q).new_zeros(v.shape[:3]) if g is None else g
    if gk is not None and g is not None:
        decay = widen(gk) + widen(g)[..., None]
    ones = widen(q).new_ones(v.shape[:3])
    beta = ones if beta is None else beta_of(op, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return run(
        op,
        call,
        (q, k, v, decay, beta),
        initial_state,
        output_final_state,
        cu_seqlens,
        state_v_first=state_v_first,
        options=options | {"gv": gv},
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
    )


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
    **options: Any,
) -> Result:
    """:func:`functional.kimi_delta_attention`.

    With `use_gate_in_kernel` the decays are ``-exp(A_log) softplus(g + dt_bias)``, or
    ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``. `safe_gate`, a promise about the gates,
    changes nothing. States within the sequence are not returned.
    """
    op = "chunk_kda"
    if use_gate_in_kernel:
        g = decays_of(g, A_log, dt_bias, lower_bound)
    return run(
        op,
        functional.kimi_delta_attention,
        (q, k, v, g, beta_of(op, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)),
        initial_state,
        output_final_state,
        cu_seqlens,
        state_v_first=state_v_first,
        options=options | {"return_intermediate_states": return_intermediate_states},
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
    )


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
) -> Result:
    """As `chunk_kda`."""
    return chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        **options,
    )


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
    **options: Any,
) -> Result:
    """:func:`functional.dplr_delta_rule`. `safe_gate` and `lower_bound`, promises about gk, change
    nothing."""
    for promise in ("safe_gate", "lower_bound"):
        options.pop(promise, None)
    state = (initial_state, output_final_state, cu_seqlens)
    op, tensors = "chunk_dplr_delta_rule", (q, k, v, a, b, gk)
    return run(op, functional.dplr_delta_rule, tensors, *state, options=options, scale=scale)


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
) -> Result:
    """:func:`functional.dplr_delta_rule`."""
    state = (initial_state, output_final_state, cu_seqlens)
    op, tensors = "fused_recurrent_dplr_delta_rule", (q, k, v, a, b, gk)
    return run(op, functional.dplr_delta_rule, tensors, *state, reverse=reverse, scale=scale)
