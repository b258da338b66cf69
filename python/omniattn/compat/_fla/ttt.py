"""TTT-Linear of fla.ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_shape, require_tensor, shown
from omniattn.compat._errors import errors_of, require_form
from omniattn.functional.recurrences._common import edge
from omniattn.reference.precision import widen

__all__ = ["chunk_ttt_linear", "fused_chunk_ttt_linear"]


def chunk_ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    initial_state: Tensor | None = None,
    initial_state_bias: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Computes :func:`functional.ttt_linear`; returns o, the last weights and the last bias.

    eta is (B, T, H, 1), or a number. The states have taken the step of a last mini-batch that is
    not complete, and tokens after them begin a mini-batch. `cu_seqlens_cpu` has no effect.
    """
    return _run("chunk_ttt_linear", locals())


def fused_chunk_ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    initial_state: Tensor | None = None,
    initial_state_bias: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Computes `chunk_ttt_linear`."""
    return _run("fused_chunk_ttt_linear", locals())


def _run(op: str, given: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    for name, value in given["options"].items():
        raise NotImplementedError(f"{op}: {name} is not supported, got {name}={shown(value)}")
    q, k, v, eta, boundaries = (given[n] for n in ("q", "k", "v", "eta", "cu_seqlens"))
    require_tensor(op, "q", q)
    require_form(op, "q", q, "B, T, H, D")
    heads = q.shape[:3]
    if isinstance(eta, Tensor):
        require_shape(op, "eta", eta, (*heads, 1))
        eta = eta[..., 0]
    else:
        eta = torch.full(heads, float(eta), dtype=widen(q).dtype, device=q.device)
    count = q.shape[0] if boundaries is None else len(boundaries) - 1
    state = []
    for name, rows in (("initial_state", q.shape[3]), ("initial_state_bias", 1)):
        t, shape = given[name], (count, q.shape[2], rows, q.shape[3])
        t = widen(q).new_zeros(shape) if t is None else t
        require_tensor(op, name, t)
        require_shape(op, name, t, shape)
        state.append(t)
    weights, bias = state[0], state[1][:, :, 0]
    with errors_of(op, mini_batch_size="chunk_size"):
        o, (weights, bias, dw, db) = functional.ttt_linear(
            *(q, k, v, given["w"], given["b"], eta),
            scale=given["scale"],
            eps=given["eps"],
            mini_batch_size=given["chunk_size"],
            initial_state=(weights, bias, torch.zeros_like(weights), torch.zeros_like(bias)),
            cu_seqlens=boundaries,
        )
    if not given["output_final_state"]:
        return o, None, None
    step = edge(eta, boundaries, eta.new_zeros(count, q.shape[2])).to(weights.dtype)
    weights = weights - step[..., None, None] * dw
    return o, weights, (bias - step[..., None] * db)[:, :, None]
