"""What the functions of fla share: options, states and gates in fla's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.reference.precision import widen

Result: TypeAlias = tuple[Tensor, Tensor | None]
_SPEED = {"cu_seqlens_cpu", "chunk_indices", "chunk_size", "disable_recompute"}


def _only_speed(op: str, options: dict[str, Any]) -> None:
    """Raises for further options that change results and are given."""
    for name, value in options.items():
        if name not in _SPEED and value is not None and value is not False:
            raise NotImplementedError(f"{op}: {name} is not supported, got {name}={value!r}")


def run(
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


def decays_of(
    g: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, bound: float | None
) -> Tensor:
    """Log-decays from raw gates (B, T, H) or (B, T, H, K), A_log (H) and dt_bias (H or H K)."""
    g = widen(g)
    if dt_bias is not None:
        g = g + dt_bias.view(g.shape[2:])
    rate = torch.ones(()) if a_log is None else a_log.exp().view(-1, *(1,) * (g.ndim - 3))
    return -rate * nnf.softplus(g) if bound is None else bound * (rate * g).sigmoid()


def beta_of(op: str, beta: Tensor, is_logit: bool, twice: bool) -> Tensor:
    if twice and not is_logit:
        raise ValueError(
            f"{op}: allow_neg_eigval needs use_beta_sigmoid_in_kernel=True, got "
            "use_beta_sigmoid_in_kernel=False"
        )
    if not is_logit:
        return beta
    return widen(beta).sigmoid() * (2 if twice else 1)
