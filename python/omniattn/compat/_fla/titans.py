"""Titans of fla.ops."""

from __future__ import annotations

from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_shape, require_tensor
from omniattn.compat._errors import errors_of, require_form

__all__ = ["chunk_titans_linear"]


def chunk_titans_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    theta: Tensor,
    alpha: Tensor,
    eta: Tensor,
    eps: float,
    chunk_size: int,
    initial_state: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Computes :func:`functional.titans_linear`; returns o and the last weights.

    q, k and v are (B, H, T, D), theta, alpha and eta (B, H, T, 1), as in fla. The gradient of the
    norm is the exact one, where fla lacks parentheses, and T need not be a multiple of
    `chunk_size`.
    """
    op = "chunk_titans_linear"
    require_tensor(op, "q", q)
    require_form(op, "q", q, "B, H, T, D")
    rows, gates = {"q": q, "k": k, "v": v}, {"theta": theta, "alpha": alpha, "eta": eta}
    for names, shape in ((rows, tuple(q.shape)), (gates, (*q.shape[:3], 1))):
        for name, t in names.items():
            require_tensor(op, name, t)
            require_shape(op, name, t, shape)
    state = None
    if initial_state is not None:
        require_tensor(op, "initial_state", initial_state)
        shape = (*q.shape[:2], q.shape[3], q.shape[3])
        require_shape(op, "initial_state", initial_state, shape)
        state = (initial_state, initial_state.new_zeros(shape), initial_state)
    with errors_of(op, mini_batch_size="chunk_size"):
        o, (weights, _, _) = functional.titans_linear(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            theta[..., 0].transpose(1, 2),
            alpha[..., 0].transpose(1, 2),
            eta[..., 0].transpose(1, 2),
            w,
            b,
            eps=eps,
            mini_batch_size=chunk_size,
            initial_state=state,
        )
    return o.transpose(1, 2), weights if output_final_state else None
