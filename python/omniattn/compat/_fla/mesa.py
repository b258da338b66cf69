"""MesaNet and Gated KalmaNet of fla.ops."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_shape, require_tensor
from omniattn.compat._errors import errors_as, errors_of, require_form
from omniattn.reference.precision import compute_dtype

__all__ = [
    "chunk_gka",
    "chunk_mesa_net",
    "fused_recurrent_gka",
    "mesa_net_decoding_one_step",
]

Pair = tuple[Tensor, Tensor]


def chunk_mesa_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lamb: Tensor,
    h_kk_init: Tensor | None = None,
    h_kv_init: Tensor | None = None,
    output_final_state: bool = False,
    max_CG_iteration: int = 30,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Computes :func:`functional.mesa_net`; returns o, H and G. `cu_seqlens_cpu` has no effect."""
    op = "chunk_mesa_net"
    require_form(op, "q", q, "B, T, H, K")
    require_form(op, "v", v, "B, T, H, V")
    state = None
    if h_kk_init is not None or h_kv_init is not None:
        count = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        state = (
            _state(op, "h_kk_init", h_kk_init, q, q, count),
            _state(op, "h_kv_init", h_kv_init, v, q, count),
        )
    with errors_of(op, max_iterations="max_CG_iteration", l2norm="use_qk_l2norm_in_kernel"):
        o, (kk, kv) = functional.mesa_net(
            *(q, k, v, g, beta, lamb),
            max_iterations=max_CG_iteration,
            l2norm=use_qk_l2norm_in_kernel,
            initial_state=state,
            cu_seqlens=cu_seqlens,
        )
    return (o, kk, kv) if output_final_state else (o, None, None)


def _state(
    op: str, name: str, given: Tensor | None, columns: Tensor, q: Tensor, count: int
) -> Tensor:
    """Returns a state (count, H, K, width of columns), zeros if it is not given."""
    shape = (count, q.shape[2], q.shape[3], columns.shape[3])
    if given is None:
        return torch.zeros(shape, dtype=compute_dtype(q), device=q.device)
    require_tensor(op, name, given)
    require_shape(op, name, given, shape)
    return given


def mesa_net_decoding_one_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    lamb: Tensor,
    beta: Tensor,
    prev_h_kk: Tensor,
    prev_h_kv: Tensor,
    max_CG_iteration: int = 30,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes :func:`functional.mesa_net` of one token, q (B, H, K), v (B, H, V), g (B, H)."""
    op = "mesa_net_decoding_one_step"
    for name, t in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        require_form(op, name, t, "B, H" if name in ("g", "beta") else "B, H, D")
    with errors_of(op, max_iterations="max_CG_iteration"):
        o, (kk, kv) = functional.mesa_net(
            *(q[:, None], k[:, None], v[:, None], g[:, None], beta[:, None], lamb),
            max_iterations=max_CG_iteration,
            initial_state=(prev_h_kk, prev_h_kv),
        )
    return o[:, 0], kk, kv


def chunk_gka(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    alpha: Tensor | None = None,
    scale: float | None = None,
    ridge_ratio: float = 0.02,
    num_iter: int = 30,
    initial_state: Pair | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Pair | None]:
    """Computes :func:`functional.gated_kalmanet`; `cu_seqlens_cpu` has no effect.

    `num_iter` is the most steps of conjugate gradients, where fla takes as many of Chebyshev's
    iteration. The function is that of a pull request to fla, commit b22c42ca.
    """
    with errors_of("chunk_gka", max_iterations="num_iter"):
        o, state = functional.gated_kalmanet(
            *(q, k, v, g, gk, alpha),
            scale=scale,
            ridge_ratio=ridge_ratio,
            max_iterations=num_iter,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
        )
    return o, state if output_final_state else None


def fused_recurrent_gka(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    alpha: Tensor | None = None,
    scale: float | None = None,
    ridge_ratio: float = 0.02,
    num_iter: int = 30,
    initial_state: Pair | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Pair | None]:
    """Computes :func:`chunk_gka`, with gradients, which fla's does not have."""
    rest = scale, ridge_ratio, num_iter, initial_state, output_final_state, cu_seqlens
    with errors_as("fused_recurrent_gka", "chunk_gka"):
        return chunk_gka(q, k, v, g, gk, alpha, *rest)
