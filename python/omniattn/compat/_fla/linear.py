"""Linear attention, GLA, retention and RWKV of fla.ops."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_device, require_shape, require_tensor
from omniattn.compat._cp import FLACPContext
from omniattn.compat._errors import errors_of, require_form
from omniattn.compat._fla.calls import Call, fla_function, require_inputs, run
from omniattn.reference.precision import widen

__all__ = [
    "chunk_gla",
    "chunk_hgrn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "fused_chunk_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_gla",
    "fused_recurrent_hgrn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_rwkv4",
    "fused_recurrent_rwkv6",
    "fused_recurrent_rwkv7",
]


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
    require_inputs(op, scale, q=q, k=k, v=v)
    given = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "reverse": reverse}
    if not normalize:
        given |= {"scale": scale, "output_final_state": output_final_state}
        decays = widen(q).new_zeros(v.shape[:3])
        return run(op, functional.gated_linear_attention, (q, k, v, decays), given)
    if initial_state is not None:
        pair = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
        matrix, total = pair
        require_tensor(op, "initial_state", matrix)
        if total is not None:
            require_tensor(op, "initial_state", total)
        sums = matrix.new_zeros(matrix.shape[:-1]) if total is None else total.squeeze(1)
        given["initial_state"] = torch.cat((matrix, sums[..., None].to(matrix.dtype)), -1)
    # A scale of q cancels, except for the constant that fla adds to the denominator.
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale == 0:
        q = q * 0
    call = partial(
        functional.linear_attention,
        feature_map="identity",
        normalize=True,
        eps=1e-10 / (abs(scale) or 1),
    )
    o, state = run(op, call, (q, k, v), given | {"output_final_state": True})
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
    """Computes :func:`functional.linear_attention` with q and k as features.

    With `normalize` a state is a pair: (N, H, K, V) and the sum of the keys (N, 1, H, K). The
    magnitude of the denominator is clamped to at least 1e-10; fla adds 1e-10 instead.
    """
    state = (initial_state, output_final_state)
    return _linear("chunk_linear_attn", q, k, v, scale, *state, normalize, cu_seqlens)


def fused_chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Computes `chunk_linear_attn`."""
    state = (initial_state, output_final_state)
    return _linear("fused_chunk_linear_attn", q, k, v, scale, *state, normalize, cu_seqlens)


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
    """Computes `chunk_linear_attn`; `reverse` goes from the last token to the first."""
    state = (initial_state, output_final_state)
    op = "fused_recurrent_linear_attn"
    return _linear(op, q, k, v, scale, *state, normalize, cu_seqlens, reverse)


@fla_function()
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
) -> Call:
    """Computes :func:`functional.gated_linear_attention`."""
    return functional.gated_linear_attention, (q, k, v, g)


@fla_function()
def fused_chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes `chunk_gla`; newer versions of fla recommend that function instead."""
    return functional.gated_linear_attention, (q, k, v, g)


@fla_function(also={"gv"})
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
) -> Call:
    """Computes :func:`functional.gated_linear_attention`."""
    if gk is None:
        gk = widen(q).new_zeros(v.shape[:3])
    if gv is None:
        return functional.gated_linear_attention, (q, k, v, gk)
    return _with_decays_of_values, (q, k, v, gk, gv)


def _with_decays_of_values(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, gv: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    return functional.gated_linear_attention(q, k, v, g, gv=gv, **options)


@fla_function()
def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.retention`."""
    return functional.retention, (q, k, v)


@fla_function()
def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.retention`."""
    return functional.retention, (q, k, v)


@fla_function()
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
) -> Call:
    """Computes :func:`functional.retention`."""
    return functional.retention, (q, k, v)


@fla_function()
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
) -> Call:
    """Computes :func:`functional.rwkv6`, whose scale is K^-0.5 by default here."""
    return partial(functional.rwkv6, u=u), (r, k, v, w)


@fla_function()
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
) -> Call:
    """Computes :func:`functional.rwkv6`, whose scale is K^-0.5 by default here."""
    return partial(functional.rwkv6, u=u), (r, k, v, w)


@fla_function(without_effect={"safe_gate", "lower_bound"})
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
    *,
    cp_context: FLACPContext | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.rwkv7`. `safe_gate` and `lower_bound` have no effect; for
    `cp_context` see `build_cp_context`."""
    return functional.rwkv7, (r, w, k, v, a, b)


@fla_function()
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
) -> Call:
    """Computes :func:`functional.rwkv7`, whose scale is K^-0.5 by default here."""
    return functional.rwkv7, (r, w, k, v, a, b)


@fla_function()
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
) -> Call:
    """Computes :func:`functional.rwkv7` with a = -kk and b = kk * a."""
    op = "fused_mul_recurrent_rwkv7"
    require_shape(op, "kk", kk, tuple(a.shape))
    require_device(op, "kk", kk, a, "a")
    return functional.rwkv7, (r, w, k, v, -kk, kk * a)


@fla_function()
def chunk_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.linear_scan`. Takes `cu_seqlens` too, which fla's does not."""
    return functional.linear_scan, (x, g)


@fla_function()
def fused_recurrent_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.linear_scan`."""
    return functional.linear_scan, (x, g)


def fused_recurrent_rwkv4(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes :func:`functional.rwkv4` with exp(w) and states (B, 3, 1, C)."""
    op = "fused_recurrent_rwkv4"
    require_inputs(op, None, w=w, u=u, k=k, v=v, state=state)
    require_form(op, "state", state, "B, 3, 1, C")
    with errors_of(op, initial_state="state"):
        y, after = functional.rwkv4(w.exp(), u, k, v, initial_state=state.squeeze(2))
    return y, after[:, :, None]
