"""Delta rules of fla.ops with several keys for each token: delta product, Comba and GDN-2."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_int
from omniattn.compat._fla.calls import Call, decays_of, fla_function

__all__ = [
    "chunk_comba",
    "chunk_gated_delta_product",
    "chunk_gdn2",
    "fused_recurrent_comba",
    "fused_recurrent_gdn2",
]


@fla_function()
def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Call:
    """Computes :func:`functional.gated_delta_product`.

    The n = num_householder keys of a token follow one another in k (B, n T, H, K), v and beta.
    `cu_seqlens` counts tokens, not keys.
    """
    op = "chunk_gated_delta_product"
    require_int(op, "num_householder", num_householder, 1)
    for name, t in (("k", k), ("v", v), ("beta", beta)):
        if t.ndim < 2 or t.shape[1] != q.shape[1] * num_householder:
            raise ValueError(
                f"{op}: {name} must have num_householder times as many tokens as q, got "
                f"{name}.shape={tuple(t.shape)}, q.shape={tuple(q.shape)}, {num_householder=}"
            )
    k, v, beta = (t.unflatten(1, (q.shape[1], num_householder)) for t in (k, v, beta))
    if g is None:
        return partial(_without_decays, beta), (q, k, v)
    return functional.gated_delta_product, (q, k, v, g, beta)


def _without_decays(
    beta: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    return functional.gated_delta_product(q, k, v, None, beta, **options)


@fla_function()
def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Call:
    """Computes :func:`functional.comba`; p is k if None."""
    return functional.comba, (q, k, v, k if p is None else p, g, beta)


@fla_function()
def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    p: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Call:
    """Computes `chunk_comba`, with p before v as in fla; beta is 1 if None."""
    beta = g.new_ones(v.shape[:3]) if beta is None else beta
    return functional.comba, (q, k, v, k if p is None else p, g, beta)


@fla_function(without_effect={"safe_gate"})
def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.gated_delta_rule_2`.

    With `use_gate_in_kernel` the decays are those of `chunk_kda`. `safe_gate` has no effect. With
    `return_intermediate_states` a third result has the states before every 64 tokens.
    """
    if use_gate_in_kernel:
        g = decays_of("chunk_gdn2", g, A_log, dt_bias, lower_bound)
    return functional.gated_delta_rule_2, (q, k, v, g, b, w)


@fla_function(without_effect={"safe_gate"})
def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes `chunk_gdn2`."""
    if use_gate_in_kernel:
        g = decays_of("fused_recurrent_gdn2", g, A_log, dt_bias, lower_bound)
    return functional.gated_delta_rule_2, (q, k, v, g, b, w)
