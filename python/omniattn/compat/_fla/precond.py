"""Preconditioned delta rules of fla.ops."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_shape, require_tensor, shown
from omniattn.compat._errors import errors_of
from omniattn.compat._fla.calls import decays_of, require_inputs
from omniattn.functional.recurrences._common import repeated
from omniattn.reference.precision import compute_dtype

__all__ = [
    "chunk_precond_gated_delta_rule",
    "chunk_precond_kda",
    "fused_recurrent_precond_gated_delta_rule",
    "fused_recurrent_precond_kda",
]

#: o, and the last matrices S and mean squares A if `output_final_state`, else None.
Result: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
#: q, k, v, g, beta, g_atk and beta_atk.
Rows: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Theirs = ParamSpec("Theirs")
#: Options that have no effect: in fla they affect speed, or nothing either.
_WITHOUT_EFFECT = {"cu_seqlens_cpu", "chunk_indices", "disable_recompute", "safe_gate"}
_WITHOUT_EFFECT |= {"solve_tril_precision", "use_qk_l2norm_in_kernel"}
_REFUSED = {"cp_context", "gv", "return_intermediate_states"}


def _precond_function(choose: Callable[Theirs, Rows]) -> Callable[Theirs, Result]:
    """Makes an fla function from one with its signature that returns tensors in our order."""
    signature = inspect.signature(choose)
    op = choose.__name__

    @functools.wraps(choose)
    def function(*args: Theirs.args, **kwargs: Theirs.kwargs) -> Result:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given: dict[str, Any] = dict(bound.arguments)
        unknown = given.pop("options", {}).keys() - _WITHOUT_EFFECT
        for name in sorted(unknown | (_REFUSED & given.keys())):
            value = kwargs.get(name, given.get(name))
            if value is not None and value is not False:
                raise NotImplementedError(
                    f"{op}: {name} is not supported, got {name}={shown(value)}"
                )
        named = {name: given[name] for name in ("q", "k", "v", "g_atk", "beta_atk")}
        require_inputs(op, given["scale"], **named)
        return _run(op, choose(*args, **kwargs), given)

    returned = signature.replace(return_annotation=Result)
    function.__signature__ = returned  # type: ignore[attr-defined]
    function.__annotations__ = {**choose.__annotations__, "return": Result}
    return function


def _run(op: str, rows: Rows, given: dict[str, Any]) -> Result:
    """Runs the rule with the states and options in `given`."""
    q, _, v = rows[:3]
    boundaries, center = given["cu_seqlens"], given["log_atk_scale"]
    v_first, s, a = (
        given[name] for name in ("transpose_state_layout", "initial_state", "initial_A_state")
    )
    initial = None
    if s is not None or a is not None:
        count = q.shape[0] if boundaries is None else len(boundaries) - 1
        wide = torch.empty(0, dtype=compute_dtype(q), device=q.device)
        matrix = (count, v.shape[2], q.shape[3], v.shape[3])
        squares = (count, q.shape[2], q.shape[3])
        if s is None:
            s = wide.new_zeros(matrix)
        else:
            require_tensor(op, "initial_state", s)
            s = s.mT if v_first else s
        a = wide.new_zeros(squares) if a is None else a
        require_tensor(op, "initial_A_state", a)
        require_shape(op, "initial_state", s, matrix)
        require_shape(op, "initial_A_state", a, squares)
        initial = s, a
    with errors_of(op, l2norm="use_qk_l2norm_in_kernel"):
        o, (s, a) = functional.preconditioned_delta_rule(
            *rows,
            -0.2 if center is None else center,
            x=given["x"],
            eps=given["eps"],
            scale=given["scale"],
            l2norm=given.get("use_qk_l2norm_in_kernel", True),
            initial_state=initial,
            cu_seqlens=boundaries,
        )
    if not given["output_final_state"]:
        return o, None, None
    return o, s.mT if v_first else s, a


@_precond_function
def chunk_precond_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_atk: Tensor,
    g: Tensor,
    beta_atk: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_A_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | None = None,
    **options: Any,
) -> Rows:
    """Computes :func:`functional.preconditioned_delta_rule`."""
    return q, k, v, g, beta, g_atk, beta_atk


@_precond_function
def fused_recurrent_precond_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    g_atk: Tensor = None,  # type: ignore[assignment]
    beta_atk: Tensor = None,  # type: ignore[assignment]
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_A_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | None = None,
) -> Rows:
    """Computes :func:`functional.preconditioned_delta_rule`, with decays g (B, T, Hv), gk
    (B, T, Hv, K) or their sum; g and beta are 0 and 1 if None, and gv must be None."""
    op = "fused_recurrent_precond_gated_delta_rule"
    decays = v.new_zeros(v.shape[:3]) if g is None else g
    require_tensor(op, "g", decays)
    if gk is not None:
        require_tensor(op, "gk", gk)
        decays = gk if g is None else gk + decays[..., None]
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    return q, k, v, decays, beta, g_atk, beta_atk


@_precond_function
def chunk_precond_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_atk: Tensor,
    beta_atk: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_A_state: Tensor | None = None,
    output_final_state: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: None = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | None = None,
    solve_tril_precision: str | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **options: Any,
) -> Rows:
    """Computes :func:`functional.preconditioned_delta_rule` with decays of channels.

    q and k get length 1, whatever `use_qk_l2norm_in_kernel` is. With `use_gate_in_kernel` the
    decays are those of `chunk_kda`."""
    if use_gate_in_kernel:
        g = decays_of("chunk_precond_kda", g, A_log, dt_bias, lower_bound)
    return q, k, v, g, beta, g_atk, beta_atk


@_precond_function
def fused_recurrent_precond_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_atk: Tensor,
    beta_atk: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_A_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | None = None,
    **options: Any,
) -> Rows:
    """Computes `chunk_precond_kda`. v may have more heads than q and k, and all gates have its."""
    if use_gate_in_kernel:
        g = decays_of("fused_recurrent_precond_kda", g, A_log, dt_bias, lower_bound)
    if q.ndim == v.ndim == k.ndim == 4 and q.shape[2] and v.shape[2] % q.shape[2] == 0:
        q, k = (repeated(t, v.shape[2] // q.shape[2]) for t in (q, k))
    return q, k, v, g, beta, g_atk, beta_atk
