"""flash-linear-attention 0.5: `fla.ops`, tensors (B, T, H, D).

All return (o, final_state), the latter None without `output_final_state`. `cu_seqlens_cpu`,
`chunk_indices`, `chunk_size` and `disable_recompute` of theirs change speed alone; they are taken
and not used. Formulas, shapes and dtypes are those of the functions of ours that are named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.reference.precision import widen

Result: TypeAlias = tuple[Tensor, Tensor | None]
_SPEED = {"cu_seqlens_cpu", "chunk_indices", "chunk_size", "disable_recompute"}


def _only_speed(op: str, options: dict[str, Any]) -> None:
    """Raises for further options that change results and are given."""
    for name, value in options.items():
        if name not in _SPEED and value is not None and value is not False:
            raise NotImplementedError(f"{op}: {name} is not supported, got {name}={value!r}")


def _run(
    op: str,
    call: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    *,
    reverse: bool = False,
    state_v_first: bool = False,
    options: dict[str, Any] | None = None,
    **given: Any,
) -> Result:
    """`call` of (B, T, ..) tensors, from the end to the start if `reverse`."""
    _only_speed(op, options or {})
    if reverse and cu_seqlens is not None:
        raise NotImplementedError(f"{op}: reverse must be False with cu_seqlens, got reverse=True")
    if reverse:
        tensors = tuple(t.flip(1) for t in tensors)
    if initial_state is not None and state_v_first:
        initial_state = initial_state.mT
    o, state = call(*tensors, initial_state=initial_state, cu_seqlens=cu_seqlens, **given)
    if state_v_first:
        state = state.mT
    return o.flip(1) if reverse else o, state if output_final_state else None


def _gate(g: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, bound: float | None) -> Tensor:
    """Log-decays from raw gates (B, T, H) or (B, T, H, K), A_log (H) and dt_bias (H or H K)."""
    g = widen(g)
    if dt_bias is not None:
        g = g + dt_bias.view(g.shape[2:])
    rate = torch.ones(()) if a_log is None else a_log.exp().view(-1, *(1,) * (g.ndim - 3))
    return -rate * nnf.softplus(g) if bound is None else bound * (rate * g).sigmoid()


def _beta(op: str, beta: Tensor, is_logit: bool, twice: bool) -> Tensor:
    if twice and not is_logit:
        raise ValueError(
            f"{op}: allow_neg_eigval needs use_beta_sigmoid_in_kernel=True, got "
            "use_beta_sigmoid_in_kernel=False"
        )
    if not is_logit:
        return beta
    return widen(beta).sigmoid() * (2 if twice else 1)


def _linear(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: Any,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
    reverse: bool = False,
) -> tuple[Tensor, Any]:
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    given: dict[str, Any] = {"feature_map": "identity", "normalize": normalize, "eps": 1e-10}
    if normalize and initial_state is not None:
        matrix, total = initial_state
        initial_state = torch.cat((matrix, total.squeeze(1)[..., None].to(matrix.dtype)), -1)
    o, state = _run(
        op,
        functional.linear_attention,
        (q, k, v),
        initial_state,
        output_final_state or normalize,
        cu_seqlens,
        reverse=reverse,
        **given,
    )
    if not normalize:
        return o, state
    assert state is not None
    return o, (state[..., :-1] if output_final_state else None, state[..., -1][:, None])


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """:func:`functional.linear_attention` of features q and k.

    With `normalize` states are pairs: (N, H, K, V) and the sum of the keys (N, 1, H, K). The
    denominator is at least 1e-10 in size, where fla adds that.
    """
    state = (initial_state, output_final_state)
    return _linear("chunk_linear_attn", q, k, v, scale, *state, normalize, cu_seqlens)


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """As `chunk_linear_attn`; `reverse` goes from the last token to the first."""
    state = (initial_state, output_final_state)
    op = "fused_recurrent_linear_attn"
    return _linear(op, q, k, v, scale, *state, normalize, cu_seqlens, reverse)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """:func:`functional.gated_linear_attention`."""
    return _run(
        "chunk_gla",
        functional.gated_linear_attention,
        (q, k, v, g),
        initial_state,
        output_final_state,
        cu_seqlens,
        state_v_first=state_v_first,
        options=options,
        scale=scale,
    )


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """:func:`functional.gated_linear_attention`; gv, decays of the values, must be None."""
    return _run(
        "fused_recurrent_gla",
        functional.gated_linear_attention,
        (q, k, v, widen(q).new_zeros(v.shape[:3]) if gk is None else gk),
        initial_state,
        output_final_state,
        cu_seqlens,
        reverse=reverse,
        state_v_first=state_v_first,
        options=options | {"gv": gv},
        scale=scale,
    )


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """:func:`functional.retention`."""
    state = (initial_state, output_final_state, cu_seqlens)
    call = functional.retention
    return _run("chunk_retention", call, (q, k, v), *state, options=options, scale=scale)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """:func:`functional.retention`."""
    return _run(
        "fused_recurrent_retention",
        functional.retention,
        (q, k, v),
        initial_state,
        output_final_state,
        cu_seqlens,
        reverse=reverse,
        state_v_first=state_v_first,
        options=options,
        scale=scale,
    )


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
    return _run(
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
    return _run(
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
        g = _gate(g, A_log, dt_bias, None)
    return _run(
        op,
        functional.gated_delta_rule,
        (q, k, v, g, _beta(op, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)),
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
        g = _gate(g, A_log, dt_bias, None)
    call = functional.gated_delta_rule if gk is None else functional.kimi_delta_attention
    decay = gk if gk is not None else widen(q).new_zeros(v.shape[:3]) if g is None else g
    if gk is not None and g is not None:
        decay = widen(gk) + widen(g)[..., None]
    ones = widen(q).new_ones(v.shape[:3])
    beta = ones if beta is None else _beta(op, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _run(
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
        g = _gate(g, A_log, dt_bias, lower_bound)
    return _run(
        op,
        functional.kimi_delta_attention,
        (q, k, v, g, _beta(op, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)),
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


def chunk_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """:func:`functional.rwkv6`, whose scale is K^-0.5 by default here."""
    state = (initial_state, output_final_state, cu_seqlens)
    return _rwkv6("chunk_rwkv6", r, k, v, w, u, scale, *state, False, options)


def fused_recurrent_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """:func:`functional.rwkv6`, whose scale is K^-0.5 by default here."""
    state = (initial_state, output_final_state, cu_seqlens)
    return _rwkv6("fused_recurrent_rwkv6", r, k, v, w, u, scale, *state, reverse, options)


def _rwkv6(
    op: str,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    reverse: bool,
    options: dict[str, Any],
) -> Result:
    def call(r: Tensor, k: Tensor, v: Tensor, w: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        return functional.rwkv6(r, k, v, w, u, scale=scale, **given)

    state = (initial_state, output_final_state, cu_seqlens)
    return _run(op, call, (r, k, v, w), *state, reverse=reverse, options=options)


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """:func:`functional.rwkv7`. `safe_gate` and `lower_bound`, promises about w, change nothing."""
    for promise in ("safe_gate", "lower_bound"):
        options.pop(promise, None)
    state = (initial_state, output_final_state, cu_seqlens)
    tensors = (r, w, k, v, a, b)
    return _run("chunk_rwkv7", functional.rwkv7, tensors, *state, options=options, scale=scale)


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """:func:`functional.rwkv7`, whose scale is K^-0.5 by default here."""
    state = (initial_state, output_final_state, cu_seqlens)
    op, tensors = "fused_recurrent_rwkv7", (r, w, k, v, a, b)
    return _run(op, functional.rwkv7, tensors, *state, options=options, scale=scale)


def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """:func:`functional.rwkv7` of a = -kk and b = kk * a."""
    return _run(
        "fused_mul_recurrent_rwkv7",
        functional.rwkv7,
        (r, w, k, v, -kk, kk * a),
        initial_state,
        output_final_state,
        cu_seqlens,
        reverse=reverse,
        options=options,
        scale=scale,
    )


def fused_recurrent_rwkv4(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`functional.rwkv4` of exp(w), with states (B, 3, 1, C)."""
    y, after = functional.rwkv4(w.exp(), u, k, v, initial_state=state.squeeze(2))
    return y, after[:, :, None]


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
    return _run(op, functional.dplr_delta_rule, tensors, *state, options=options, scale=scale)


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
    return _run(op, functional.dplr_delta_rule, tensors, *state, reverse=reverse, scale=scale)
